// Goal: the hash model in real runners gives the oracle's token at every position, whatever the grouping,
// split, mechanism, chunking, drafts, company, prefix hit, regrouping and cache format. Method: the harness
// of equal bits compares every way with one run, and that run is compared with worker/model/hash_math.h, row
// by row.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "tests/support/bits.h"
#include "tests/support/hash_folder.h"
#include "worker/model/hash_math.h"

namespace weft::test {
namespace {

using hash_checkpoint::Attention;

struct Setting {
  const char* name;
  hash_checkpoint::Options options;
  CacheFormat cache = DType::kF32;
  DType weights = DType::kF32;
};

std::ostream& operator<<(std::ostream& out, const Setting& setting) { return out << setting.name; }

hash_checkpoint::Options grouped(int64_t kv_heads, int64_t window = 0, int64_t width = 16) {
  return {.kv_heads = kv_heads, .width = width, .vocabulary = 300, .window = window};
}
hash_checkpoint::Options mla(Attention attention, int64_t width = 16) {
  return {.attention = attention, .layers = 3, .width = width, .vocabulary = 300, .index_topk = 40};
}
CacheFormat format(CacheDType entries, CacheDType index_keys) {
  CacheFormat out;
  out.entries = entries;
  out.index_keys = index_keys;
  return out;
}

const Setting kSettings[] = {
    {"grouped_f32", grouped(2)},
    {"grouped_bf16", grouped(4), DType::kBF16, DType::kBF16},
    {"grouped_fp8", grouped(8, 0, 32), format(CacheDType::kFp8, CacheDType::kBF16)},
    {"windows_f32", grouped(2, 50)},
    {"one_head_f32", grouped(1)},
    {"mla_f32", mla(Attention::kMla)},
    {"mla_fp8", mla(Attention::kMla, 24), format(CacheDType::kFp8, CacheDType::kBF16)},
    {"mla_fp8_ds", mla(Attention::kMla), format(CacheDType::kFp8DsMla, CacheDType::kBF16)},
    {"dsa_f32", mla(Attention::kDsa)},
    {"dsa_fp8", mla(Attention::kDsa), format(CacheDType::kFp8DsMla, CacheDType::kFp8)},
};

class HashModel : public ::testing::TestWithParam<Setting> {
 protected:
  static constexpr uint64_t kSeed = 20261130;
  static BitsModel bits_model(const Setting& setting) {
    BitsModel model;
    model.folder = hash_folder(setting.name, setting.options);
    model.weight_dtype = setting.weights;
    model.cache = setting.cache;
    model.sampling.seed = kSeed;
    model.sampling.temperature = 0.7f;  // a token is certain whatever is drawn
    return model;
  }
};

// Rows of the reference run that are not the oracle's.
int64_t wrong_rows(const BitsHarness& harness, const worker::hash_model::Shape& shape, uint64_t salt) {
  std::vector<uint32_t> context = harness.prompt();
  int64_t wrong = 0;
  const auto& rows = harness.reference();
  for (size_t position = 0; position < rows.size(); ++position) {
    const auto best = std::max_element(rows[position].begin(), rows[position].end()) - rows[position].begin();
    const uint32_t expected = next_token(shape, salt, std::span(context).first(position + 1));
    if (static_cast<uint32_t>(best) != expected) ++wrong;
    if (position + 1 == context.size()) context.push_back(expected);
  }
  return wrong;
}

TEST_P(HashModel, EveryRowIsTheOracles) {
  const bool indexed = GetParam().options.attention == Attention::kDsa;
  const BitsModel model = bits_model(GetParam());
  BitsHarness harness(model);
  const LocalModel& loaded = local_model(model.folder, model.weight_dtype);
  ASSERT_TRUE(loaded.config.hash.has_value());
  EXPECT_EQ(wrong_rows(harness, *loaded.config.hash, kSeed), 0);
  EXPECT_GT(wrong_rows(harness, *loaded.config.hash, kSeed + 1), 100);  // the salt matters
  int64_t bad = 0;
  for (const int ranks : {2, 4, 8}) {
    for (const int64_t chunk : {0, 64, 200}) {
      std::vector<BitsCase> all = cases_of(ranks, chunk, indexed);
      const std::vector<BitsCase> mechanisms = mechanisms_of(ranks, chunk, indexed);
      all.insert(all.end(), mechanisms.begin(), mechanisms.end());
      for (size_t i = 0; i < all.size(); ++i) {
        if (!all[i].regrouped)
          all[i].drafts = static_cast<Drafts>(i % 4);  // an answer must last for the regroups
      }
      bad += harness.mismatches_batched(all);
      for (size_t i = static_cast<size_t>(chunk % 7); i < all.size(); i += 11)
        bad += harness.mismatches_alone(all[i]);
    }
  }
  EXPECT_EQ(bad, 0);
  std::printf("%lld rows compared\n", static_cast<long long>(harness.rows_compared()));
}

INSTANTIATE_TEST_SUITE_P(Settings, HashModel, ::testing::ValuesIn(kSettings),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace weft::test
