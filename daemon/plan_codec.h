// controlplane::Plan → wire::StepPlan, field by field.
//
// The table writes of a plan are not in the message: the engine applies them to the control arena before it
// publishes. A repeat of a step is the same bytes: encode once, keep the bytes.
#pragma once

#include <string>

#include "controlplane/plan.h"
#include "proto/vocab/clock.h"
#include "proto/worker.pb.h"

namespace weft::daemon {

wire::StepPlan encode_plan(const controlplane::Plan& plan);
// Serialised deterministically. `longest_wait`: of one rank for another.
std::string plan_bytes(const controlplane::Plan& plan, Duration longest_wait);

}  // namespace weft::daemon
