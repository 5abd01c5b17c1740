// How evenly prompts' rows are spread over ranks (PCP): exact (row, key) pairs of ragged steps whose prompts
// and cached prefixes are drawn from serving traces. Counters, no times.
//
// A step: as many requests as fit into its rows (1 … 32 wanted), each somewhere in its prompt behind its
// cached prefix. controlplane::chunk_split() says which chunks are split at all, kv::split_rows() who owns a
// row. Scored: a row's position + 1, what an indexer or dense attention computes. Attended: at most top-k.
// Shown is the most pairs of a rank less the mean over ranks, in pairs of the step's longest row; 1 at most
// is promised for zigzag, and more fails the run.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "controlplane/placement.h"
#include "kv/row_split.h"
#include "proto/command_line.h"
#include "tests/bench/traces.h"

namespace weft::bench {
namespace {

struct Options {
  std::string traces;
  int64_t steps = 10'000, rows = 8192, top_k = 2048, seed = 1;
};

std::vector<kv::OwnedSpan> draw_step(SplitMix64& random, const std::vector<Trace>& traces, int64_t rows) {
  std::vector<kv::OwnedSpan> spans;
  const uint64_t wanted = 1 + random.below(32);
  for (int64_t left = rows; left > 0 && spans.size() < wanted;) {
    const TracePrompt prompt = traces[random.below(traces.size())].draw(random);
    const int64_t start =
        prompt.cached +
        static_cast<int64_t>(random.below(static_cast<uint64_t>(prompt.tokens - prompt.cached)));
    spans.push_back({kv::Split::kShared, start, std::min(prompt.tokens - start, left)});
    left -= spans.back().rows;
  }
  return spans;
}

// Most less mean, beside the longest row's pairs; and beside the mean.
struct Unevenness {
  double worst = 0, sum = 0, share = 0;
  void add(const std::vector<int64_t>& pairs, int64_t longest) {
    double total = 0;
    for (const int64_t n : pairs) total += static_cast<double>(n);
    const double mean = total / static_cast<double>(pairs.size());
    const double over = static_cast<double>(*std::max_element(pairs.begin(), pairs.end())) - mean;
    worst = std::max(worst, over / static_cast<double>(longest));
    sum += over / static_cast<double>(longest);
    share += over / mean;
  }
};

struct Tally {
  Unevenness scored, attended;
  int64_t steps = 0, rows = 0, shared_rows = 0;
};

// `wish`: how all chunks of the step are to be split.
void add_step(std::vector<kv::OwnedSpan> spans, kv::Split wish, int ranks, int64_t top_k, Tally& tally) {
  for (kv::OwnedSpan& span : spans) {
    span.split = controlplane::chunk_split(wish, span.rows, false, ranks);
    tally.rows += span.rows;
    if (span.split == kv::Split::kShared) tally.shared_rows += span.rows;
  }
  std::erase_if(spans, [](const kv::OwnedSpan& span) { return span.split == kv::Split::kShared; });
  if (spans.empty()) return;
  const auto owners = kv::split_rows(spans, top_k, ranks);
  std::vector<int64_t> scored(static_cast<size_t>(ranks)), attended(static_cast<size_t>(ranks));
  int64_t longest = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    for (int64_t row = 0; row < spans[i].rows; ++row) {
      const auto rank = static_cast<size_t>(owners[i].owner(row));
      const int64_t keys = spans[i].start + row + 1;
      scored[rank] += keys;
      attended[rank] += std::min(keys, top_k);
      longest = std::max(longest, keys);
    }
  }
  ++tally.steps;
  tally.scored.add(scored, longest);
  tally.attended.add(attended, std::min(longest, top_k));
}

// Whether zigzag kept its promise.
bool run(const Options& options, const std::vector<Trace>& traces) {
  std::vector<std::vector<kv::OwnedSpan>> steps;
  SplitMix64 random(static_cast<uint64_t>(options.seed));
  int64_t spans = 0;
  for (int64_t i = 0; i < options.steps; ++i) {
    steps.push_back(draw_step(random, traces, options.rows));
    spans += std::ssize(steps.back());
  }
  std::printf("%lld steps of at most %lld rows, %.1f chunks each, top-k %lld, from", (long long)options.steps,
              (long long)options.rows, static_cast<double>(spans) / static_cast<double>(options.steps),
              (long long)options.top_k);
  for (const Trace& trace : traces) std::printf(" %s,", trace.name().c_str());
  std::printf(" %s\n", options.traces.empty() ? "as quantiles" : ("in " + options.traces).c_str());
  std::printf(
      "most pairs of a rank less the mean, in pairs of the step's longest row (and in %% of the mean)\n\n");
  std::printf("%-11s %5s   %-32s   %-32s   %s\n", "", "", "scored (position + 1)", "attended (at most top-k)",
              "rows of chunks");
  std::printf("%-11s %5s   %9s %9s %12s   %9s %9s %12s   %s\n", "split", "ranks", "worst", "mean",
              "of the mean", "worst", "mean", "of the mean", "too short to split");
  bool kept = true;
  for (const kv::Split split : {kv::Split::kZigzag, kv::Split::kInterleave, kv::Split::kContiguous}) {
    for (const int ranks : {2, 3, 4, 5, 6, 7, 8, 72}) {
      Tally tally;
      for (const auto& step : steps) add_step(step, split, ranks, options.top_k, tally);
      const auto n = static_cast<double>(std::max<int64_t>(tally.steps, 1));
      std::printf("%-11s %5d", kv::split_name(split), ranks);
      for (const Unevenness& one : {tally.scored, tally.attended}) {
        std::printf("   %9.3f %9.3f %10.3f %%", one.worst, one.sum / n, 100 * one.share / n);
        if (split == kv::Split::kZigzag) kept = kept && one.worst <= 1;
      }
      std::printf("   %8.2f %%\n",
                  100.0 * static_cast<double>(tally.shared_rows) / static_cast<double>(tally.rows));
      std::fflush(stdout);
    }
  }
  std::printf("\nzigzag: %s\n", kept ? "at most the longest row's pairs above the mean in every step"
                                     : "MORE than the longest row's pairs above the mean");
  return kept;
}

int fail(const Error& failure, int code) {
  std::fprintf(stderr, "pcp_bench: %s\n", failure.text().c_str());
  return code;
}

int main_of(int argc, char** argv) {
  using command_line::at_least;
  Options options;
  bool quick = false;
  CLI::App app("Counts how evenly rows of ragged prompts are spread over 2 to 8 and 72 ranks. No times.",
               "pcp_bench");
  app.add_flag("--quick", quick, "200 steps");
  app.add_option("--traces", options.traces, "folder of *.jsonl traces (default: their quantiles)")
      ->type_name("FOLDER");
  const auto number = [&](const char* name, int64_t& value, int64_t low, const char* what) {
    app.add_option(name, value, what)->type_name("N")->check(at_least(low))->capture_default_str();
  };
  number("--steps", options.steps, 1, "steps to draw");
  number("--step-rows", options.rows, 1, "rows of a step at most");
  number("--top-k", options.top_k, 1, "keys that a row attends to at most");
  number("--seed", options.seed, 0, "of what is drawn");
  const auto asked = command_line::parse_words(app, {argv + 1, argv + argc});
  if (!asked) return fail(asked.error(), 2);
  if (*asked == command_line::Asked::kHelp) {
    std::fputs(command_line::help_text(app).c_str(), stdout);
    return 0;
  }
  if (quick) options.steps = 200;
  if (options.traces.empty()) return run(options, trace_shapes()) ? 0 : 1;
  const auto traces = read_traces(options.traces);
  if (!traces) return fail(traces.error(), 2);
  return run(options, *traces) ? 0 : 1;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) { return weft::bench::main_of(argc, argv); }
