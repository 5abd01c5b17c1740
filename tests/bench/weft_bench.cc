// weft-bench: what this machine can do, and how close Weft comes to it, in one run. docs/benchmarks.md says
// what each line means. Exit codes: 0 measured; 1 a part could not be run; 2 a bad command line.
#include <cstdio>

#include "proto/command_line.h"
#include "proto/vocab/units.h"
#include "tests/bench/ceilings.h"
#include "tests/bench/dcp_exchange.h"
#include "tests/bench/exchange_measure.h"
#include "tests/bench/figures.h"
#include "tests/bench/guard.h"
#include "tests/bench/kernel_figures.h"
#include "tests/bench/machine.h"
#include "tests/bench/mechanisms_measure.h"
#include "tests/bench/serving_measure.h"
#include "tests/bench/settings.h"
#include "worker/spin.h"

namespace weft::bench {
namespace {

std::string threads_text(int threads) {
  return threads == 1 ? "1 thread" : std::to_string(threads) + " threads";
}

Figure one(std::string group, std::string name, std::string unit, double value,
           std::optional<Ceiling> ceiling = {}, std::string note = {}) {
  return {std::move(group),         std::move(name),    std::move(unit),
          {value, value, value, 1}, std::move(ceiling), std::move(note)};
}

double turn_seconds(const Settings& settings) { return settings.quick ? 1e-3 : 0.05; }

// Forks, so before the client library starts its threads.
Figure empty_exchange_figure(const Settings& settings, int ranks) {
  const Turns turns = empty_exchange(ranks, settings.rounds, turn_seconds(settings));
  std::string note;
  if (ranks > worker::usable_cores()) {
    char text[96];
    std::snprintf(text, sizeof text, "more ranks than cores: %.1f waits sleep, %.1f context switches",
                  summarize(turns.sleeps).median,
                  summarize(turns.voluntary).median + summarize(turns.involuntary).median);
    note = text;
  }
  return {.group = "collective",
          .name = "empty exchange, " + std::to_string(ranks) + " processes",
          .unit = "us",
          .summary = summarize(turns.microseconds),
          .note = note};
}

Ceilings measure_ceilings(const Settings& settings, Report& report) {
  Ceilings out;
  const double seconds = settings.seconds();
  const auto bytes = static_cast<size_t>(settings.quick ? 4 * kMiB : 256 * kMiB);
  for (int threads : {1, 2}) {
    const auto add = [&](const char* name, const char* unit, double value) {
      return report.add(one("ceiling", std::string(name) + ", " + threads_text(threads), unit, value));
    };
    out.fma[threads] = add("plain float32 multiply-add loop", "GFLOP/s", fma_gflops(threads, seconds));
    out.bf16_dot[threads] = add("bf16 dot loop", "GFLOP/s", bf16_dot_gflops(threads, seconds));
    out.stream[threads] = add("stream read", "GB/s", stream_read_gbs(threads, bytes, seconds));
    add("read of random rows of 1,152 bytes", "GB/s", random_rows_gbs(threads, bytes, 1152, seconds));
    out.memcpy[threads] = add("memcpy", "GB/s", memcpy_gbs(threads, bytes, seconds));
  }
  out.barrier =
      report.add(one("ceiling", "plain spinning barrier, 2 threads", "us", barrier_microseconds(2, seconds)));
  Figure exchange = empty_exchange_figure(settings, 2);
  exchange.ceiling = Ceiling{"plain spinning barrier", out.barrier, true};
  out.exchange = report.add(std::move(exchange));
  return out;
}

// How much the machine changed under the run.
void measure_drift(const Settings& settings, const Ceilings& ceilings, Report& report) {
  for (int threads : {1, 2}) {
    report.add(one("drift", "multiply-add loop at the end, " + threads_text(threads), "GFLOP/s",
                   fma_gflops(threads, settings.seconds()),
                   Ceiling{"at the beginning", ceilings.fma[threads]}));
  }
}

// Under dcp, beside three collectives: the share is how many times as long these take.
void measure_dcp_exchange(const Settings& settings, Report& report) {
  const StepPoints points = step_points(8);
  report.add(one("collective", "exchange points that dcp(8) adds to tp, 78 layers", "points",
                 static_cast<double>(points.replicated - points.tp), {},
                 "query=replicated; gathered " + std::to_string(points.gathered - points.tp) +
                     "; split index, in 21 layers " +
                     std::to_string(points.replicated_split_index - points.tp)));
  for (int ranks : {2, 4, 8}) {
    for (int64_t batch : {1, 8, 64}) {
      if (settings.quick && batch > 8) continue;
      const DcpExchange dcp = measure_dcp({ranks, batch}, settings.rounds, turn_seconds(settings));
      char note[160];
      std::snprintf(
          note, sizeof note, "%.2f without writing the partials; gathered queries %.1f us; %s for %s",
          summarize(dcp.over_one_shot_net(dcp.three)).median, summarize(dcp.gathered.microseconds).median,
          human_bytes(dcp.one_shot_bytes).c_str(), human_bytes(dcp.three_bytes).c_str());
      report.add({.group = "collective",
                  .name = "dcp(" + std::to_string(ranks) + ") partials, batch " + std::to_string(batch) +
                          ", 64 heads of 512",
                  .unit = "us",
                  .summary = summarize(dcp.one_shot.microseconds),
                  .ceiling = Ceiling{"gather, gather, reduce-scatter",
                                     summarize(dcp.three.microseconds).median, true},
                  .note = note});
    }
  }
}

void measure_collectives(const Settings& settings, Report& report) {
  for (int ranks : {4, 8}) report.add(empty_exchange_figure(settings, ranks));
  for (int ranks : {2, 4}) {
    for (int64_t bytes : {4 * kKiB, 256 * kKiB, 4 * kMiB}) {
      const AllGather rates =
          all_gather(ranks, static_cast<size_t>(bytes), settings.rounds, turn_seconds(settings));
      report.add({.group = "collective",
                  .name = "all-gather, " + std::to_string(ranks) + " ranks x " + human_bytes(bytes),
                  .unit = "GB/s",
                  .summary = summarize(rates.gbs),
                  .ceiling = Ceiling{"memcpy by as many processes", summarize(rates.memcpy_gbs).median}});
    }
  }
  measure_dcp_exchange(settings, report);
}

int fail(const Error& failure, int code) {
  std::fprintf(stderr, "weft-bench: %s\n", failure.text().c_str());
  return code;
}

int run(const Settings& settings, const CorePair& cores, const std::string& folder) {
  Report report(describe_run(settings, cores));
  if (!settings.json.empty()) {  // now, rather than after minutes
    if (auto written = report.write_json(settings.json); !written) return fail(written.error(), 2);
  }
  report.print_header();
  const Ceilings ceilings = measure_ceilings(settings, report);
  if (settings.wants("collectives")) measure_collectives(settings, report);
  if (settings.wants("kernels")) measure_kernels(settings, report);
  if (settings.wants("prefill") || settings.wants("decode")) {
    if (auto done = measure_serving(settings, ceilings, {folder, cores}, report); !done) {
      return fail(done.error(), 1);
    }
  }
  if (settings.wants("mechanisms")) {
    if (auto done = measure_mechanisms(settings, {folder, cores}, report); !done) {
      return fail(done.error(), 1);
    }
  }
  measure_drift(settings, ceilings, report);
  if (!settings.json.empty()) {
    if (auto written = report.write_json(settings.json); !written) return fail(written.error(), 1);
  }
  return 0;
}

// An exit code, or nothing if the run may begin.
std::optional<int> parse(int argc, char** argv, Settings& settings) {
  using command_line::between;
  CLI::App app(
      "Measures this machine's ceilings, then Weft beside them: collectives, kernels, and real daemons that "
      "prefill and decode with pinned workers. One line per figure. Needs an idle machine and some minutes.",
      "weft-bench");
  app.add_flag("--quick", settings.quick, "tiny sizes and 2 rounds: shows that it works, measures nothing");
  auto* rounds = app.add_option("--rounds", settings.rounds, "rounds over all configurations")
                     ->type_name("N")
                     ->check(between(int64_t{1}, int64_t{1000}))
                     ->capture_default_str();
  auto* prompt = app.add_option("--prompt", settings.prompts, "tokens of prefill requests, comma separated")
                     ->type_name("LIST")
                     ->delimiter(',')
                     ->check(between(int64_t{64}, int64_t{1} << 19))
                     ->capture_default_str();
  auto* contexts = app.add_option("--contexts", settings.contexts, "tokens before decoding, comma separated")
                       ->type_name("LIST")
                       ->delimiter(',')
                       ->check(between(int64_t{64}, int64_t{1} << 19))
                       ->capture_default_str();
  auto* decode = app.add_option("--decode-tokens", settings.decode_tokens, "tokens of a decode request")
                     ->type_name("N")
                     ->check(between(int64_t{2}, int64_t{1} << 16))
                     ->capture_default_str();
  app.add_option("--first-core", settings.first_core, "pin to this core and the next (default: chosen)")
      ->type_name("CORE")
      ->check(between(int64_t{0}, int64_t{4095}));
  app.add_option("--only", settings.sections, "parts to measure, comma separated; ceilings always run")
      ->type_name("LIST")
      ->delimiter(',')
      ->check(command_line::one_of({"collectives", "kernels", "prefill", "decode", "mechanisms"}));
  app.add_option("--json", settings.json, "write all figures to this file, too")->type_name("FILE");
  const auto asked = command_line::parse_words(app, {argv + 1, argv + argc});
  if (!asked) return fail(asked.error(), 2);
  if (*asked == command_line::Asked::kHelp) {
    std::fputs(command_line::help_text(app).c_str(), stdout);
    return 0;
  }
  if (settings.quick) {
    if (rounds->count() == 0) settings.rounds = 2;
    if (prompt->count() == 0) settings.prompts = {1024};
    if (contexts->count() == 0) settings.contexts = {512};
    if (decode->count() == 0) settings.decode_tokens = 8;
  }
  return std::nullopt;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using namespace weft;
  bench::Settings settings;
  if (const auto code = bench::parse(argc, argv, settings)) return *code;
  const auto cores = bench::choose_cores(settings.first_core);
  if (!cores) return bench::fail(cores.error(), 2);
  return bench::run_guarded("weft-bench",
                            [&](const std::string& folder) { return bench::run(settings, *cores, folder); });
}
