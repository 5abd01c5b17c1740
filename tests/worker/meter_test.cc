// Goal: the counters of real runs equal the cost arithmetic, for every rank, kind and grouping.
// Method: a prompt in two chunks that begin and end inside blocks, then a decode row, on real runners in one
// process; each step's meters against kv::step_cost(). Where rows select entries (sparse layers), the entries
// read from other ranks' pages may only stay below the bound; and what is read of offers of index keys is at
// least what proves a selection at once, at most all, and most often just that.
#include <gtest/gtest.h>

#include "kv/cost.h"
#include "proto/vocab/units.h"
#include "tests/support/local_workers.h"
#include "tests/worker/ways.h"
#include "worker/describe.h"

namespace weft::test {
namespace {

constexpr int64_t kBlockTokens = 8;

kv::CostModel cost_model(const LocalModel& model, int ranks, CacheFormat cache) {
  worker::WorkerSettings settings;
  settings.rank_count = ranks;
  settings.config = model.config;
  settings.cache = cache;
  settings.block_tokens = kBlockTokens;
  settings.max_step_rows = 64;
  const wire::ModelDescription description = worker::describe_model(settings, 0);
  auto count = [](uint64_t value) { return static_cast<int64_t>(value); };
  kv::CostModel out;
  out.geometry = settings.geometry();
  out.layers = count(description.layers());
  out.dense_layers = count(description.dense_layers());
  out.hidden = count(description.hidden());
  out.vocabulary = count(description.vocabulary());
  out.query_bytes = count(description.query_bytes());
  out.value_width = count(description.value_width());
  out.index_topk = count(description.index_topk());
  out.window = count(description.window());
  out.window_layers = count(description.window_layers());
  out.dense_segments = description.dense_segments();
  out.moe_segments = description.moe_segments();
  out.rank_count = ranks;
  return out;
}

// Added up, so that the test knows it saw something.
struct Seen {
  kv::CrossedBytes crossed;
  int64_t selections = 0, at_once = 0;  // (rank, step) that read own positions alone; of them, proved at once
};

void check_candidates(const kv::CostModel& model, const kv::CostSpan& span, int64_t got, int64_t predicted,
                      Seen& seen) {
  // Else positions of others' chosen keys are read.
  const bool own_only = kv::common_classes(span.grouping.c, span.index_c) == span.index_c;
  const int64_t selections = span.rows * model.index_layers();
  const int64_t positions = own_only ? 0 : selections * model.index_topk * 4;
  EXPECT_GE(got, predicted - positions);
  EXPECT_LE(got, selections * (span.index_c - 1) * (16 + 8 * model.index_topk) + positions);
  if (!own_only || predicted == 0) return;
  ++seen.selections;
  seen.at_once += got == predicted;
}

// Runs the sequence and compares every step and rank.
void check_way(LocalWorkers& workers, const kv::CostModel& model, const Way& way, Seen& seen) {
  SCOPED_TRACE(way.name());
  kv::CostSpan span = span_of(way);
  write_table(workers, span, way.ranks);
  struct Step {
    int64_t start, rows;
    bool digest;
  };
  uint64_t number = 0;
  for (const Step& step : {Step{0, 21, true}, Step{21, 40, false}, Step{61, 1, false}}) {
    span.start = step.start;
    span.rows = step.rows;
    span.head_rows = step.digest ? step.rows : 1;
    span.split = step.rows == 1 ? kv::Split::kShared : way.split;
    const auto results = workers.run(plan_of(span, ++number, step.digest, model.vocabulary)).value();
    for (int rank = 0; rank < way.ranks; ++rank) {
      EXPECT_EQ(results[static_cast<size_t>(rank)].exchanges(), kv::step_exchanges(model, {&span, 1}));
      kv::CrossedBytes got = measured(results[static_cast<size_t>(rank)]);
      kv::Cost cost = kv::step_cost(model, span, rank);
      seen.crossed += got;
      if (!cost.exact) {
        using K = kv::CrossKind;
        EXPECT_LE(got[K::kEntries], cost.crossed[K::kEntries]);
        check_candidates(model, span, got[K::kCandidates], cost.crossed[K::kCandidates], seen);
        for (K kind : {K::kEntries, K::kCandidates}) got[kind] = cost.crossed[kind] = 0;
      }
      for (int kind = 0; kind < kv::kCrossKinds; ++kind) {
        EXPECT_EQ(got.by_kind[static_cast<size_t>(kind)], cost.crossed.by_kind[static_cast<size_t>(kind)])
            << kv::cross_kind_name(static_cast<kv::CrossKind>(kind)) << ", rank " << rank << ", rows "
            << step.start << " + " << step.rows;
      }
    }
  }
}

void check_model(const std::string& name, CacheFormat cache, bool draft_layers = false,
                 bool split_experts = false) {
  const LocalModel& model =
      local_model(std::string(WEFT_GOLDEN_FOLDER "/") + name, DType::kF32, draft_layers, split_experts);
  for (int ranks : {1, 2, 3, 4, 8}) {
    LocalOptions options;
    options.rank_count = ranks;
    options.cache = cache;
    options.block_tokens = kBlockTokens;
    options.max_step_rows = 64;
    options.pool = {16 * model.config.kv_heads, 16};
    options.table_count = 1;
    options.table_blocks = 16;
    LocalWorkers workers(model, options);
    workers.keep_logits(false);
    const kv::CostModel cost = cost_model(model, ranks, cache);
    Seen seen;
    for (const Way& way : all_ways(ranks, cost.index_topk == 0)) check_way(workers, cost, way, seen);
    using K = kv::CrossKind;
    for (K kind : {K::kEntries, K::kQueries, K::kPartials, K::kRows})
      EXPECT_EQ(seen.crossed[kind] > 0, ranks > 1);
    for (K kind : {K::kIndexKeys, K::kCandidates})
      EXPECT_EQ(seen.crossed[kind] > 0, ranks > 1 && cost.index_topk > 0);
    EXPECT_GE(2 * seen.at_once, seen.selections);
  }
}

TEST(Meter, EqualsTheArithmeticForADenseModel) { check_model("deepseek_v3", DType::kF32); }
TEST(Meter, EqualsTheArithmeticWithSplitExperts) { check_model("qwen3_moe", DType::kF32, false, true); }
TEST(Meter, EqualsTheArithmeticWithUnevenHeads) { check_model("glm4_moe_lite", DType::kF32); }
TEST(Meter, EqualsTheArithmeticForGroupedQueries) { check_model("qwen3_moe", DType::kF32); }
TEST(Meter, EqualsTheArithmeticForUnevenGroups) { check_model("llama_smol", DType::kBF16); }
TEST(Meter, EqualsTheArithmeticWithWindows) { check_model("qwen2_window", DType::kF32); }
TEST(Meter, EqualsTheArithmeticForASparseModel) { check_model("deepseek_v32", DType::kF32); }
TEST(Meter, EqualsTheArithmeticForQuantisedModels) {
  check_model("glm_moe_dsa_fp8", DType::kBF16);
  check_model("qwen3_moe_nvfp4", DType::kF32);
}
TEST(Meter, EqualsTheArithmeticWithADraftLayer) {
  check_model("glm_moe_dsa_draft", DType::kF32, /*draft_layers=*/true);
  check_model("glm_moe_dsa_kept_draft", DType::kF32, /*draft_layers=*/true);
  check_model("deepseek_v3_sure_drafts", DType::kF32, /*draft_layers=*/true);
}
TEST(Meter, EqualsTheArithmeticWithSharedSelections) { check_model("glm_moe_dsa", DType::kBF16); }
TEST(Meter, EqualsTheArithmeticForFp8DsMla) { check_model("glm_moe_dsa", CacheDType::kFp8DsMla); }
TEST(Meter, EqualsTheArithmeticForFp8KAndV) { check_model("llama_smol", CacheDType::kFp8); }

}  // namespace
}  // namespace weft::test
