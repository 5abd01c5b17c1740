// weftctl from words to exit code, without the process around it (main.cc), so that tests can call it.
#pragma once

#include <string>
#include <vector>

#include "tools/ctl/context.h"

namespace weft::ctl {

// Parses, runs, reports. `context.arguments` is filled in. Returns the exit code.
int run_words(const std::vector<std::string>& words, Context& context);

}  // namespace weft::ctl
