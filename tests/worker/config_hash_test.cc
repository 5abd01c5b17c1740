// Goal: config.json of a hash model gives the shape that the oracle computes with, and what would not be
// exact is refused. Method: what weft-hash-model writes, and changes of it.
#include "tests/worker/config_cases.h"
#include "tools/hash_model/hash_checkpoint.h"

namespace weft::worker {
namespace {

using hash_checkpoint::Attention;

json written(const hash_checkpoint::Options& options) {
  const test::TempFolder folder;
  hash_checkpoint::Options here = options;
  here.folder = folder.path();
  hash_checkpoint::write_checkpoint(here).value();
  return json::parse(test::read_file(folder.file("config.json")));
}

TEST(ConfigHash, Grouped) {
  const auto config =
      read(written({.layers = 3, .heads = 12, .kv_heads = 4, .width = 32, .vocabulary = 500, .window = 30}));
  ASSERT_TRUE(config.has_value()) << config.error().text();
  ASSERT_TRUE(config->hash.has_value());
  const hash_model::Shape& shape = *config->hash;
  EXPECT_EQ(config->attention, AttentionKind::kGrouped);
  EXPECT_EQ(shape.layers, 3);
  EXPECT_EQ(shape.heads, 12);
  EXPECT_EQ(shape.parts, 4);
  EXPECT_EQ(shape.digits, 21);
  EXPECT_EQ(shape.key_bits, 32);
  EXPECT_EQ(shape.vocabulary, 500u);
  EXPECT_EQ(shape.windows, (std::vector<int64_t>{0, 30, 0}));
  EXPECT_TRUE(shape.selection.empty());
}

TEST(ConfigHash, LatentAndIndexed) {
  auto config = read(written({.attention = Attention::kMla}));
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(config->attention, AttentionKind::kMla);
  EXPECT_EQ(config->hash->digits, 14);
  EXPECT_EQ(config->hash->key_bits, 8);
  EXPECT_EQ(config->hash->parts, 1);
  config = read(written({.attention = Attention::kDsa, .layers = 4, .index_topk = 9}));
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(indexers(*config), "FSFS");
  EXPECT_EQ(config->hash->selection, (std::vector<int>{0, 0, 1, 1}));
  EXPECT_EQ(config->hash->index_topk, 9);
}

TEST(ConfigHash, WhatFloat32CouldNotAddUp) {
  json given = written({});
  given["max_position_embeddings"] = hash_model::kContextMax + 1;
  expect_refused(given, "max_position_embeddings");
  given = written({});
  given["head_dim"] = 2;
  expect_refused(given, "head_dim");
  given = written({});
  given.update({{"num_hidden_layers", 1024}, {"num_attention_heads", 128}, {"num_key_value_heads", 2}});
  expect_refused(given, "num_hidden_layers");
  given = written({.attention = Attention::kDsa});
  given.update({{"index_n_heads", 1024}, {"index_head_dim", 1024}});
  expect_refused(given, "index_n_heads");
  EXPECT_TRUE(read(written({}))->hash.has_value());
  EXPECT_FALSE(read(llama())->hash.has_value());
}

TEST(ConfigHash, TheMakerRefusesWhatNoModelHas) {
  const test::TempFolder folder;
  const auto refused = [&](hash_checkpoint::Options options) {
    options.folder = folder.path();
    const auto result = hash_checkpoint::write_checkpoint(options);
    return result ? std::string() : result.error().field;
  };
  EXPECT_EQ(refused({.heads = 8, .kv_heads = 3}), "kv-heads");
  EXPECT_EQ(refused({.attention = Attention::kMla, .window = 4}), "window");
}

}  // namespace
}  // namespace weft::worker
