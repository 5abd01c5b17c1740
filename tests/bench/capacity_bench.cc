// How much more context ranks hold together than one alone, with entries and index keys striped over all of
// them: requests whose lengths are drawn from serving traces are let in until the first is refused. Counters,
// no times.
//
// Up to 8 ranks by the control plane's own admission (controlplane/admission.h). Beyond what it is built for,
// by kv/layout.h alone and the same rule: the origin that leaves the tightest pool the most room. A whole
// request, prompt and answer, must fit. Shown is what was let in, in tokens of whole blocks, over what one
// rank let in, the middle and the least of the seeds; the ceiling is the number of ranks.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "controlplane/admission.h"
#include "proto/command_line.h"
#include "tests/bench/traces.h"

namespace weft::bench {
namespace {

using namespace controlplane;  // NOLINT

constexpr int64_t kBlockTokens = 64;
constexpr int64_t kAnswer = 1024;

struct Options {
  std::string traces;
  int64_t pool_tokens = 1 << 20, seeds = 8;
};

Limits limits_of(int ranks, int64_t pages) {
  Limits limits;
  limits.rank_count = ranks;
  limits.geometry.block_tokens = kBlockTokens;
  limits.geometry.streams = {kv::StreamGeometry{78, 576}, kv::StreamGeometry{21, 132}};
  limits.pool_pages.assign(static_cast<size_t>(ranks), {pages, pages});
  return limits;
}

// Blocks let in by admission.
int64_t admitted(int ranks, int64_t pages, const Trace& trace, uint64_t seed) {
  const Limits limits = limits_of(ranks, pages);
  Memory memory(limits);
  SplitMix64 random(seed);
  int64_t blocks = 0;
  for (int turn = 0;; turn = (turn + 1) % ranks) {
    Sequence sequence;
    sequence.prompt = trace.draw(random).tokens;
    sequence.max_tokens = kAnswer;
    sequence.wish.decode = {kv::DecodeKind::kDcp, ranks};
    sequence.wish.index = {kv::IndexKind::kSplit};
    sequence.use_prefix_cache = false;
    if (!try_admit(sequence, sequence.wish, memory, false, turn)) return blocks;
    blocks += ceil_div(sequence.row_count(), kBlockTokens);
  }
}

// The same by arithmetic, for any number of ranks.
int64_t laid_out(int ranks, int64_t pages, const Trace& trace, uint64_t seed) {
  std::vector<int64_t> room(static_cast<size_t>(ranks), pages);
  SplitMix64 random(seed);
  int64_t sum = 0;
  for (;;) {
    const int64_t blocks = ceil_div(trace.draw(random).tokens + kAnswer - 1, kBlockTokens);
    std::vector<int64_t> by_class(static_cast<size_t>(ranks));
    for (int64_t block = 0; block < blocks; ++block)
      ++by_class[static_cast<size_t>(kv::residue_class(block, ranks))];
    const auto need = [&](int rank, int origin) {
      return by_class[static_cast<size_t>(kv::owned_class(rank, origin, ranks))];
    };
    int best = 0;
    int64_t best_slack = -pages;
    for (int origin = 0; origin < ranks; ++origin) {
      int64_t slack = pages;
      for (int rank = 0; rank < ranks; ++rank) {
        if (need(rank, origin) > 0)
          slack = std::min(slack, room[static_cast<size_t>(rank)] - need(rank, origin));
      }
      if (slack > best_slack) {
        best = origin;
        best_slack = slack;
      }
    }
    if (best_slack < 0) return sum;
    for (int rank = 0; rank < ranks; ++rank) room[static_cast<size_t>(rank)] -= need(rank, best);
    sum += blocks;
  }
}

void measure(const Options& options, const Trace& trace) {
  const int64_t pages = options.pool_tokens / kBlockTokens;
  for (const int ranks : {2, 4, 8, 72}) {
    std::vector<double> factors;
    for (int64_t seed = 1; seed <= options.seeds; ++seed) {
      const auto of = static_cast<uint64_t>(seed);
      const int64_t alone = admitted(1, pages, trace, of);
      const int64_t together =
          ranks <= kMaxRanks ? admitted(ranks, pages, trace, of) : laid_out(ranks, pages, trace, of);
      factors.push_back(static_cast<double>(together) / static_cast<double>(alone));
    }
    std::sort(factors.begin(), factors.end());
    const std::string wanted = ranks == 8 ? "  (wanted: 7.95)" : ranks == 72 ? "  (wanted: 71)" : "";
    std::printf("%-24s %5d %-10s %9.3f %9.3f%s\n", trace.name().c_str(), ranks,
                ranks <= kMaxRanks ? "admission" : "layout", factors[factors.size() / 2], factors[0],
                wanted.c_str());
    std::fflush(stdout);
  }
}

int main_of(int argc, char** argv) {
  Options options;
  bool quick = false;
  CLI::App app("Counts how much more context ranks hold together than one alone. No times.",
               "capacity_bench");
  app.add_flag("--quick", quick, "two seeds of a small pool");
  app.add_option("--traces", options.traces, "folder of *.jsonl (default: the traces' published shape)")
      ->type_name("FOLDER");
  app.add_option("--pool-tokens", options.pool_tokens, "of each rank")->check(command_line::at_least(65536));
  app.add_option("--seeds", options.seeds)->check(command_line::at_least(1));
  CLI11_PARSE(app, argc, argv);
  if (quick) {
    options.pool_tokens = 1 << 18;
    options.seeds = 2;
  }
  auto traces =
      options.traces.empty() ? Result<std::vector<Trace>>(trace_shapes()) : read_traces(options.traces);
  if (!traces) {
    std::fprintf(stderr, "capacity_bench: %s\n", traces.error().text().c_str());
    return 2;
  }
  std::printf("pool of %lld tokens a rank, striped entries and index, %lld seeds\n%-24s %5s %-10s %9s %9s\n",
              (long long)options.pool_tokens, (long long)options.seeds, "lengths", "ranks", "by", "middle",
              "least");
  for (const Trace& trace : *traces) measure(options, trace);
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) { return weft::bench::main_of(argc, argv); }
