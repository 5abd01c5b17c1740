#include <iostream>
#include <random>

#include "proto/command_line.h"
#include "tools/ctl/exit_code.h"
#include "tools/ctl/interrupt.h"
#include "tools/ctl/main_run.h"
#include "tools/ctl/parse.h"
#include "tools/demo/long_prompt.h"
#include "tools/demo/run.h"

namespace {

using weft::ctl::Context;
using weft::demo::DemoOptions;

void add_options(CLI::App& app, DemoOptions& options, weft::ctl::Arguments& arguments) {
  using namespace weft::command_line;
  app.add_option("--context", options.context, "tokens of the first request")
      ->type_name("N")
      ->check(between(int64_t{weft::demo::kLeastTokens}, int64_t{weft::demo::kMostTokens}))
      ->capture_default_str();
  app.add_option("--file", options.source, "file or folder to take the text from")->type_name("PATH");
  app.add_option("--seed", options.seed, "of the facts and the made text (default: a new one each time)")
      ->type_name("N")
      ->check(decimal<uint64_t>());
  app.add_option("--prefill", arguments.prefill, "split of the prompt (default: the daemon's)")
      ->type_name("SPLIT")
      ->check(one_of({"none", "zigzag", "interleave", "contiguous"}));
  app.add_option("--decode", arguments.decode,
                 "grouping while decoding: tp, dp, dcp4 (default: the daemon's)")
      ->type_name("GROUPING");
  app.add_option("--index", arguments.index, "index keys: copied, split, split4 (default: the daemon's)")
      ->type_name("MODE");
  app.add_option("--speculative", arguments.speculative, "where drafts come from (default: the daemon's)")
      ->type_name("SOURCE")
      ->check(one_of({"off", "lookup", "mtp"}));
  app.add_option("--draft-tokens", arguments.draft_tokens,
                 "drafts in one step at most (default: the daemon's)")
      ->type_name("K")
      ->check(decimal<uint32_t>());
  app.add_option("-o,--output", arguments.output, "form of the report")
      ->type_name("FORM")
      ->check(one_of({"table", "json"}))
      ->capture_default_str();
  app.add_option("--state-dir", arguments.state_dir, "the daemon's state folder")->type_name("FOLDER");
  app.add_option("--control-socket", arguments.control_socket, "the daemon's control socket")
      ->type_name("PATH");
  app.add_option("--client", arguments.client_endpoint, "the daemon's client endpoint")
      ->type_name("ENDPOINT");
  app.add_option("--timeout", arguments.timeout_s, "limit of each turn (default: none); 0: none")
      ->type_name("SECONDS")
      ->check(between(0.0, 1e9));
}

}  // namespace

// Exit codes as weftctl's; 1 also when an answer was wrong or bytes moved at the switch.
int main(int count, char** words) {
  DemoOptions options;
  std::random_device random;
  options.seed = random() % 1'000'000;
  options.cache_salt = "demo-" + std::to_string(random());
  Context context{{}, std::cin, std::cout, std::cerr, weft::ctl::terminal_of_process()};
  context.open_interrupts = weft::ctl::interrupt_descriptor;
  const auto fail = [&](const weft::Error& error) {
    return weft::ctl::report_error(error, context.arguments.json(), context);
  };
  CLI::App app("Sends a long document with three facts to weftd, asks for them, and reports.", "weft-demo");
  add_options(app, options, context.arguments);
  const auto asked = weft::command_line::parse_words(app, {words + 1, words + count});
  if (!asked) return fail(asked.error());
  if (*asked == weft::command_line::Asked::kHelp) {
    std::cout << weft::command_line::help_text(app) << std::flush;
    return weft::ctl::kExitOk;
  }
  if (!context.arguments.decode.empty()) {
    auto grouping = weft::ctl::normal_grouping(context.arguments.decode);
    if (!grouping) return fail(grouping.error());
    context.arguments.decode = *grouping;
  }
  const auto good = weft::demo::run_demo(options, context);
  if (!good) return fail(good.error());
  return *good ? weft::ctl::kExitOk : weft::ctl::kExitFailed;
}
