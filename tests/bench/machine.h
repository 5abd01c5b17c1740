// The machine of a run: which cores to pin to, and what to say about it in a report.
#pragma once

#include <nlohmann/json.hpp>

#include "proto/vocab/result.h"
#include "tests/bench/settings.h"

namespace weft::bench {

// Two neighbouring cores that this process may use (weftd takes ranges), not two threads of one core if that
// can be had. With `first` given, that one and the next; kInvalidArgument if one cannot be used. On a machine
// of one core, the same core twice.
Result<CorePair> choose_cores(int first);

// Instruction set, processor, cores, load, build type and settings, for Report.
nlohmann::ordered_json describe_run(const Settings& settings, const CorePair& cores);

}  // namespace weft::bench
