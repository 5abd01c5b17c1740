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
#include "tools/ctl/run.h"

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

std::string hint_of(const Error& error) {
  if (error.code != ErrorCode::kUnavailable) return {};
  return "start weftd, or name its sockets with --state-dir, --control-socket or --client";
}

}  // namespace

int report_error(const Error& error, bool json, Context& context) {
  const int code = exit_code_of(error);
  context.out.flush();
  const std::string hint = hint_of(error);
  if (json) {
    Json document = error_document(error, hint, code);
    // What was done before the failure, or beside it.
    if (context.result) document.update(*context.result);
    context.err << dump(document) << std::endl;
  } else {
    const bool interrupted = client::is_interrupt(error);
    context.err << (interrupted ? "interrupted" : "error: " + error.text()) << std::endl;
    for (const Error& further : context.further_failures) {
      context.err << "error: " + further.text() << std::endl;
    }
    if (!hint.empty()) context.err << "(" << hint << ")" << std::endl;
  }
  return code;
}

int run_words(const std::vector<std::string>& words, Context& context) {
  auto parsed = parse(words);
  if (!parsed) return report_error(parsed.error(), wants_json(words), context);
  context.arguments = parsed->arguments;
  const bool json = context.arguments.json();
  if (parsed->help) {
    put_help(context, parsed->command == nullptr ? program_help() : command_help(*parsed->command));
    return kExitOk;
  }
  if (parsed->command == nullptr && !parsed->version) {
    if (json) {
      return report_error(error(ErrorCode::kInvalidArgument, "a command is needed"), true, context);
    }
    context.err << short_help() << std::flush;
    return kExitUsage;
  }
  if (parsed->command == nullptr) {
    context.out << (json ? dump(document("version", versions_json(nullptr)))
                         : std::string("weftctl ") + kVersion)
                << std::endl;
    return kExitOk;
  }
  const auto outcome = parsed->command->run(context);
  if (!outcome) return report_error(outcome.error(), json, context);
  if (context.result) context.out << dump(*context.result) << std::endl;
  return kExitOk;
}

}  // namespace weft::ctl
