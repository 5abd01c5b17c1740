// Goal: a wish for a mechanism is what runs: the counters of an answer's steps are those of that mechanism
// and of no other. Method: the same request, alone, once with each; bytes by kind and exchange points against
// each other. That the logits are the same bits is bits_test.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "tests/support/bits.h"
#include "worker/model/config.h"

namespace weft::test {
namespace {

using K = kv::CrossKind;
constexpr int64_t kRanks = 4, kPrompt = 150, kAnswer = 9, kSteps = kAnswer - 1;

struct Seen {
  kv::CrossedBytes prefill, decode;
  int64_t exchanges = 0;  // of the steps after the first token
  int64_t prefill_exchanges = 0;
  std::vector<uint32_t> tokens;
  std::vector<std::vector<float>> logits;  // of the prompt
};

// By position, the largest difference between two logits.
std::vector<double> row_distances(const Seen& a, const Seen& b) {
  std::vector<double> out;
  for (size_t position = 0; position < a.logits.size(); ++position) {
    double worst = 0;
    for (size_t i = 0; i < a.logits[position].size(); ++i) {
      worst = std::max(worst, std::abs(double{a.logits[position][i]} - double{b.logits[position][i]}));
    }
    out.push_back(worst);
  }
  return out;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + std::ssize(values) / 2, values.end());
  return values[values.size() / 2];
}

class Mechanism : public ::testing::Test {
 protected:
  const LocalModel& model = local_model(std::string(WEFT_GOLDEN_FOLDER) + "/glm_moe_dsa", DType::kF32);
  const int64_t layers = std::ssize(model.config.layers), index_layers = model.config.index_layers();

  Seen run(const controlplane::GroupingWish& wish) { return run(wish, model); }
  Seen run(const controlplane::GroupingWish& wish, const LocalModel& of, CacheFormat cache = {}) {
    EngineOptions options;
    options.workers.cache = cache;
    options.workers.rank_count = kRanks;
    options.workers.block_tokens = 8;
    options.workers.pool = {64, 64};
    options.max_context = 256;
    options.max_chunk_rows = 64;
    LocalEngine engine(of, options);
    std::vector<uint32_t> prompt;
    for (int64_t i = 0; i < kPrompt; ++i)
      prompt.push_back(static_cast<uint32_t>(i * 7 % of.config.vocabulary));
    RequestOptions request;
    request.grouping = wish;
    request.max_tokens = kAnswer;
    request.digest = true;
    const RequestId id = engine.submit(prompt, request);
    int64_t before = 0;
    do {
      if (engine.outcome(id).tokens.size() <= 1) before = engine.exchanges();
    } while (engine.step());
    EXPECT_TRUE(engine.outcome(id).finished);
    const RequestOutcome& outcome = engine.outcome(id);
    std::vector<std::vector<float>> logits;
    for (int64_t position = 0; position < kPrompt; ++position) {
      logits.push_back(engine.workers().logits().at({number(id), position}));
    }
    return {outcome.prefill_crossed, outcome.decode_crossed, engine.exchanges() - before, before,
            outcome.tokens,          std::move(logits)};
  }

  controlplane::GroupingWish wish(const char* decode, const char* mechanisms = "",
                                  const char* index = "copied") {
    return {kv::Split::kZigzag, kv::parse_decode(decode, kRanks).value(),
            kv::parse_index(index, kRanks).value(), kv::parse_mechanisms(mechanisms, {}).value()};
  }
};

TEST_F(Mechanism, ReplicatedQueriesSendNoneAndSaveAnExchange) {
  const Seen gathered = run(wish("dcp(4)")), replicated = run(wish("dcp(4)", "query=replicated"));
  EXPECT_GT(gathered.decode[K::kQueries], 0);
  EXPECT_EQ(replicated.decode[K::kQueries], 0);
  EXPECT_EQ(replicated.decode[K::kPartials], gathered.decode[K::kPartials]);
  EXPECT_EQ(gathered.exchanges, kSteps * (4 * layers + 1));
  EXPECT_EQ(replicated.exchanges, kSteps * (3 * layers + 1));
  EXPECT_EQ(replicated.tokens, gathered.tokens);
}

TEST_F(Mechanism, ATreeOfPartialsTakesAsManyBytesInTwoRounds) {
  const Seen direct = run(wish("dcp(4)")), tree = run(wish("dcp(4)", "partials=tree"));
  EXPECT_EQ(tree.decode[K::kPartials], direct.decode[K::kPartials]);
  EXPECT_EQ(tree.exchanges, kSteps * (5 * layers + 1));
  EXPECT_EQ(tree.tokens, direct.tokens);
}

TEST_F(Mechanism, TheIndexIsSplitOrScoredInPartsAsAsked) {
  const Seen copied = run(wish("dcp(4)", "query=replicated"));
  EXPECT_EQ(copied.decode[K::kCandidates], 0);
  int64_t last = 0;
  for (const char* index : {"copied(2)", "split(2)", "copied(4)", "split"}) {
    const Seen parts = run(wish("dcp(4)", "query=replicated", index));
    EXPECT_EQ(parts.exchanges, kSteps * (3 * layers + index_layers + 1)) << index;
    // From one other rank, or from three.
    EXPECT_GE(parts.decode[K::kCandidates], last) << index;
    EXPECT_GT(parts.decode[K::kCandidates], 0) << index;
    last = parts.decode[K::kCandidates];
    EXPECT_EQ(parts.tokens, copied.tokens) << index;
  }
}

TEST_F(Mechanism, AGroupExchangesInsideItself) {
  const Seen all = run(wish("dcp(4)")), pair = run(wish("dp(2)xdcp(2)"));
  // Each of two ranks gets the other's half of the heads; of four, each gets three quarters.
  EXPECT_EQ(pair.decode[K::kQueries] * 3, all.decode[K::kQueries]);
  EXPECT_EQ(pair.decode[K::kPartials] * 3, all.decode[K::kPartials]);
  EXPECT_LT(pair.decode[K::kRows], all.decode[K::kRows]);
  EXPECT_EQ(pair.tokens, all.tokens);
  const Seen heads = run(wish("dp(2)xtp"));
  EXPECT_EQ(heads.decode[K::kQueries] + heads.decode[K::kPartials], 0);
  EXPECT_EQ(heads.exchanges, kSteps * (2 * layers + 1));
}

// Dense: in a model without an indexer, all rows pass their queries.
TEST_F(Mechanism, QueriesTravelInsteadOfEntries) {
  const LocalModel& dense = local_model(std::string(WEFT_GOLDEN_FOLDER) + "/deepseek_v3", DType::kF32);
  const int64_t dense_layers = std::ssize(dense.config.layers);
  const Seen kv = run(wish("dcp(4)", "context=pass-kv"), dense),
             q = run(wish("dcp(4)", "context=pass-q"), dense);
  EXPECT_EQ(kv.prefill[K::kQueries] + kv.prefill[K::kPartials], 0);
  EXPECT_GT(q.prefill[K::kQueries], 0);
  EXPECT_GT(q.prefill[K::kPartials], 0);
  // What is left of entries: each row's own, written to its holder where that is another rank.
  EXPECT_LE(q.prefill[K::kEntries],
            dense_layers * kPrompt * dense.config.entry_width() * static_cast<int64_t>(sizeof(float)));
  EXPECT_LT(q.prefill[K::kEntries], kv.prefill[K::kEntries]);
  EXPECT_EQ(q.tokens, kv.tokens);
  // Three chunks, one more exchange point in every layer.
  EXPECT_EQ(q.prefill_exchanges, kv.prefill_exchanges + 3 * dense_layers);
}

TEST_F(Mechanism, CopiesBringWholeShards) {
  const Seen view = run(wish("dcp(4)", "context=pass-kv")),
             copies = run(wish("dcp(4)", "context=pass-kv,fetch=copies"));
  // Rows of this model select entries: in place they touch fewer than lie in the shards.
  EXPECT_GT(copies.prefill[K::kEntries], view.prefill[K::kEntries]);
  EXPECT_EQ(copies.prefill[K::kIndexKeys], view.prefill[K::kIndexKeys]);
  EXPECT_EQ(copies.tokens, view.tokens);
}

// Expanded prefill adds in another order: near the absorbed one in every position, and not equal to it.
TEST_F(Mechanism, ExpandedPrefillIsNear) {
  for (const char* name : {"deepseek_v3", "deepseek_v2_lite"}) {
    const LocalModel& dense = local_model(std::string(WEFT_GOLDEN_FOLDER) + "/" + name, DType::kF32);
    const Seen absorbed = run(wish("dcp(4)", "context=pass-kv"), dense),
               expanded = run(wish("dcp(4)", "context=pass-kv,form=expanded"), dense);
    EXPECT_EQ(expanded.prefill[K::kEntries], absorbed.prefill[K::kEntries]) << name;
    const std::vector<double> distances = row_distances(absorbed, expanded);
    const double distance = *std::max_element(distances.begin(), distances.end());
    int64_t different = 0;
    ASSERT_EQ(std::ssize(expanded.logits), kPrompt);
    for (size_t position = 0; position < absorbed.logits.size(); ++position) {
      different += absorbed.logits[position] != expanded.logits[position] ? 1 : 0;
    }
    std::printf("%s: %lld of %lld rows differ, by at most %.3g\n", name, static_cast<long long>(different),
                static_cast<long long>(kPrompt), distance);
    EXPECT_GT(different, kPrompt / 2) << name;
    EXPECT_LT(distance, 1e-3) << name;
  }
}

// It reads what the cache holds: with FP8 entries it is much nearer to absorbed prefill over the same entries
// than to itself over float32. In most rows: expanded keys and values are rounded to bf16, which turns some
// rows' choices of experts.
TEST_F(Mechanism, ExpandedPrefillReadsFp8Entries) {
  const LocalModel& dense = local_model(std::string(WEFT_GOLDEN_FOLDER) + "/deepseek_v3_plain", DType::kF32);
  for (const CacheDType cache : {CacheDType::kFp8DsMla, CacheDType::kFp8}) {
    const Seen absorbed = run(wish("dcp(4)", "context=pass-kv"), dense, cache),
               expanded = run(wish("dcp(4)", "context=pass-kv,form=expanded"), dense, cache),
               exact = run(wish("dcp(4)", "context=pass-kv,form=expanded"), dense);
    const double same = median(row_distances(absorbed, expanded)),
                 other = median(row_distances(exact, expanded));
    std::printf("%s: %.3g and %.3g\n", cache_dtype_name(cache), same, other);
    EXPECT_GT(same, 0);
    EXPECT_LT(3 * same, other);
  }
}

TEST_F(Mechanism, ByDefaultTheCheaperWayRuns) {
  const LocalModel& dense = local_model(std::string(WEFT_GOLDEN_FOLDER) + "/deepseek_v3", DType::kF32);
  const auto prefill_bytes = [&](const char* mechanisms) {
    int64_t sum = 0;
    for (const int64_t kind : run(wish("dcp(4)", mechanisms), dense).prefill.by_kind) sum += kind;
    return sum;
  };
  const int64_t automatic = prefill_bytes("");
  EXPECT_LE(automatic, prefill_bytes("context=pass-kv"));
  EXPECT_LE(automatic, prefill_bytes("context=pass-q"));
}

TEST_F(Mechanism, ContiguousPiecesReadMoreThanZigzag) {
  // The last rank's piece sees everything before it: ranks read as far as their last row, which zigzag
  // spreads.
  controlplane::GroupingWish contiguous = wish("dcp(4)");
  contiguous.prefill = kv::Split::kContiguous;
  const Seen zigzag = run(wish("dcp(4)")), pieces = run(contiguous);
  EXPECT_NE(pieces.prefill[K::kEntries], zigzag.prefill[K::kEntries]);
  EXPECT_EQ(pieces.tokens, zigzag.tokens);
}

}  // namespace
}  // namespace weft::test
