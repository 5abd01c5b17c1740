// Goal: the raw logits of every position are the same bits whatever the grouping, chunking, company, prefix
// hit or regrouping. Method: the random checkpoints of this folder; one reference run (one rank, one chunk,
// alone), and every other way compared with it position by position.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/support/bits.h"
#include "worker/model/config.h"

namespace weft::test {
namespace {

struct Setting {
  const char* model;
  DType dtype;  // of weights
  CacheFormat cache = dtype;
};

BitsModel bits_model(const Setting& setting) {
  BitsModel model;
  model.folder = std::string(WEFT_GOLDEN_FOLDER) + "/" + setting.model;
  model.weight_dtype = setting.dtype;
  model.cache = setting.cache;
  return model;
}

std::string setting_name(const ::testing::TestParamInfo<Setting>& info) {
  const std::string name = std::string(info.param.model) + "_" + dtype_name(info.param.dtype);
  if (info.param.cache == CacheFormat(info.param.dtype)) return name;
  return name + "_cache_" + cache_dtype_name(info.param.cache.entries);
}

CacheFormat with_hadamard(CacheFormat format) {
  format.index_hadamard = true;
  return format;
}

bool has_index(const Setting& setting) {
  return worker::read_model_config(bits_model(setting).folder).value().index_layers() > 0;
}

// Every combination of every axis, on small blocks.
class FullProduct : public ::testing::TestWithParam<Setting> {};

TEST_P(FullProduct, EveryWayGivesTheSameBits) {
  BitsHarness harness(bits_model(GetParam()));
  int64_t cases = 0, bad = 0;
  for (const int ranks : {1, 2, 4, 8}) {
    for (const int64_t chunk : {0, 64, 200}) {
      const std::vector<BitsCase> all = cases_of(ranks, chunk, has_index(GetParam()));
      for (const BitsCase& one : all) bad += harness.mismatches_alone(one);
      bad += harness.mismatches_batched(all);
      cases += 3 * std::ssize(all);
      const std::vector<BitsCase> mechanisms = mechanisms_of(ranks, chunk, has_index(GetParam()));
      if (!mechanisms.empty()) bad += harness.mismatches_batched(mechanisms);
      for (size_t i = static_cast<size_t>(chunk % 5); i < mechanisms.size(); i += 5) {
        bad += harness.mismatches_alone(mechanisms[i]);
        cases += 2;
      }
      cases += std::ssize(mechanisms);
    }
  }
  EXPECT_EQ(bad, 0);
  std::printf("%lld runs, %lld rows compared\n", static_cast<long long>(cases),
              static_cast<long long>(harness.rows_compared()));
}

INSTANTIATE_TEST_SUITE_P(Models, FullProduct,
                         ::testing::Values(Setting{"glm_moe_dsa", DType::kF32},
                                           Setting{"glm_moe_dsa", DType::kBF16}),
                         setting_name);

// The other families, and big blocks: each chunk size and W, batched (all groupings at once), and a few
// alone.
class EveryFamily : public ::testing::TestWithParam<Setting> {};

TEST_P(EveryFamily, EveryGroupingGivesTheSameBits) {
  BitsHarness harness(bits_model(GetParam()));
  int64_t bad = 0;
  for (const int ranks : {2, 4, 8}) {
    for (const int64_t chunk : {0, 64, 200}) {
      std::vector<BitsCase> all = cases_of(ranks, chunk, has_index(GetParam()));
      const std::vector<BitsCase> mechanisms = mechanisms_of(ranks, chunk, has_index(GetParam()));
      all.insert(all.end(), mechanisms.begin(), mechanisms.end());
      bad += harness.mismatches_batched(all);
      for (size_t i = static_cast<size_t>(chunk % 7); i < all.size(); i += 11)
        bad += harness.mismatches_alone(all[i]);
    }
  }
  EXPECT_EQ(bad, 0);
  std::printf("%lld rows compared\n", static_cast<long long>(harness.rows_compared()));
}

INSTANTIATE_TEST_SUITE_P(
    Models, EveryFamily,
    ::testing::Values(Setting{"deepseek_v2_lite", DType::kF32}, Setting{"deepseek_v2", DType::kBF16},
                      Setting{"glm4_moe_lite", DType::kF32}, Setting{"glm4_moe_lite", DType::kBF16},
                      Setting{"deepseek_v3", DType::kF32}, Setting{"deepseek_v3", DType::kBF16},
                      Setting{"deepseek_v32", DType::kF32}, Setting{"deepseek_v32", DType::kBF16},
                      Setting{"deepseek_v3", DType::kBF16, CacheDType::kFp8DsMla},
                      Setting{"deepseek_v32", DType::kBF16, with_hadamard(CacheDType::kFp8DsMla)},
                      Setting{"deepseek_v32", DType::kF32, CacheDType::kFp8},
                      Setting{"llama_smol", DType::kBF16, CacheDType::kFp8},
                      Setting{"llama_smol", DType::kF32}, Setting{"llama_smol", DType::kBF16},
                      Setting{"qwen3_moe", DType::kF32}, Setting{"qwen3_moe", DType::kBF16},
                      Setting{"qwen2_window", DType::kF32}, Setting{"qwen2_window", DType::kBF16},
                      Setting{"qwen2_window", DType::kBF16, CacheDType::kFp8},
                      Setting{"glm_moe_dsa_fp8", DType::kF32}, Setting{"glm_moe_dsa_fp8", DType::kBF16},
                      Setting{"qwen3_moe_nvfp4", DType::kF32}, Setting{"llama_nvfp4", DType::kBF16}),
    setting_name);

// Experts split by columns have an order of their own: near the other one, not equal to it, and as
// independent of the grouping.
class SplitExperts : public ::testing::TestWithParam<Setting> {};

TEST_P(SplitExperts, HaveBitsOfTheirOwn) {
  BitsModel model = bits_model(GetParam());
  const BitsHarness whole(model);
  model.split_experts = true;
  BitsHarness harness(model);
  int64_t bad = 0, different = 0;
  for (const int ranks : {2, 4, 8}) {
    const int64_t chunk = ranks == 4 ? 64 : 0;
    bad += harness.mismatches_batched(cases_of(ranks, chunk, has_index(GetParam())));
    bad += harness.mismatches_alone({ranks, kv::Split::kZigzag, {kv::DecodeKind::kDcp, ranks}, {}, chunk});
  }
  EXPECT_EQ(bad, 0);
  double distance = 0;  // the prompt is the same; answers may part
  for (int64_t position = 0; position < model.prompt_tokens; ++position) {
    const auto &a = whole.reference()[static_cast<size_t>(position)],
               &b = harness.reference()[static_cast<size_t>(position)];
    different += a != b ? 1 : 0;
    for (size_t i = 0; i < a.size(); ++i)
      distance = std::max(distance, std::abs(double{a[i]} - double{b[i]}));
  }
  EXPECT_GT(different, model.prompt_tokens / 2);
  EXPECT_LT(distance, GetParam().dtype == DType::kF32 ? 1e-3 : 0.5);
  std::printf("%lld of %lld rows differ from whole experts, by at most %.3g\n",
              static_cast<long long>(different), static_cast<long long>(model.prompt_tokens), distance);
}

INSTANTIATE_TEST_SUITE_P(Models, SplitExperts,
                         ::testing::Values(Setting{"deepseek_v3", DType::kF32},
                                           Setting{"qwen3_moe", DType::kF32}),
                         setting_name);

TEST(Sampled, TheSameTokensUnderEveryGrouping) {
  BitsModel model = bits_model({"deepseek_v32", DType::kF32});
  model.sampling = {0.9f, 40, 0.95f, 20'240'611};
  BitsHarness harness(model);
  int64_t bad = 0;
  for (const int ranks : {2, 4, 8}) bad += harness.mismatches_batched(cases_of(ranks, 64, true));
  EXPECT_EQ(bad, 0);
}

// Drafts of a script, of which all hold, some or none, over block boundaries.
class Drafted : public ::testing::TestWithParam<Setting> {};

TEST_P(Drafted, TheSameBitsAndTokensUnderEveryGrouping) {
  for (const bool sampled : {false, true}) {
    BitsModel model = bits_model(GetParam());
    model.answer_tokens = 40;
    if (sampled) model.sampling = {0.9f, 40, 0.95f, 20'240'611};
    BitsHarness harness(model);
    int64_t bad = 0;
    for (const int ranks : {1, 2, 4, 8}) {
      for (const Drafts drafts : {Drafts::kAll, Drafts::kSome, Drafts::kNone}) {
        std::vector<BitsCase> all = cases_of(ranks, 64, has_index(GetParam()));
        for (BitsCase& one : all) one.drafts = drafts;
        bad += harness.mismatches_batched(all);
        for (size_t i = static_cast<size_t>(drafts); i < all.size(); i += 9)
          bad += harness.mismatches_alone(all[i]);
      }
    }
    EXPECT_EQ(bad, 0);
    std::printf("%lld rows compared\n", static_cast<long long>(harness.rows_compared()));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Drafted,
                         ::testing::Values(Setting{"glm_moe_dsa", DType::kF32},
                                           Setting{"deepseek_v3", DType::kBF16},
                                           Setting{"qwen3_moe", DType::kF32}),
                         setting_name);

// The draft layer's logits are the same bits, too, so that equally many guesses hold.
class DraftLayer : public ::testing::TestWithParam<Setting> {};

TEST_P(DraftLayer, TheSameBitsAndGuessesUnderEveryGrouping) {
  for (const bool sampled : {false, true}) {
    BitsModel model = bits_model(GetParam());
    model.draft_layers = true;
    model.answer_tokens = 24;
    if (sampled) model.sampling = {0.9f, 40, 0.95f, 20'240'611};
    BitsHarness harness(model);
    const bool sure = model.folder.find("sure") != std::string::npos;
    if (sure) {
      EXPECT_GT(harness.reference_notice().accepted_tokens, 8);
    }
    int64_t bad = 0;
    for (const int ranks : {1, 2, 4, 8}) {
      const std::vector<BitsCase> all = cases_of(ranks, 64, has_index(GetParam()));
      bad += harness.mismatches_batched(all);
      for (size_t i = 0; i < all.size(); i += sure ? 2 : 7) bad += harness.mismatches_alone(all[i]);
    }
    EXPECT_EQ(bad, 0);
    std::printf("%lld rows and %lld guesses compared; %lld of %lld held\n",
                static_cast<long long>(harness.rows_compared()),
                static_cast<long long>(harness.guesses_compared()),
                static_cast<long long>(harness.reference_notice().accepted_tokens),
                static_cast<long long>(harness.reference_notice().drafted_tokens));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, DraftLayer,
                         ::testing::Values(Setting{"deepseek_v3_draft", DType::kF32},
                                           Setting{"glm_moe_dsa_draft", DType::kBF16},
                                           Setting{"glm_moe_dsa_sure_draft", DType::kF32},
                                           Setting{"glm_moe_dsa_kept_draft", DType::kF32},
                                           Setting{"deepseek_v3_sure_drafts", DType::kBF16},
                                           Setting{"glm4_moe_draft", DType::kF32}),
                         setting_name);

// Contexts that lie on the host, with hot buffers of several sizes, where device pools hold a few blocks.
struct OnHostSetting {
  Setting setting;
  int64_t hot_tokens;
};
class OnHost : public ::testing::TestWithParam<OnHostSetting> {};

TEST_P(OnHost, TheSameBitsUnderEveryGrouping) {
  BitsModel model = bits_model(GetParam().setting);
  model.on_host = true;
  model.hot_tokens = GetParam().hot_tokens;
  model.draft_layers = model.folder.find("draft") != std::string::npos;
  model.answer_tokens = 24;
  BitsHarness harness(model);
  int64_t bad = 0;
  for (const int ranks : {1, 2, 4, 8}) {
    for (const int64_t chunk : {0, 64}) {
      std::vector<BitsCase> all = cases_of(ranks, chunk, true);
      const std::vector<BitsCase> mechanisms = mechanisms_of(ranks, chunk, true);
      all.insert(all.end(), mechanisms.begin(), mechanisms.end());
      for (size_t i = 0; i < all.size() && !model.draft_layers; ++i)
        all[i].drafts = i % 3 == 1 ? Drafts::kSome : Drafts::kOff;
      bad += harness.mismatches_batched(all);
      for (size_t i = static_cast<size_t>(chunk % 5); i < all.size(); i += 5)
        bad += harness.mismatches_alone(all[i]);
    }
  }
  EXPECT_EQ(bad, 0);
  std::printf("%lld rows compared\n", static_cast<long long>(harness.rows_compared()));
}

INSTANTIATE_TEST_SUITE_P(
    Models, OnHost,
    ::testing::Values(OnHostSetting{{"glm_moe_dsa", DType::kF32}, 16},
                      OnHostSetting{{"deepseek_v32", DType::kBF16, CacheDType::kFp8DsMla}, 8},
                      OnHostSetting{{"deepseek_v32", DType::kF32, CacheDType::kFp8}, 0},
                      OnHostSetting{{"glm_moe_dsa_sure_draft", DType::kF32}, 64}),
    [](const auto& info) {
      return setting_name({info.param.setting, info.index}) + "_hot_" + std::to_string(info.param.hot_tokens);
    });

class BigBlocks : public ::testing::TestWithParam<Setting> {};

TEST_P(BigBlocks, TheSameBits) {
  BitsModel model = bits_model(GetParam());
  model.block_tokens = 64;
  model.prompt_tokens = 1605;
  model.answer_tokens = 132;  // crosses 1,664 and 1,728
  BitsHarness harness(model);
  int64_t bad = 0;
  for (const int ranks : {2, 4, 8}) {
    std::vector<BitsCase> all = cases_of(ranks, 200, true);
    const std::vector<BitsCase> mechanisms = mechanisms_of(ranks, 200, true);
    all.insert(all.end(), mechanisms.begin(), mechanisms.end());
    std::vector<BitsCase> some;
    for (size_t i = 0; i < all.size(); i += 7) some.push_back(all[i]);
    bad += harness.mismatches_batched(some);
  }
  EXPECT_EQ(bad, 0);
}

INSTANTIATE_TEST_SUITE_P(Models, BigBlocks,
                         ::testing::Values(Setting{"glm_moe_dsa", DType::kF32},
                                           Setting{"glm_moe_dsa", DType::kBF16},
                                           Setting{"glm_moe_dsa", DType::kBF16, CacheDType::kFp8DsMla}),
                         setting_name);

}  // namespace
}  // namespace weft::test
