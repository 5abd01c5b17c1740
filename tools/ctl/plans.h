// A recording of plans (weftctl record), read and shown.
//
// The file is a sequence of wire::StepPlan, each after its length as a protobuf varint; the daemon appends to
// it while it records. Needs no daemon.
#pragma once

#include <functional>
#include <string>

#include "proto/vocab/result.h"
#include "proto/worker.pb.h"
#include "tools/ctl/context.h"

namespace weft::ctl {

// Calls `take` with each plan, in order. kNotFound, kIo: the file cannot be read. kBadMessage: it is no
// recording, or ends within a plan; those before have been taken.
Result<void> read_plans(const std::string& path, const std::function<void(wire::StepPlan)>& take);

// One line per step: its rows, and who ran under which grouping. Unless `all`: equal decode steps, one after
// the other and without copies, are one line.
std::string plans_view(const std::vector<wire::StepPlan>& plans, bool all, const Terminal& terminal);

Result<void> run_plans(Context& context);

}  // namespace weft::ctl
