#include "tools/ctl/main_run.h"

#include <algorithm>
#include <iostream>

#include "proto/version.h"
#include "tools/client/client.h"
#include "tools/ctl/command.h"
#include "tools/ctl/exit_code.h"
#include "tools/ctl/help.h"
#include "tools/ctl/json.h"
#include "tools/ctl/parse.h"

namespace weft::ctl {
namespace {

// Whether JSON was asked for, also where the rest of the words does not parse.
bool wants_json(const std::vector<std::string>& words) {
  const auto is = [&](size_t i, const char* text) { return i < words.size() && words[i] == text; };
  for (size_t i = 0; i < words.size(); ++i) {
    if (is(i, "-ojson") || is(i, "--output=json")) return true;
    if ((is(i, "-o") || is(i, "--output")) && is(i + 1, "json")) return true;
  }
  return false;
}

}  // namespace

int report_error(const Error& error, bool json, Context& context) {
  const int code = exit_code_of(error);
  context.out.flush();
  if (json) {
    context.err << dump(error_document(error, code)) << std::endl;
  } else {
    const bool interrupted = client::is_interrupt(error);
    context.err << (interrupted ? "interrupted" : "error: " + error.text()) << std::endl;
    for (const Error& further : context.further_failures) {
      context.err << "error: " + further.text() << std::endl;
    }
    if (error.code == ErrorCode::kUnavailable) {
      context.err << "(start weftd, or name its sockets with --state-dir, --control-socket or --client)"
                  << std::endl;
    }
  }
  return code;
}

int run_words(const std::vector<std::string>& words, Context& context) {
  auto parsed = parse(words);
  if (!parsed) return report_error(parsed.error(), wants_json(words), context);
  if (parsed->help) {
    context.out << (parsed->command == nullptr ? program_help() : command_help(*parsed->command))
                << std::flush;
    return kExitOk;
  }
  if (parsed->command == nullptr && !parsed->version) {
    if (parsed->arguments.json()) {
      return report_error(error(ErrorCode::kInvalidArgument, "a command is needed"), true, context);
    }
    context.err << short_help() << std::flush;
    return kExitUsage;
  }
  if (parsed->command == nullptr) {
    context.out << "weftctl " << kVersion << std::endl;
    return kExitOk;
  }
  context.arguments = parsed->arguments;
  const auto outcome = parsed->command->run(context);
  return outcome ? kExitOk : report_error(outcome.error(), context.arguments.json(), context);
}

}  // namespace weft::ctl
