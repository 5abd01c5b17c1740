// Goal: pools and tables are sized from the model's parts; parts that cannot be are refused by name.
#include "daemon/sizing.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "kv/page_pool.h"

namespace weft::daemon {
namespace {

Options four_workers() {
  Options options;
  options.workers = 4;
  options.pool_tokens = 64 * 100;
  return options;
}

// 28 layers, 24 query heads over `parts` KV heads; K ‖ V of 128 in bf16. No indexer.
wire::ModelDescription model_of(uint32_t parts) {
  wire::ModelDescription model;
  model.set_layers(28);
  model.set_heads(24);
  model.set_entry_bytes(512);
  model.set_entry_parts(parts);
  model.set_max_context(131'072);
  return model;
}

TEST(Sizing, PoolsHoldAllPartsOfTheirTokens) {
  const Sizing one = size_everything(four_workers(), model_of(1)).value();
  const Sizing eight = size_everything(four_workers(), model_of(8)).value();
  EXPECT_EQ(one.arenas.pool_pages[0].entries, 100);
  EXPECT_EQ(eight.arenas.pool_pages[0].entries, 800);
  EXPECT_EQ(eight.arenas.pool_pages[0].index_keys, 0);
  EXPECT_EQ(kv::pool_tokens(eight.limits.geometry, 800), 6400);
  EXPECT_EQ(kv::pool_bytes(eight.limits.geometry, eight.arenas.pool_pages[3]), 6400u * 28 * 512 * 8);
  EXPECT_EQ(eight.limits.pages(kv::Stream::kEntries, 3), 800);
  // The same room, given in bytes.
  Options bytes = four_workers();
  bytes.pool_tokens = 0;
  bytes.pool_bytes = int64_t{6400} * 28 * 512 * 8 + 1;
  EXPECT_EQ(size_everything(bytes, model_of(8)).value().arenas.pool_pages[0].entries, 800);
}

TEST(Sizing, TablesAndPlansGrowWithThePagesOfABlock) {
  const Sizing one = size_everything(four_workers(), model_of(1)).value();
  const Sizing eight = size_everything(four_workers(), model_of(8)).value();
  EXPECT_EQ(one.arenas.control.parts, 1);
  EXPECT_EQ(eight.arenas.control.parts, 8);
  // Four ranks, each with a copy of the one part, or with two of eight parts.
  EXPECT_EQ(one.limits.max_copies(), one.limits.table_blocks() * 4);
  EXPECT_EQ(eight.limits.max_copies(), eight.limits.table_blocks() * 8);
}

TEST(Sizing, ImpossiblePartsAreRefused) {
  const auto refused = [](uint32_t parts) {
    const auto sizing = size_everything(four_workers(), model_of(parts));
    return sizing ? std::string() : sizing.error().message;
  };
  EXPECT_EQ(refused(12), "");
  EXPECT_EQ(refused(0), "0 KV heads; a block has 1 to 64 parts");
  EXPECT_EQ(refused(96), "96 KV heads; a block has 1 to 64 parts");
  EXPECT_EQ(refused(5), "24 query heads are no multiple of 5 KV heads");
}

TEST(Sizing, IndexOptionsNeedAnIndexer) {
  Options options = four_workers();
  options.index_cache_option = "index-hadamard";
  wire::ModelDescription model = model_of(1);
  model.set_model_type("llama");
  const auto refused = size_everything(options, model);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().text(), "invalid_argument: --index-hadamard: llama has no indexer");
  model.set_index_layers(3);
  model.set_index_key_bytes(132);
  EXPECT_TRUE(size_everything(options, model).has_value());
}

TEST(Sizing, TheHostPoolHoldsWholeBlocks) {
  Options options = four_workers();
  EXPECT_EQ(size_everything(options, model_of(8)).value().arenas.host_bytes(), 0);
  options.host_bytes = int64_t{640} * 28 * 512 * 8 + 1;  // ten blocks, and a byte
  options.host_write = controlplane::HostWrite::kThrough;
  const Sizing sizing = size_everything(options, model_of(8)).value();
  EXPECT_EQ(sizing.arenas.host_pages.entries, 80);
  EXPECT_EQ(sizing.arenas.host_bytes(), options.host_bytes - 1);
  EXPECT_EQ(sizing.limits.host_pages[0], 80);
  EXPECT_EQ(sizing.limits.host_write, controlplane::HostWrite::kThrough);
  options.host_bytes = 1000;
  const auto refused = size_everything(options, model_of(8));
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().field, "--host-pool");
  EXPECT_EQ(refused.error().message, "1000 B do not hold one block of 7.0 MiB");
}

TEST(Sizing, IndexKeysMayHaveAPoolSizeOfTheirOwn) {
  Options options = four_workers();
  wire::ModelDescription model = model_of(1);
  options.index_pool_tokens = 1000;
  EXPECT_EQ(size_everything(options, model).error().field, "--index-pool-tokens");
  model.set_index_layers(3);
  model.set_index_key_bytes(132);
  model.set_index_topk(256);
  const Sizing apart = size_everything(options, model).value();
  EXPECT_EQ(apart.limits.pages(kv::Stream::kIndexKeys, 1), ceil_div(int64_t{1000}, options.block_tokens));
  EXPECT_EQ(apart.limits.pages(kv::Stream::kEntries, 1), 100);
  EXPECT_STREQ(apart.pool_option, "--pool-tokens");
  Options keys = options;
  keys.index_pool_tokens = 1'000'000;
  EXPECT_STREQ(size_everything(keys, model).value().pool_option, "--index-pool-tokens");
  EXPECT_EQ(apart.limits.hot_tokens, 0) << "without a host pool";
  options.host_bytes = int64_t{1} << 30;
  EXPECT_EQ(size_everything(options, model).value().limits.hot_tokens, 512);
  EXPECT_EQ(size_everything(options, model).value().arenas.control.host_parts, 1);
  options.hot_tokens = 100;
  const Sizing hot = size_everything(options, model).value();
  EXPECT_EQ(hot.limits.hot_tokens, 100);
  EXPECT_EQ(hot.arenas.control.hot_pages, ceil_div(int64_t{100}, options.block_tokens));
}

// Blocks of one format never stand for blocks of another.
// Options that are possible each, and together want a control arena that cannot be.
TEST(Sizing, TablesBeyondAnArenaAreRefusedByName) {
  Options options = four_workers();
  options.block_tokens = 8;
  wire::ModelDescription model = model_of(8);
  model.set_max_context(int64_t{1} << 30);
  auto refused = size_everything(options, model);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(refused.error().field, "--max-context");
  options.max_context = 131'072;
  EXPECT_TRUE(size_everything(options, model).has_value());

  model = model_of(1);
  model.set_index_layers(3);
  model.set_index_key_bytes(132);
  model.set_index_topk(64);
  options.host_bytes = kGiB;
  options.hot_tokens = int64_t{1} << 24;
  refused = size_everything(options, model);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().field, "--hot-tokens");
  options.hot_tokens = int64_t{1} << 20;
  EXPECT_TRUE(size_everything(options, model).has_value());
}

TEST(Sizing, EveryCacheFormatHasItsOwnName) {
  std::set<std::string> names;
  Options options = four_workers();
  const auto add = [&] { names.insert(size_everything(options, model_of(1)).value().cache_format); };
  for (const CacheDType type : kAllCacheDTypes) {
    options.cache = type;
    add();
    options.cache.index_hadamard = true;
    add();
  }
  options.cache.index_float_scales = true;
  add();
  options.block_tokens = 32;
  options.pool_tokens = 32 * 100;
  add();
  EXPECT_EQ(names.size(), 2 * kAllCacheDTypes.size() + 2);
}

}  // namespace
}  // namespace weft::daemon
