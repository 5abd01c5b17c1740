// From a command line to checked Arguments. Every fault is kInvalidArgument, found before a message leaves.
#pragma once

#include <string>
#include <vector>

#include "proto/vocab/result.h"
#include "tools/ctl/arguments.h"
#include "tools/ctl/command.h"

namespace weft::ctl {

struct Parsed {
  Arguments arguments;
  const Command* command = nullptr;  // null: help on weftctl itself, its version, or no command was given
  bool help = false;
  bool version = false;
};

// `words` without the program's name.
Result<Parsed> parse(const std::vector<std::string>& words);
// "dcp4", "dcp:4", "dcp(4)" to "dcp(4)"; "dp4xdcp2" to "dp(4)xdcp(2)"; "tp" and "dp" as they are.
Result<std::string> normal_grouping(const std::string& text);
// "split(4)", "split4" and "split:4" → "split(4)"; copied likewise. The field is --index.
Result<std::string> normal_index(const std::string& text);

}  // namespace weft::ctl
