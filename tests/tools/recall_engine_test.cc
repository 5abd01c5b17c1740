// The engine, in one process, on the recall model: the real control plane and runners find the facts in every
// format and grouping, also when they change while decoding. Answers only; bits are the business of
// tests/golden.
#include <gtest/gtest.h>

#include "tests/support/local_engine.h"
#include "tests/tools/recall_folder.h"
#include "tests/tools/recall_text.h"

namespace weft::test {
namespace {

EngineOptions engine_options(int ranks, CacheFormat cache, int64_t context) {
  EngineOptions options;
  options.workers.rank_count = ranks;
  options.workers.cache = cache;
  const int64_t blocks = context / options.workers.block_tokens + 4;
  options.workers.pool = {3 * blocks, 3 * blocks};
  options.workers.table_blocks = blocks;
  options.max_context = blocks * options.workers.block_tokens;
  return options;
}

RequestOptions request_options(controlplane::GroupingWish grouping) {
  RequestOptions options;
  options.grouping = grouping;
  options.max_tokens = 7;
  options.digest = false;  // logits of the sampled rows only
  return options;
}

std::string text_of(const RequestOutcome& outcome) {
  return std::string(outcome.tokens.begin(), outcome.tokens.end());
}

constexpr controlplane::GroupingWish kGroupings[] = {
    {kv::Split::kZigzag, {kv::DecodeKind::kDcp, 4}, kv::IndexKind::kCopied},
    {kv::Split::kInterleave, {kv::DecodeKind::kDcp, 2}, kv::IndexKind::kSplit},
    {kv::Split::kShared, {kv::DecodeKind::kTp, 1}, kv::IndexKind::kCopied},
    {kv::Split::kZigzag, {kv::DecodeKind::kDp, 1}, kv::IndexKind::kCopied},
};

// Weights and cache.
struct Format {
  DType weights;
  CacheFormat cache;
  std::string name() const {
    return std::string(dtype_name(weights)) + ", " + cache_dtype_name(cache.entries) + ", " +
           cache.index_name();
  }
};

CacheFormat with_hadamard(CacheFormat format) {
  format.index_hadamard = true;
  return format;
}

const Format kFormats[] = {{DType::kF32, DType::kF32},
                           {DType::kBF16, DType::kBF16},
                           {DType::kF32, CacheDType::kFp8DsMla},
                           {DType::kBF16, with_hadamard(CacheDType::kFp8DsMla)},
                           {DType::kBF16, CacheDType::kFp8}};

TEST(RecallEngine, FindsTheFactsInEveryFormatAndGrouping) {
  for (const Format& format : kFormats) {
    const LocalModel& model = local_model(recall_folder(format.weights), format.weights);
    for (const auto& grouping : kGroupings) {
      LocalEngine engine(model, engine_options(4, format.cache, 2000));
      std::vector<std::pair<RequestId, std::string>> asked;
      for (size_t i = 0; i < 3; ++i) {
        const RecallQuestion q = recall_question(2000, i);
        asked.emplace_back(engine.submit(tokens_of(q.prompt()), request_options(grouping)), q.answer);
      }
      engine.run_all();
      for (const auto& [request, answer] : asked) {
        EXPECT_EQ(text_of(engine.outcome(request)), answer)
            << format.name() << " " << kv::split_name(grouping.prefill) << " "
            << kv::decode_name(grouping.decode);
      }
    }
  }
}

TEST(RecallEngine, FindsTheFactAfterRegrouping) {
  const LocalModel& model = local_model(recall_folder(DType::kF32), DType::kF32);
  LocalEngine engine(model, engine_options(4, DType::kF32, 2000));
  const RecallQuestion q = recall_question(2000, 1);
  const RequestId request = engine.submit(tokens_of(q.prompt()), request_options(kGroupings[0]));
  bool asked = false;
  while (engine.step()) {
    if (!asked && engine.outcome(request).tokens.size() >= 2) {
      engine.regroup(request, {kv::DecodeKind::kTp, 1}, kv::IndexKind::kCopied);
      asked = true;
    }
  }
  EXPECT_TRUE(asked);
  EXPECT_EQ(text_of(engine.outcome(request)), q.answer);
}

// One long context for each format.
TEST(RecallEngineLong, FindsTheFactAt32768Tokens) {
  for (const Format& format : kFormats) {
    const LocalModel& model = local_model(recall_folder(format.weights), format.weights);
    LocalEngine engine(model, engine_options(4, format.cache, 32768));
    const RecallQuestion q = recall_question(32768, 0);
    const RequestId request = engine.submit(tokens_of(q.prompt()), request_options(kGroupings[0]));
    engine.run_all();
    EXPECT_EQ(text_of(engine.outcome(request)), q.answer) << format.name();
  }
}

}  // namespace
}  // namespace weft::test
