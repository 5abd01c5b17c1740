// Goal: logits agree with transformers (float32) at every position, and greedy tokens are equal.
// Method: the tiny checkpoints of this folder, run through control plane and workers as weftd runs them: on
// one rank and split over several, at once, in chunks and row by row.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "tests/support/local_engine.h"
#include "worker/model/safetensors.h"

namespace weft::test {
namespace {

constexpr float kTolerance = 2e-4f;

struct Golden {
  explicit Golden(const std::string& name, const std::string& file_name = "golden")
      : folder(std::string(WEFT_GOLDEN_FOLDER) + "/" + name),
        file(worker::SafetensorsFile::open(folder + "/" + file_name + ".safetensors").value()) {}

  std::vector<uint32_t> tokens(const std::string& tensor) const {
    const worker::Tensor* found = file.find(tensor);
    CHECK(found != nullptr, tensor);
    std::vector<uint32_t> out(static_cast<size_t>(found->count()));
    std::memcpy(out.data(), found->data, static_cast<size_t>(found->bytes));
    return out;
  }

  std::string folder;
  worker::SafetensorsFile file;
};

struct Way {
  const char* name;
  int ranks;
  kv::Split prefill;
  kv::DecodeWish decode;
  kv::IndexKind index;
  int64_t chunk;  // 0: at once
};

const Way kWays[] = {
    {"one rank at once", 1, kv::Split::kShared, {kv::DecodeKind::kTp, 1}, kv::IndexKind::kCopied, 0},
    {"one rank, chunks of 7", 1, kv::Split::kShared, {kv::DecodeKind::kTp, 1}, kv::IndexKind::kCopied, 7},
    {"one rank, row by row", 1, kv::Split::kShared, {kv::DecodeKind::kTp, 1}, kv::IndexKind::kCopied, 1},
    {"zigzag, dcp(4), split", 4, kv::Split::kZigzag, {kv::DecodeKind::kDcp, 4}, kv::IndexKind::kSplit, 20},
    {"interleave, dp", 2, kv::Split::kInterleave, {kv::DecodeKind::kDp, 1}, kv::IndexKind::kCopied, 24},
    {"none, tp", 3, kv::Split::kShared, {kv::DecodeKind::kTp, 1}, kv::IndexKind::kCopied, 0},
};

class GoldenTest : public ::testing::TestWithParam<const char*> {};

// The largest difference of any logit.
float worst_logit(LocalEngine& engine, RequestId request, const worker::Tensor& golden,
                  const std::string& what) {
  const int64_t rows = golden.shape[0], width = golden.shape[1];
  std::vector<float> expected(static_cast<size_t>(rows * width));
  std::memcpy(expected.data(), golden.data, static_cast<size_t>(golden.bytes));
  float worst = 0;
  int64_t worst_row = 0, worst_token = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const auto found = engine.workers().logits().find({number(request), row});
    CHECK(found != engine.workers().logits().end(), what, ": no logits at position ", row);
    CHECK_EQ(std::ssize(found->second), width);
    for (int64_t token = 0; token < width; ++token) {
      const float difference = std::abs(found->second[static_cast<size_t>(token)] -
                                        expected[static_cast<size_t>(row * width + token)]);
      if (!(difference <= worst)) worst = difference, worst_row = row, worst_token = token;
    }
  }
  std::printf("%s: %.2g at position %lld, token %lld\n", what.c_str(), static_cast<double>(worst),
              static_cast<long long>(worst_row), static_cast<long long>(worst_token));
  return worst;
}

EngineOptions engine_options(const Way& way) {
  EngineOptions options;
  options.workers.rank_count = way.ranks;
  options.workers.block_tokens = 8;
  options.workers.max_step_rows = 256;
  options.workers.pool = {128, 128};
  options.max_chunk_rows = way.chunk;
  options.max_context = 512;
  return options;
}

TEST_P(GoldenTest, LogitsAndGreedyTokens) {
  const Golden golden(GetParam());
  const LocalModel& model = local_model(golden.folder, DType::kF32);
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    LocalEngine engine(model, engine_options(way));
    RequestOptions request;
    request.grouping = {way.prefill, way.decode, way.index};
    const std::vector<uint32_t> greedy = golden.tokens("greedy.tokens");
    request.max_tokens = std::ssize(greedy);
    const RequestId shorter = engine.submit(golden.tokens("short.tokens"), request);
    engine.run_all();
    ASSERT_TRUE(engine.outcome(shorter).finished);
    for (const char* tensor : {"short.logits.full", "short.logits.steps", "short.logits.chunks"}) {
      EXPECT_LE(worst_logit(engine, shorter, *golden.file.find(tensor), tensor), kTolerance);
    }
    EXPECT_EQ(engine.outcome(shorter).tokens, greedy);
    if (golden.file.find("long.tokens") == nullptr) continue;
    request.max_tokens = 1;
    const RequestId longer = engine.submit(golden.tokens("long.tokens"), request);
    engine.run_all();
    EXPECT_LE(worst_logit(engine, longer, *golden.file.find("long.logits.full"), "long.logits.full"),
              kTolerance);
  }
}

class DraftGolden : public ::testing::TestWithParam<const char*> {};

// The draft layer's logits: of the first guess at every position that leads a step, and of those after it.
TEST_P(DraftGolden, LogitsOfGuessesInARow) {
  const Golden golden(GetParam());
  const LocalModel& model = local_model(golden.folder, DType::kF32, /*draft_layers=*/true);
  const auto row_of = [&](const char* tensor, int64_t row) {
    const worker::Tensor* found = golden.file.find(tensor);
    std::vector<float> out(static_cast<size_t>(found->shape.back()));
    std::memcpy(out.data(), found->data + row * found->shape.back() * 4, out.size() * sizeof(float));
    return out;
  };
  const std::vector<uint32_t> prompt = golden.tokens("short.tokens"), greedy = golden.tokens("greedy.tokens");
  constexpr int64_t kGuesses = 3;
  for (const Way& way : kWays) {
    SCOPED_TRACE(way.name);
    LocalEngine engine(model, engine_options(way));
    RequestOptions request;
    request.grouping = {way.prefill, way.decode, way.index};
    request.max_tokens = std::ssize(greedy);
    request.speculation = {controlplane::DraftSource::kMtp, kGuesses, {}};
    const RequestId id = engine.submit(prompt, request);
    engine.run_all();
    EXPECT_EQ(engine.outcome(id).tokens, greedy);
    EXPECT_LE(worst_logit(engine, id, *golden.file.find("short.logits.full"), "short.logits.full"),
              kTolerance);
    int64_t compared[kGuesses] = {};
    for (const auto& [key, logits] : engine.workers().guesses()) {
      const auto [number, position, round] = key;
      const int64_t from = position - (std::ssize(prompt) - 1);
      const std::vector<float> expected = row_of("draft.guesses", from * kGuesses + round);
      if (std::isnan(expected[0])) continue;  // too close to call
      if (round == 0) {
        EXPECT_EQ(expected, row_of("draft.logits", position));
      }
      float worst = 0;
      for (size_t i = 0; i < expected.size(); ++i) {
        const float difference = std::abs(logits[i] - expected[i]);
        if (!(difference <= worst)) worst = difference;
      }
      EXPECT_LE(worst, kTolerance) << "position " << position << ", guess " << round;
      ++compared[round];
    }
    for (const int64_t count : compared) EXPECT_GE(count, 4);
    if (model.config.draft_layers == 1) continue;
    // Which rows lead depends on every guess before.
    int64_t led = 0;
    for (int64_t row = 0; row < std::ssize(greedy) * kGuesses; ++row)
      led += std::isnan(row_of("draft.guesses", row)[0]) ? 0 : 1;
    EXPECT_EQ(std::accumulate(std::begin(compared), std::end(compared), int64_t{0}), led);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, DraftGolden,
                         ::testing::Values("deepseek_v3_draft", "glm_moe_dsa_draft", "glm_moe_dsa_sure_draft",
                                           "glm_moe_dsa_kept_draft", "deepseek_v3_sure_drafts",
                                           "glm4_moe_draft"),
                         [](const auto& info) { return std::string(info.param); });

INSTANTIATE_TEST_SUITE_P(Families, GoldenTest,
                         ::testing::Values("deepseek_v2_lite", "deepseek_v2", "deepseek_v3",
                                           "deepseek_v3_plain", "deepseek_v32", "glm4_moe_lite",
                                           "glm_moe_dsa", "glm_moe_dsa_fp8", "llama_nvfp4", "qwen3_moe_nvfp4",
                                           "llama", "llama_bias", "llama_smol", "qwen2", "qwen2_window",
                                           "qwen3", "qwen3_moe", "qwen3_moe_plain", "glm4_moe",
                                           "glm4_moe_plain"),
                         [](const auto& info) { return std::string(info.param); });

// FP8 caches against a reference that rounds the same values in the same way (make_goldens_cached.py).
// Queries are rounded to bf16, where float32 noise may turn a tie: hence the wider tolerance. What the cache
// itself does to the logits is far beyond it.
struct CachedForm {
  const char* model;
  const char* form;  // of the tensors
  CacheFormat cache;
};

CacheFormat with_index(CacheDType entries, bool hadamard, bool float_scales) {
  CacheFormat format = entries;
  format.index_hadamard = hadamard;
  format.index_float_scales = float_scales;
  return format;
}

class CachedTest : public ::testing::TestWithParam<CachedForm> {};

TEST_P(CachedTest, LogitsEqualThoseOfTheSameRounding) {
  constexpr float kCachedTolerance = 0.02f;
  const auto& [name, form, cache] = GetParam();
  const Golden golden(name, "cached");
  const LocalModel& model = local_model(golden.folder, DType::kF32);
  const auto worst = [&](const Way& way, const CacheFormat& with) {
    EngineOptions options = engine_options(way);
    options.workers.cache = with;
    LocalEngine engine(model, options);
    RequestOptions request;
    request.grouping = {way.prefill, way.decode, way.index};
    request.max_tokens = 1;
    const RequestId id = engine.submit(golden.tokens(std::string(form) + ".tokens"), request);
    engine.run_all();
    return worst_logit(engine, id, *golden.file.find(std::string(form) + ".logits"), form);
  };
  for (const Way& way : kWays) EXPECT_LE(worst(way, cache), kCachedTolerance) << way.name;
  // The tensors are of this form and no other.
  for (const CacheDType other : kAllCacheDTypes) {
    const bool possible =
        other != CacheDType::kFp8DsMla || model.config.attention == worker::AttentionKind::kMla;
    if (other == cache.entries || !possible) continue;
    EXPECT_GT(worst(kWays[0], other), 5 * kCachedTolerance) << cache_dtype_name(other);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Forms, CachedTest,
    ::testing::Values(CachedForm{"glm_moe_dsa", "fp8_ds_mla", CacheDType::kFp8DsMla},
                      CachedForm{"glm_moe_dsa", "fp8", with_index(CacheDType::kFp8, true, true)},
                      CachedForm{"deepseek_v3", "fp8_ds_mla", CacheDType::kFp8DsMla},
                      CachedForm{"deepseek_v3", "fp8", CacheDType::kFp8},
                      CachedForm{"llama_smol", "fp8", CacheDType::kFp8}),
    [](const auto& info) { return std::string(info.param.model) + "_" + info.param.form; });

}  // namespace
}  // namespace weft::test
