// weftctl from words to exit code, without the process around it (main.cc), so that tests can call it.
#pragma once

#include <string>
#include <vector>

#include "proto/vocab/result.h"
#include "tools/ctl/context.h"

namespace weft::ctl {

// Says on context.err what failed, as JSON or for people. Returns the exit code.
int report_error(const Error& error, bool json, Context& context);

// Parses, runs, reports. `context.arguments` is filled in. Returns the exit code.
int run_words(const std::vector<std::string>& words, Context& context);

}  // namespace weft::ctl
