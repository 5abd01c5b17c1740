// One decode step of one layer of GLM's shape on two processes of one core each: where its time goes under
// tp, dcp(2) and dp, and what the canonical order of attention costs. docs/benchmarks.md says what the lines
// mean. Exit codes: 0 measured; 2 a bad command line. Two groupings whose logits differ end it with a
// message.
#include <cstdio>
#include <functional>

#include "kernels/features.h"
#include "proto/command_line.h"
#include "proto/vocab/units.h"
#include "tests/bench/exchange_measure.h"
#include "tests/bench/figures.h"
#include "tests/bench/layer_measure.h"
#include "tests/bench/machine.h"
#include "tests/bench/order_measure.h"

namespace weft::bench {
namespace {

using worker::Stage;
using Stages = std::array<double, worker::kStages>;

struct Options {
  bool quick = false;
  int rounds = 9, steps = 20, first_core = -1;
  int64_t context = 32768;
  std::vector<std::string> caches = {"bf16", "fp8", "fp8_ds_mla"};
};

double at(const Stages& stages, Stage stage) { return stages[static_cast<size_t>(stage)]; }
double exchanged(const Stages& s) {
  return at(s, Stage::kEntries) + at(s, Stage::kPartials) + at(s, Stage::kAttentionSums);
}
double attention_and_exchange(const Stages& s) { return at(s, Stage::kAttend) + exchanged(s); }
double attention_half(const Stages& s) {
  return attention_and_exchange(s) + at(s, Stage::kProject) + at(s, Stage::kChoose) + at(s, Stage::kOutput);
}
double step(const Stages& s) {
  double sum = 0;
  for (const double seconds : s) sum += seconds;
  return sum;
}

using Value = double (*)(const Stages&);
std::vector<double> each(const LayerTimes& times, Value value) {
  std::vector<double> out;
  for (const Stages& round : times.rounds) out.push_back(value(round));
  return out;
}
double median_us(const LayerTimes& times, Value value) { return summarize(each(times, value)).median * 1e6; }

void print_ratio(const char* name, const std::vector<double>& a, const std::vector<double>& b,
                 const char* wanted) {
  const Summary ratio = summarize(ratios(a, b));
  std::printf("  %-58s %6.3f  (%.3f .. %.3f)%s\n", name, ratio.median, ratio.min, ratio.max, wanted);
}

void print_layer(const LayerRun& run) {
  const std::vector<LayerGrouping> groupings = layer_groupings();
  const std::vector<LayerTimes> times = measure_layer(run);
  std::printf("\n%s cache, %lld row%s: microseconds of a step, medians of %d rounds of %d steps\n",
              cache_dtype_name(run.cache.entries), (long long)run.rows, run.rows == 1 ? "" : "s", run.rounds,
              run.steps);
  std::printf("  %-20s %8s %8s %8s %8s %8s %8s %8s %8s | %9s %9s %9s | %9s %10s %10s\n", "", "project",
              "entries", "index", "attend", "partials", "output", "sums", "feed-fwd", "att.+exch",
              "att. half", "step", "exchanges", "queries B", "partials B");
  for (size_t g = 0; g < times.size(); ++g) {
    std::printf("  %-20s", groupings[g].name.c_str());
    for (const Value value :
         std::initializer_list<Value>{[](const Stages& s) { return at(s, Stage::kProject); },
                                      [](const Stages& s) { return at(s, Stage::kEntries); },
                                      [](const Stages& s) { return at(s, Stage::kChoose); },
                                      [](const Stages& s) { return at(s, Stage::kAttend); },
                                      [](const Stages& s) { return at(s, Stage::kPartials); },
                                      [](const Stages& s) { return at(s, Stage::kOutput); },
                                      [](const Stages& s) { return at(s, Stage::kAttentionSums); },
                                      [](const Stages& s) { return at(s, Stage::kFeedForward); }}) {
      std::printf(" %8.1f", median_us(times[g], value));
    }
    std::printf(" | %9.1f %9.1f %9.1f | %9lld %10lld %10lld\n", median_us(times[g], attention_and_exchange),
                median_us(times[g], attention_half), median_us(times[g], step), (long long)times[g].exchanges,
                (long long)times[g].crossed[kv::CrossKind::kQueries],
                (long long)times[g].crossed[kv::CrossKind::kPartials]);
  }
  const LayerTimes &tp = times[0], &dcp = times[1];
  print_ratio("dcp(2) / tp, attention + exchange", each(dcp, attention_and_exchange),
              each(tp, attention_and_exchange), "  wanted: 1.12 at most");
  print_ratio("dcp(2) / tp, the attention half of the layer", each(dcp, attention_half),
              each(tp, attention_half), "");
  print_ratio("dcp(2) / tp, the step", each(dcp, step), each(tp, step), "");
  print_ratio("share of attention + exchange in a step of dcp(2)", each(dcp, attention_and_exchange),
              each(dcp, step), "");
  print_ratio("share of exchange in a step of dcp(2)", each(dcp, exchanged), each(dcp, step), "");
  print_ratio("dp / tp, attention + exchange", each(times[3], attention_and_exchange),
              each(tp, attention_and_exchange), "");
  std::fflush(stdout);
}

void print_orders(const Options& options, const LayerShape& shape, const CacheFormat& cache) {
  const int repeats = options.quick ? 1 : 20;
  struct Case {
    const char* name;
    int c;
    int64_t heads;
  };
  for (const Case& one :
       {Case{"tp", 1, shape.heads / 2}, Case{"dcp(2)", 2, shape.heads / 2}, Case{"dp", 1, shape.heads}}) {
    const OrderTime time = measure_order(shape, cache, one.c, one.heads, options.rounds, repeats);
    const Summary canonical = summarize(time.canonical), free = summarize(time.free);
    const Summary ratio = summarize(ratios(time.canonical, time.free));
    std::printf(
        "  %-7s %-46s %8.1f us canonical %8.1f us free   %6.3f  (%.3f .. %.3f)  wanted: 1.05 at most\n",
        one.name, time.what.c_str(), canonical.median * 1e6, free.median * 1e6, ratio.median, ratio.min,
        ratio.max);
    std::fflush(stdout);
  }
}

LayerShape shape_of(const Options& options) {
  LayerShape shape;
  shape.context = options.context;
  if (options.quick) {
    shape = {.hidden = 128,
             .heads = 8,
             .latent = 64,
             .rope = 16,
             .nope = 16,
             .value = 32,
             .q_lora = 64,
             .index_heads = 2,
             .index_width = 32,
             .top_k = 128,
             .dense_width = 512,
             .context = 1024};
  }
  return shape;
}

void run(const Options& options, const CorePair& cores) {
  const LayerShape shape = shape_of(options);
  std::printf(
      "one layer: hidden %lld, %lld heads, latent %lld, rotary %lld, top-k %lld, indexer %lld x %lld, dense "
      "feed-forward %lld, context %lld\n",
      (long long)shape.hidden, (long long)shape.heads, (long long)shape.latent, (long long)shape.rope,
      (long long)shape.top_k, (long long)shape.index_heads, (long long)shape.index_width,
      (long long)shape.dense_width, (long long)shape.context);
  std::printf("instruction set %s, cores %d and %d, an empty exchange takes %.2f us\n",
              kernels::instruction_set(), cores.first, cores.second,
              summarize(empty_exchange(2, options.rounds, options.quick ? 1e-3 : 0.05).microseconds).median);
  for (const std::string& name : options.caches) {
    CacheFormat cache;
    for (const CacheDType type : kAllCacheDTypes) {
      if (name == cache_dtype_name(type)) cache = type;
    }
    for (const int64_t rows : {1, 8}) {
      print_layer({shape, cache, rows, options.rounds,
                   rows == 1 ? options.steps : std::max(1, options.steps / 4), cores});
    }
    std::printf(
        "\n%s cache, canonical order beside merging freely, one row of one rank, 1 thread by its CPU clock\n",
        name.c_str());
    print_orders(options, shape, cache);
  }
}

int fail(const Error& failure) {
  std::fprintf(stderr, "layer_bench: %s\n", failure.text().c_str());
  return 2;
}

int main_of(int argc, char** argv) {
  using command_line::between;
  Options options;
  CLI::App app(
      "Decode steps of one layer of GLM's shape on two pinned processes: times by stage and grouping, and "
      "what "
      "the canonical order costs. Needs two idle cores for a minute or two.",
      "layer_bench");
  app.add_flag("--quick", options.quick, "tiny sizes and 2 rounds: shows that it works, measures nothing");
  auto* rounds = app.add_option("--rounds", options.rounds, "rounds over all groupings")
                     ->type_name("N")
                     ->check(between(int64_t{1}, int64_t{1000}))
                     ->capture_default_str();
  auto* steps = app.add_option("--steps", options.steps, "steps of a round (a quarter with 8 rows)")
                    ->type_name("N")
                    ->check(between(int64_t{1}, int64_t{10'000}))
                    ->capture_default_str();
  app.add_option("--caches", options.caches, "types of the cache, comma separated")
      ->type_name("LIST")
      ->delimiter(',')
      ->check(command_line::one_of({"f32", "bf16", "fp8", "fp8_ds_mla"}))
      ->capture_default_str();
  app.add_option("--first-core", options.first_core, "pin to this core and the next (default: chosen)")
      ->type_name("CORE")
      ->check(between(int64_t{0}, int64_t{4095}));
  const auto asked = command_line::parse_words(app, {argv + 1, argv + argc});
  if (!asked) return fail(asked.error());
  if (*asked == command_line::Asked::kHelp) {
    std::fputs(command_line::help_text(app).c_str(), stdout);
    return 0;
  }
  if (options.quick && rounds->count() == 0) options.rounds = 2;
  if (options.quick && steps->count() == 0) options.steps = 4;
  const auto cores = choose_cores(options.first_core);
  if (!cores) return fail(cores.error());
  run(options, *cores);
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) { return weft::bench::main_of(argc, argv); }
