// main() of a benchmark that starts daemons: options, help, and the work under a guard (guard.h).
#pragma once

#include <functional>
#include <string>

#include "proto/command_line.h"

namespace weft::bench {

// A whole number from low to high; its value is the default that the help shows.
void add_number(CLI::App& app, const char* name, int64_t& value, int64_t low, int64_t high, const char* what);

// The exit code: 0 if `run` says true; 1 if not, with its error printed; 2 if the options are wrong. `ready`:
// the options have been read.
int guarded_main(CLI::App& app, int argc, char** argv, const std::function<void()>& ready,
                 const std::function<Result<bool>(const std::string& folder)>& run);

}  // namespace weft::bench
