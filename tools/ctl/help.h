// Help texts, made from the table of commands.
#pragma once

#include <string>

#include "tools/ctl/command.h"

namespace weft::ctl {

std::string program_help();
// The commands alone: for somebody who typed none.
std::string short_help();
std::string command_help(const Command& command);
// The reference page, docs/weftctl.md.
std::string markdown_reference();

}  // namespace weft::ctl
