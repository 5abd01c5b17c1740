// The switch from prefill to decode, many times over: what it moves, what it makes, and what it costs.
//
// A real weftd serves one request after the other. Each reads its prompt split by token over all workers
// (PCP) and then decodes two tokens with the cache split by token over all of them (DCP): its first decode
// step follows a step of another grouping, its second one of the same. The gap before a step is the time
// that a rank had nothing to do, as the workers' own clocks say; a pair is one request's two gaps. Between
// the first request and the last one no byte of the cache may be copied, no byte of the weights may change,
// and no process may have made a mapping, a descriptor or an epoch; so there is nothing like a group that
// could have been created. Beside the times stands an empty exchange point of as many processes, before and
// after: a barrier of the same run.
#include <algorithm>
#include <cstdio>
#include <numeric>
#include <optional>

#include "proto/vocab/random.h"
#include "tests/bench/daemon_process.h"
#include "tests/bench/exchange_measure.h"
#include "tests/bench/figures.h"
#include "tests/bench/guarded_main.h"
#include "tests/bench/process_state.h"

namespace weft::bench {
namespace {

struct Options {
  bool quick = false;
  int64_t pairs = 10'000, workers = 8, prompt = 128;
};

constexpr Duration kPatience = std::chrono::seconds(60);

// A barrier, µs: by round.
std::vector<double> barriers(const Options& options) {
  return empty_exchange(static_cast<int>(options.workers), options.quick ? 3 : 15, 0.05).microseconds;
}

// What must not change.
struct World {
  std::vector<ProcessState> processes;
  uint64_t weights = 0, epoch = 0;
  friend bool operator==(const World&, const World&) = default;
};

Result<World> look(const DaemonProcess& daemon) {
  World world;
  for (const pid_t process : daemon.processes()) {
    TRY(ProcessState state, process_state(process));
    world.processes.push_back(std::move(state));
  }
  TRY(world.weights, hash_of_memory(daemon.processes().front(), "weft-weights"));
  wire::ControlRequest request;
  request.mutable_status();
  TRY(const wire::ControlReply reply, daemon.control(std::move(request)));
  world.epoch = reply.status().epoch();
  return world;
}

// Entries of one vector that another lacks, and the other way round.
template <typename T>
int64_t difference(const std::vector<T>& a, const std::vector<T>& b) {
  std::vector<T> only;
  std::set_symmetric_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(only));
  return std::ssize(only);
}

struct Pair {
  double changes_us = 0, stays_us = 0;
};

struct Counts {
  int64_t tokens = 0;
  uint64_t copied = 0;
};

Result<Pair> serve(DaemonProcess& daemon, const Options& options, SplitMix64& random, Counts& counts) {
  wire::GenerateRequest request;
  for (int64_t i = 0; i < options.prompt; ++i)
    request.mutable_tokens()->add_ids(static_cast<uint32_t>(random.below(4096)));
  request.set_max_tokens(3);
  request.set_ignore_eos(true);
  request.set_no_prefix_cache(true);
  request.set_prefill("zigzag");
  request.set_decode("dcp(" + std::to_string(options.workers) + ")");
  client::StreamHandlers handlers;
  handlers.token = [&](const wire::TokenEvent&) { ++counts.tokens; };
  TRY(const wire::Finished finished, daemon.client().generate(request, handlers, kPatience));
  const wire::Trace& trace = finished.trace();
  if (finished.reason() != "length" || trace.decode_steps() != 2 || trace.prefill_ran_size() != 1 ||
      trace.prefill_ran(0) != "zigzag" || trace.decodes(0).decode() != request.decode())
    return daemon.explain(error(ErrorCode::kInternal, "not served as asked: " + finished.ShortDebugString()));
  counts.copied += trace.switch_bytes() + trace.regroup_bytes();
  const auto gaps = static_cast<double>(trace.decodes(0).gap_ns());
  const auto first = static_cast<double>(trace.switch_gap_ns());
  return Pair{first / 1000, (gaps - first) / 1000};
}

std::string spread(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  char text[128];
  const auto at = [&](size_t percent) { return values[(values.size() - 1) * percent / 100]; };
  std::snprintf(text, sizeof text, "median %.2f, half of them %.2f .. %.2f, 99 %% below %.2f", at(50), at(25),
                at(75), at(99));
  return text;
}

Result<bool> run(const Options& options, const std::string& folder) {
  std::vector<double> barrier = barriers(options);
  TRY_VOID(run_program({program_path("weft-hash-model"), "--out", folder + "/hash"}, folder + "/hash.log"));
  const std::vector<std::string> arguments = {"--model",
                                              folder + "/hash",
                                              "--workers",
                                              std::to_string(options.workers),
                                              "--block-tokens",
                                              "8",
                                              "--pool-tokens",
                                              "8192",
                                              "--max-context",
                                              "4096",
                                              "--max-step-rows",
                                              "1024",
                                              "--threads-per-worker",
                                              "1"};
  TRY(DaemonProcess daemon, DaemonProcess::start(folder + "/daemon", arguments));
  SplitMix64 random(1);
  Counts counts;
  for (int i = 0; i < 50; ++i) TRY_VOID(serve(daemon, options, random, counts));  // all is warm
  TRY(const World before, look(daemon));
  counts = {};
  std::vector<double> changes, stays, more;
  for (int64_t i = 0; i < options.pairs; ++i) {
    TRY(const Pair pair, serve(daemon, options, random, counts));
    changes.push_back(pair.changes_us);
    stays.push_back(pair.stays_us);
    more.push_back(pair.changes_us - pair.stays_us);
  }
  TRY(const World after, look(daemon));
  TRY_VOID(daemon.stop());
  const std::vector<double> later = barriers(options);
  barrier.insert(barrier.end(), later.begin(), later.end());

  int64_t maps = 0, descriptors = 0;
  for (size_t i = 0; i < before.processes.size(); ++i) {
    maps += difference(before.processes[i].maps, after.processes[i].maps);
    descriptors += difference(before.processes[i].descriptors, after.processes[i].descriptors);
  }
  const auto count = [](const char* what, int64_t value) {
    std::printf("  %-48s %lld\n", what, static_cast<long long>(value));
  };
  std::printf("%lld requests, one after the other: zigzag over %lld workers, then dcp(%lld)\n",
              static_cast<long long>(options.pairs), static_cast<long long>(options.workers),
              static_cast<long long>(options.workers));
  count("tokens", counts.tokens);
  count("bytes copied for a change of grouping", static_cast<int64_t>(counts.copied));
  std::printf("  %-48s %s\n", "hash of all bytes of the weights",
              before.weights == after.weights ? "the same" : "ANOTHER");
  count("mappings made or dropped, all processes", maps);
  count("descriptors opened or closed, all processes", descriptors);
  count("epochs begun", static_cast<int64_t>(after.epoch - before.epoch));
  const double floor = summarize(barrier).median;
  const double cost = summarize(changes).median - summarize(stays).median;
  std::printf("  %-48s %s\n", "gap where the grouping changes, us", spread(changes).c_str());
  std::printf("  %-48s %s\n", "gap where it stays, us", spread(stays).c_str());
  std::printf("  %-48s %s\n", "one minus the other, pair by pair, us", spread(more).c_str());
  std::printf("  %-48s %s\n", "a barrier of as many processes, us", spread(barrier).c_str());
  std::printf("  %-48s %.2f us, %.2f barriers\n", "difference of the medians", cost, cost / floor);
  return before == after && counts.copied == 0 && counts.tokens == 3 * options.pairs;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using namespace weft;
  using bench::add_number;
  bench::Options options;
  CLI::App app("Switches requests from prefill to decode and counts what that moves, makes and costs.",
               "switch_bench");
  app.add_flag("--quick", options.quick, "30 pairs");
  add_number(app, "--pairs", options.pairs, 1, 10'000'000, "requests");
  add_number(app, "--workers", options.workers, 2, 8, "workers");
  add_number(app, "--prompt", options.prompt, 32, 1024, "tokens of a prompt");
  const auto ready = [&] {
    if (options.quick) options.pairs = std::min<int64_t>(options.pairs, 30);
  };
  return bench::guarded_main(app, argc, argv, ready,
                             [&](const std::string& folder) { return bench::run(options, folder); });
}
