// The one table of weftctl's commands: parsing (parse.h), help and the reference page (help.h) come from it.
//
// An option is its spelling, its help and the member of Arguments that it fills. Constant after start.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "proto/vocab/result.h"
#include "tools/ctl/arguments.h"
#include "tools/ctl/context.h"

namespace weft::ctl {

using Target = std::variant<bool Arguments::*, std::string Arguments::*, int32_t Arguments::*,
                            uint32_t Arguments::*, uint64_t Arguments::*, double Arguments::*,
                            std::optional<double> Arguments::*, std::optional<uint32_t> Arguments::*,
                            std::vector<uint32_t> Arguments::*, std::vector<uint64_t> Arguments::*>;

enum class Check {
  kNone,
  kChoice,  // one of `choices`
  // Numbers in parentheses may also be written dcp4 or dcp:4, which a shell does not mind.
  kGrouping,  // tp, dp, dcp(N), dp(N)xtp, dp(N)xdcp(N)
  kIndex,     // copied, copied(N), split, split(N)
};

struct Option {
  std::string names;  // "-w,--watch"; without dashes ("ID") it is a positional argument
  std::string value;  // what the help calls the value; empty for a flag
  std::string help;
  Target target;
  Check check = Check::kNone;
  std::vector<std::string> choices = {};
  bool required = false;

  bool positional() const { return names[0] != '-'; }
};

struct Command {
  std::string name;
  std::string summary;
  std::string details;
  std::vector<Option> options;
  std::vector<std::string> examples;
  Result<void> (*run)(Context& context);
};

const std::vector<Command>& commands();
const std::vector<Option>& global_options();
const Command* find_command(const std::string& name);

}  // namespace weft::ctl
