// weft-simulate: runs seeds of the simulation, replays and shrinks what fails.
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <sstream>

#include "proto/command_line.h"
#include "tests/simulation/run.h"

namespace weft::simulation {
namespace {

struct Options {
  std::string seeds = "1-100";
  int64_t events = 2000;
  int jobs = 1;
  std::string replay, save;
  bool shrink = false, coverage = false, trace = false;
};

Result<std::pair<uint64_t, uint64_t>> parse_seeds(const std::string& text) {
  std::pair<uint64_t, uint64_t> seeds;
  char dash = 0;
  std::istringstream in(text);
  if (!(in >> seeds.first))
    return error(ErrorCode::kInvalidArgument, "--seeds must be A or A-B, not '" + text + "'");
  if (!(in >> dash)) {
    seeds.second = seeds.first;
    return seeds;
  }
  if (dash != '-' || !(in >> seeds.second) || seeds.second < seeds.first || !(in >> std::ws).eof())
    return error(ErrorCode::kInvalidArgument, "--seeds must be A or A-B with A ≤ B, not '" + text + "'");
  return seeds;
}

int report(const Script& script, const Outcome& outcome, const Options& options) {
  std::cout << "seed " << script.seed << " fails after " << outcome.acts << " of " << script.acts.size()
            << " events: " << outcome.kind << "\n"
            << outcome.text << "\n";
  if (!options.shrink) {
    if (options.replay.empty())
      std::cout << "again: weft-simulate --seeds " << script.seed << " --events " << options.events
                << " (with --shrink for a short list of events, with --trace to see it)\n";
    return 1;
  }
  const Script small = shrink(script, outcome, {}, [](const Script& now) {
    std::cout << "\r" << now.acts.size() << " events  " << std::flush;
  });
  const std::string path =
      options.save.empty() ? "simulation-" + std::to_string(script.seed) + ".txt" : options.save;
  std::ofstream file(path);
  write(file, small);
  std::cout << "\rshrunk to " << small.acts.size() << " events: " << run_apart(small).text << "\n";
  write(std::cout, small);
  std::cout << "again: weft-simulate --replay " << path << " --trace\n";
  return 1;
}

int replay(const Options& options) {
  const auto script = read_script(options.replay);
  if (!script) {
    std::cerr << script.error().text() << "\n";
    return 2;
  }
  if (options.trace) {
    Coverage coverage;
    int64_t at = 0;
    try {
      run_here(*script, {}, coverage, at, &std::cout);
    } catch (const Failure& failure) {
      std::cout << "event " << at << ": " << failure.what() << "\n";
      return 1;
    }
    return 0;
  }
  const Outcome outcome = run_apart(*script);
  if (outcome.failed) return report(*script, outcome, options);
  std::cout << "it does not fail\n";
  return 0;
}

int run(const Options& options) {
  if (!options.replay.empty()) return replay(options);
  const auto seeds = parse_seeds(options.seeds);
  if (!seeds) {
    std::cerr << seeds.error().text() << "\n";
    return 2;
  }
  const Batch batch{seeds->first, seeds->second, options.events, options.jobs};
  std::cout << "seeds " << options.seeds << ", " << options.events << " events each\n";
  if (options.trace) {
    Coverage coverage;
    for (uint64_t seed = batch.first; seed <= batch.last; ++seed) {
      int64_t at = 0;
      run_here(script_of(setup_of(seed), options.events), {}, coverage, at, &std::cout);
    }
    return 0;
  }
  const bool terminal = ::isatty(STDOUT_FILENO) != 0;
  const BatchOutcome outcome = run_batch(batch, {}, [&](int64_t done) {
    if (terminal) std::cout << "\r" << done << " done " << std::flush;
  });
  if (terminal) std::cout << "\r";
  print(std::cout, outcome.coverage);
  if (outcome.failed) {
    const Script script = script_of(setup_of(*outcome.failed), options.events);
    return report(script, run_apart(script), options);
  }
  if (!options.coverage) return 0;
  const std::vector<std::string> never = missing(outcome.coverage);
  for (const std::string& what : never) std::cout << "never taken: " << what << "\n";
  return never.empty() ? 0 : 1;
}

}  // namespace
}  // namespace weft::simulation

int main(int argc, char** argv) {
  using namespace weft;
  simulation::Options options;
  CLI::App app("Runs the control plane and the supervisors against simulated workers, clock and transport.",
               "weft-simulate");
  app.add_option("--seeds", options.seeds, "Seeds to run")->type_name("A-B")->capture_default_str();
  app.add_option("--events", options.events, "Events of each seed")
      ->type_name("N")
      ->check(command_line::at_least(1))
      ->capture_default_str();
  app.add_option("--jobs", options.jobs, "Processes")
      ->type_name("N")
      ->check(command_line::between(int64_t{1}, int64_t{256}))
      ->capture_default_str();
  app.add_option("--replay", options.replay, "Run the events of a file instead of seeds")->type_name("FILE");
  app.add_flag("--shrink", options.shrink,
               "Look for a short list of events that fails in the same way, and write it down");
  app.add_option("--save", options.save, "Where to write it (default: simulation-SEED.txt)")
      ->type_name("FILE");
  app.add_flag("--coverage", options.coverage, "Fail also where something was never taken");
  app.add_flag("--trace", options.trace, "Tell every event");
  const auto asked = command_line::parse_words(app, std::vector<std::string>(argv + 1, argv + argc));
  if (!asked) {
    std::cerr << asked.error().text() << "\n";
    return 2;
  }
  if (*asked == command_line::Asked::kHelp) {
    std::cout << command_line::help_text(app);
    return 0;
  }
  return simulation::run(options);
}
