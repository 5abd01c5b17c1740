#include "tools/ctl/help.h"

#include "proto/command_line.h"
#include "tools/ctl/exit_code.h"

namespace weft::ctl {
namespace {

using command_line::two_columns;
using command_line::wrapped;

// "--file PATH", "-w, --watch", "ID"
std::string spelling(const Option& option) {
  std::string names = option.names;
  const size_t comma = names.find(',');
  if (comma != std::string::npos) names.insert(comma + 1, " ");
  return option.value.empty() ? names : names + " " + option.value;
}

bool is_list(const Option& option) {
  return std::holds_alternative<std::vector<uint64_t> Arguments::*>(option.target) ||
         std::holds_alternative<std::vector<uint32_t> Arguments::*>(option.target);
}

// "weftctl explain ID [options]"
std::string usage(const Command& command) {
  std::string out = "weftctl " + command.name;
  bool has_options = false;
  for (const Option& option : command.options) {
    if (!option.positional()) {
      has_options = true;
      continue;
    }
    const std::string word = option.names + (is_list(option) ? "\u2026" : "");
    out += option.required ? " " + word : " [" + word + "]";
  }
  return has_options ? out + " [options]" : out;
}

std::string options_text(const std::vector<Option>& options, bool of_program = false) {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const Option& option : options) rows.emplace_back(spelling(option), option.help);
  if (of_program) {
    rows.emplace_back("-h, --help", "help on weftctl or on a command");
    rows.emplace_back("--version", "weftctl's own version");
  }
  return two_columns(rows);
}

std::string markdown_options(const std::vector<Option>& options) {
  std::string out = "| option | meaning |\n|---|---|\n";
  for (const Option& option : options) out += "| `" + spelling(option) + "` | " + option.help + " |\n";
  return out + "\n";
}

}  // namespace

std::string program_help() {
  std::vector<std::pair<std::string, std::string>> rows, codes;
  for (const Command& command : commands()) rows.emplace_back(command.name, command.summary);
  for (const ExitCodeHelp& row : exit_codes()) codes.emplace_back(std::to_string(row.code), row.meaning);
  return "weftctl talks to weftd.\n\nUsage: weftctl COMMAND [options]\n\nCommands\n" + two_columns(rows) +
         "\nOptions of every command\n" + options_text(global_options(), true) + "\nExit codes\n" +
         two_columns(codes);
}

std::string short_help() {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const Command& command : commands()) rows.emplace_back(command.name, command.summary);
  return "Usage: weftctl COMMAND [options]\n\n" + two_columns(rows) +
         "\nSee weftctl --help, or weftctl COMMAND --help.\n";
}

std::string command_help(const Command& command) {
  std::string out = "weftctl " + command.name + ": " + command.summary + "\n\nUsage: " + usage(command) +
                    "\n\n" + wrapped(command.details, 0);
  if (!command.options.empty()) out += "\nOptions\n" + options_text(command.options);
  out += "\nOptions of every command\n" + options_text(global_options()) + "\nExamples\n";
  for (const std::string& example : command.examples) out += "  " + example + "\n";
  return out;
}

std::string markdown_reference() {
  std::string out =
      "# weftctl\n\n"
      "Talks to weftd. This page is the output of `weftctl help --markdown`; a test keeps it so.\n\n"
      "Results go to the standard output, errors to the standard error: `error: code: text`, or with `-o "
      "json` a\n"
      "document `{\"schema\": 1, \"error\": {\"code\", \"message\", \"field\", \"hint\", \"exit\"}}`. A "
      "result with `-o json` is one\n"
      "document `{\"schema\": 1, \"<command>\": \u2026}` with the fields of the daemon's reply "
      "(proto/control.proto); with\n"
      "`--watch`, one such line per look. Help is `{\"help\": {\"text\"}}`. A command writes one document: "
      "where it fails, the\n"
      "error's has `\"<command>\"`, too, if there is something to show: an answer so far, the requests of "
      "which some failed.\n"
      "Colours appear only on a terminal, and not if `NO_COLOR` is "
      "set.\n\n"
      "## Options of every command\n\n" +
      markdown_options(global_options()) + "## Exit codes\n\n| code | meaning |\n|---|---|\n";
  for (const ExitCodeHelp& row : exit_codes()) {
    out += "| " + std::to_string(row.code) + " | " + row.meaning + " |\n";
  }
  for (const Command& command : commands()) {
    out += "\n## weftctl " + command.name + "\n\n`" + usage(command) + "`\n\n" + wrapped(command.details, 0) +
           "\n";
    if (!command.options.empty()) out += markdown_options(command.options);
    out += "```sh\n";
    for (const std::string& example : command.examples) out += example + "\n";
    out += "```\n";
  }
  return out;
}

}  // namespace weft::ctl
