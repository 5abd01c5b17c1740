// Goal: the numbers that benchmarks stand beside are right, and a benchmark leaves nothing behind.
// Method: medians and shares of known values; contenders that write down their turns; the work of a kernel or
// a small model against counting it out row by row; a guarded child that aborts and leaves a process and a
// file.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "kernels/parallel.h"
#include "tests/bench/dcp_exchange.h"
#include "tests/bench/figures.h"
#include "tests/bench/guard.h"
#include "tests/bench/kernel_measure.h"
#include "tests/bench/linear_measure.h"
#include "tests/bench/model_work.h"
#include "tests/bench/rank_turns.h"
#include "tests/bench/rounds.h"
#include "tests/bench/traces.h"
#include "tests/support/temp_folder.h"

namespace weft::bench {
namespace {

TEST(Figures, MedianAndRange) {
  EXPECT_DOUBLE_EQ(summarize({5, 1, 9}).median, 5);
  const Summary four = summarize({4, 1, 8, 2});
  EXPECT_DOUBLE_EQ(four.median, 3);
  EXPECT_DOUBLE_EQ(four.min, 1);
  EXPECT_DOUBLE_EQ(four.max, 8);
  EXPECT_EQ(four.count, 4u);
  EXPECT_EQ(ratios({6, 8}, {3, 2}), (std::vector<double>{2, 4}));
}

TEST(Figures, ShareIsOneAtTheCeiling) {
  Figure figure{"g", "n", "u", summarize({50}), Ceiling{"c", 200}};
  EXPECT_DOUBLE_EQ(*figure.share(), 0.25);
  figure.ceiling = Ceiling{"c", 10, true};
  EXPECT_DOUBLE_EQ(*figure.share(), 0.2);
  figure.ceiling.reset();
  EXPECT_FALSE(figure.share());
}

TEST(Rounds, ContendersTakeTurns) {
  std::string turns;
  const Contender contenders[] = {{"a", 3, [&] { turns += 'a'; }}, {"b", 0, [&] { turns += 'b'; }}};
  const auto rates = take_turns(contenders, 3, 1, 0);
  // Each turn: one run that does not count, and one that does; in the first round another one, to see how
  // long it takes.
  EXPECT_EQ(turns, "aaabbbaabbaabb");
  ASSERT_EQ(rates.size(), 2u);
  for (const auto& of_one : rates) EXPECT_EQ(of_one.size(), 3u);
  for (const double rate : rates[0]) EXPECT_GT(rate, 0);
  EXPECT_EQ(rates[1], (std::vector<double>{0, 0, 0}));
}

// Every contender is run once, too.
double work_of(const Contender& contender) {
  contender.run();
  return contender.work;
}

TEST(KernelWork, CountsPairsAndEntries) {
  kernels::Parallel& serial = kernels::serial();
  for (const CacheDType cache : kAllCacheDTypes) {
    SCOPED_TRACE(cache_dtype_name(cache));
    double latent = 0;  // 16 rows, 3 heads, 20 entries: a dot product of the key, a sum of values
    for (int i = 0; i < 16 * 3 * 20; ++i) latent += 2 * (128 + 32) + 2 * 128;
    EXPECT_DOUBLE_EQ(work_of(attention({3, 128, 32, 20, 100}, cache, serial)), latent);
    if (cache == CacheDType::kFp8DsMla) continue;
    double scored = 0;  // row r of the last 5 sees the keys up to its own
    for (int64_t r = 0; r < 5; ++r) scored += 2 * 3 * 32 * static_cast<double>(128 - 5 + r + 1);
    EXPECT_DOUBLE_EQ(work_of(indexer({3, 32, 128, 5, 7}, cache, serial)), scored);
    // 1,024 tokens in blocks of 64 are 128 of each of eight lists; the row before the last eight sees one
    // less.
    double attended = 0;
    for (int64_t r = 0; r < 9; ++r) attended += 8 * (r == 0 ? 127 : 128);
    EXPECT_DOUBLE_EQ(work_of(grouped({3, 64, 1024, 9}, cache, serial)), attended * 3 * 2 * (64 + 64));
  }
}

TEST(KernelWork, ProductsCountOperationsOrBytes) {
  kernels::Parallel& serial = kernels::serial();
  const double bytes[] = {48 * 128 * 4, 48 * 128 * 2, 3 * (64 + 128 * 16), 3 * (64 + 2 * (64 + 64 * 8))};
  for (size_t i = 0; i < std::size(kWeights); ++i) {
    SCOPED_TRACE(kWeights[i].name);
    EXPECT_DOUBLE_EQ(work_of(gemm(kWeights[i], {5, 48, 128}, serial)), 2.0 * 5 * 48 * 128);
    EXPECT_DOUBLE_EQ(work_of(gemv(kWeights[i], {1, 48, 128}, serial, 100'000)), bytes[i]);
  }
}

worker::ModelConfig small_model() {
  worker::ModelConfig c;
  c.hidden = 48, c.heads = 4, c.vocabulary = 80;
  c.layers = {{worker::FeedForward::kDense, worker::Indexer::kFull},
              {worker::FeedForward::kMoe, worker::Indexer::kShared},
              {worker::FeedForward::kMoe, worker::Indexer::kFull}};
  c.q_lora_rank = 24, c.latent = 32, c.nope = 16, c.rope = 8, c.value = 12;
  c.index_heads = 2, c.index_width = 16, c.index_topk = 5;
  c.dense_width = 64, c.expert_width = 32, c.shared_width = 16;
  c.experts = 8, c.experts_per_token = 3;
  return c;
}

// Operations of one row after `position` others, layer by layer.
double row_operations(const worker::ModelConfig& c, int64_t position) {
  double multiply_adds = 0;
  const int64_t seen = position + 1;
  for (const worker::LayerConfig& layer : c.layers) {
    int64_t n = c.hidden * c.q_lora_rank + c.q_lora_rank * c.heads * (c.nope + c.rope);  // queries
    n += c.hidden * (c.latent + c.rope);                                                 // entry
    n += c.heads * (c.nope * c.latent + c.latent * c.value + c.value * c.hidden);  // absorb, values, out
    n += c.heads * std::min(seen, c.index_topk) * (c.latent + c.rope + c.latent);
    if (layer.indexer == worker::Indexer::kFull) {
      n +=
          c.index_heads * c.index_width * c.q_lora_rank + c.hidden * c.index_width + c.hidden * c.index_heads;
      if (seen > c.index_topk) n += seen * c.index_heads * c.index_width;
    }
    if (layer.feed_forward == worker::FeedForward::kDense) {
      n += 3 * c.hidden * c.dense_width;
    } else {
      n += c.hidden * c.experts + 3 * c.hidden * (c.experts_per_token * c.expert_width + c.shared_width);
    }
    multiply_adds += static_cast<double>(n);
  }
  return 2 * multiply_adds;
}

TEST(ModelWork, PrefillIsTheSumOfItsRows) {
  const worker::ModelConfig c = small_model();
  for (int64_t tokens : {1, 5, 6, 40}) {
    double want = 2.0 * static_cast<double>(c.hidden * c.vocabulary);
    for (int64_t position = 0; position < tokens; ++position) want += row_operations(c, position);
    EXPECT_NEAR(prefill_work(c, tokens).operations, want, 1e-9 * want) << tokens;
  }
}

TEST(ModelWork, DecodeReadsKeysAndSelectedEntries) {
  const worker::ModelConfig c = small_model();
  const double head = 2.0 * static_cast<double>(c.hidden * c.vocabulary);
  for (int64_t context : {0, 4, 5, 100}) {
    const Work work = decode_work(c, DType::kF32, DType::kF32, context);
    const double want = row_operations(c, context) + head;
    EXPECT_NEAR(work.operations, want, 1e-9 * want);
  }
  // One more token of context: one more index key in each of two index layers, 16 wide, in every dtype.
  for (CacheDType cache : kAllCacheDTypes) {
    const double more =
        decode_work(c, DType::kF32, cache, 101).bytes - decode_work(c, DType::kF32, cache, 100).bytes;
    const double key = cache == CacheDType::kF32 ? 64 : cache == CacheDType::kBF16 ? 32 : 20;
    EXPECT_DOUBLE_EQ(more, 2 * key);
  }
}

TEST(Traces, PrefixesAreThoseOfEarlierRequests) {
  const test::TempFolder folder;
  std::ofstream(folder.path() + "/b.jsonl")
      << R"({"timestamp": 0, "input_length": 1300, "output_length": 5, "hash_ids": [0, 1, 2]})"
         "\n"
      << R"({"timestamp": 1, "input_length": 2000, "output_length": 5, "hash_ids": [0, 1, 3, 2]})"
         "\n"
      << R"({"timestamp": 2, "input_length": 1024, "output_length": 5, "hash_ids": [0, 1]})"
         "\n";
  std::ofstream(folder.path() + "/agent_x.jsonl")
      << R"({"id": "a", "group": "g", "requests": [[0, 700, 9, 0, 10, 1.5, 0, 0], [3, 900, 9, 2, 14, null, 0, 0, 0, 10]]})"
      << "\n"
      << R"({"id": "b", "group": "g", "requests": [[0, 500, 9, 0, 7, 1.5, 0, 0]]})"
         "\n";
  const std::vector<Trace> traces = read_traces(folder.path()).value();
  const auto cached = [&](size_t trace) {
    std::vector<std::pair<int64_t, int64_t>> out;
    for (const TracePrompt& one : traces.at(trace).prompts()) out.emplace_back(one.tokens, one.cached);
    return out;
  };
  using Pairs = std::vector<std::pair<int64_t, int64_t>>;
  ASSERT_EQ(traces.size(), 2u);
  EXPECT_EQ(cached(0), (Pairs{{700, 0}, {900, 640}}));
  EXPECT_EQ(cached(1), (Pairs{{1300, 0}, {2000, 1024}, {1024, 1023}}));

  std::ofstream(folder.path() + "/b.jsonl", std::ios::app) << "{}\n";
  const auto bad = read_traces(folder.path());
  ASSERT_FALSE(bad.has_value());
  EXPECT_NE(bad.error().message.find("b.jsonl:4: "), std::string::npos) << bad.error().message;
  EXPECT_EQ(read_traces(folder.path() + "/none").error().code, ErrorCode::kNotFound);
}

TEST(Traces, ShapesDrawWithinTheirQuantiles) {
  SplitMix64 random(5);
  for (const Trace& trace : trace_shapes()) {
    int64_t cached = 0;
    for (int i = 0; i < 1000; ++i) {
      const TracePrompt one = trace.draw(random);
      ASSERT_TRUE(one.tokens > one.cached && one.cached >= 0) << trace.name();
      cached += one.cached > 0;
    }
    EXPECT_GT(cached, 500) << trace.name();
  }
}

TEST(RankTurns, EveryRankTakesEveryTurnAsOftenAsTheOthers) {
  constexpr int kRanks = 3, kRounds = 4;
  const kv::Descriptor memory = kv::create_memory("counts", 4096).value();
  const kv::Mapping shared = kv::Mapping::map(memory.get(), 4096).value();
  auto* counts = reinterpret_cast<std::atomic<int64_t>*>(shared.data());
  const auto turns = measure_turns(kRanks, 64, {kRounds, 1e-4, 2}, [&](RankArenas&, auto& exchange) {
    std::atomic<int64_t>* mine = counts + 2 * exchange.rank();
    return std::vector<Variant>{{[mine, &exchange] {
                                  ++mine[0];
                                  exchange.pass(worker::ExchangePoint::kEntries, 0).value();
                                }},
                                {[mine] { ++mine[1]; }}};
  });
  ASSERT_EQ(turns.size(), 2u);
  for (int variant = 0; variant < 2; ++variant) {
    EXPECT_GT(counts[variant], 3 * kRounds);
    for (int rank = 1; rank < kRanks; ++rank) EXPECT_EQ(counts[2 * rank + variant], counts[variant]) << rank;
    EXPECT_EQ(turns[static_cast<size_t>(variant)].microseconds.size(), size_t{kRounds});
    EXPECT_GT(summarize(turns[static_cast<size_t>(variant)].microseconds).min, 0);
  }
  EXPECT_EQ(summarize(turns[1].sleeps).max, 0);  // nothing waits in it
}

TEST(StepPoints, DcpAddsOneInEachLayerAndASplitIndexOneInEachIndexLayer) {
  for (int ranks : {2, 4, 8}) {
    const StepPoints points = step_points(ranks);
    EXPECT_EQ(points.tp, 2 * 78 + 1);
    EXPECT_EQ(points.replicated, points.tp + 78);
    EXPECT_EQ(points.gathered, points.tp + 2 * 78);
    EXPECT_EQ(points.replicated_split_index, points.tp + 78 + 21);
  }
}

// In a process of its own, since the guard reaps every child of the process it runs in.
int guarded_in_child(const std::function<int(const std::string&)>& work) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(run_guarded("weft-bench-test", work));
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Guard, ReturnsTheWorksCode) {
  EXPECT_EQ(guarded_in_child([](const std::string&) { return 0; }), 0);
  EXPECT_EQ(guarded_in_child([](const std::string&) { return 7; }), 7);
}

TEST(Guard, NothingIsLeftAfterAnAbort) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const int code = guarded_in_child([&](const std::string& folder) -> int {
    std::ofstream(folder + "/file") << "something";
    int ready[2];
    CHECK_EQ(::pipe(ready), 0);
    if (::fork() == 0) {  // what a daemon does: it is told of its parent's death, and then ends
      ::prctl(PR_SET_PDEATHSIG, SIGTERM);
      CHECK_EQ(::write(ready[1], "r", 1), 1);
      ::alarm(60);
      ::pause();
    }
    char byte;
    CHECK_EQ(::read(ready[0], &byte, 1), 1);
    const pid_t self = ::getpid();
    CHECK_EQ(::write(ends[1], &self, sizeof self), static_cast<ssize_t>(sizeof self));
    CHECK_EQ(::write(ends[1], folder.data(), folder.size()), static_cast<ssize_t>(folder.size()));
    std::abort();
  });
  ::close(ends[1]);
  EXPECT_EQ(code, 128 + SIGABRT);
  pid_t work = 0;
  ASSERT_EQ(::read(ends[0], &work, sizeof work), static_cast<ssize_t>(sizeof work));
  char folder[4096] = "";
  ASSERT_GT(::read(ends[0], folder, sizeof folder - 1), 0);
  EXPECT_FALSE(std::filesystem::exists(folder)) << folder;
  // Every holder of the pipe's other end is gone, the grandchild with it.
  char more;
  EXPECT_EQ(::read(ends[0], &more, 1), 0);
  ::close(ends[0]);
}

}  // namespace
}  // namespace weft::bench
