#include <CLI/CLI.hpp>
#include <iostream>
#include <random>

#include "tools/ctl/exit_code.h"
#include "tools/ctl/interrupt.h"
#include "tools/ctl/main_run.h"
#include "tools/ctl/parse.h"
#include "tools/demo/run.h"

namespace {

using weft::ctl::Context;
using weft::demo::DemoOptions;

void add_options(CLI::App& app, DemoOptions& options, weft::ctl::Arguments& arguments) {
  app.add_option("--context", options.context, "tokens of the first request")->capture_default_str();
  app.add_option("--file", options.source, "file or folder to take the text from");
  app.add_option("--seed", options.seed, "of the facts and the made text; default: a new one each time");
  app.add_option("--prefill", arguments.prefill, "none, zigzag or interleave; default: the daemon's")
      ->check(CLI::IsMember({"none", "zigzag", "interleave"}));
  app.add_option("--decode", arguments.decode, "tp, dp or dcp4; default: the daemon's");
  app.add_option("--index", arguments.index, "copied or split; default: the daemon's")
      ->check(CLI::IsMember({"copied", "split"}));
  app.add_option("-o,--output", arguments.output, "table or json")->check(CLI::IsMember({"table", "json"}));
  app.add_option("--state-dir", arguments.state_dir, "the daemon's state folder");
  app.add_option("--control-socket", arguments.control_socket, "the daemon's control socket");
  app.add_option("--client", arguments.client_endpoint, "the daemon's client endpoint");
  app.add_option("--timeout", arguments.timeout_s, "seconds for each turn; 0: none")
      ->check(CLI::Range(0.0, 1e9));
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
  CLI::App app("weft-demo: sends a long document with three facts to weftd, asks for them, and reports");
  add_options(app, options, context.arguments);
  try {
    app.parse(count, words);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return weft::ctl::kExitOk;
  } catch (const std::exception& failure) {
    return fail(weft::error(weft::ErrorCode::kInvalidArgument, failure.what()));
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
