// Goal: draft layers are counted, described and refused as config.json says.
#include "tests/worker/config_cases.h"

namespace weft::worker {
namespace {

using ::testing::HasSubstr;

TEST(DraftLayers, HaveExpertsAndAnIndexerOfTheirOwn) {
  auto config = read_with_draft_layers(large());
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(config->layers.size(), 62u);
  EXPECT_EQ(config->main_layers(), 61);
  EXPECT_EQ(config->layers.back().feed_forward, FeedForward::kMoe);
  EXPECT_EQ(config->layers.back().indexer, Indexer::kNone);
  EXPECT_EQ(config->cache_geometry(DType::kBF16, 64).stream(kv::Stream::kEntries).layers, 62);
  config = read_with_draft_layers(golden("glm_moe_dsa_draft"));
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(indexers(*config), "FSFF");
  EXPECT_EQ(config->index_layers(), 3);
  EXPECT_FALSE(config->draft_keeps_selection);
}

TEST(DraftLayers, AreAllLoadedOrNone) {
  json several = large();
  several["num_nextn_predict_layers"] = 3;
  auto config = read_with_draft_layers(several);
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(config->draft_layers, 3);
  EXPECT_EQ(config->main_layers(), 61);
  EXPECT_EQ(feed_forwards(*config).substr(60), "mmmm");
  config = read(several);
  EXPECT_EQ(config->draft_layers, 0);
  EXPECT_EQ(config->extra_layers, 3);
  EXPECT_EQ(config->layers.size(), 61u);
}

TEST(DraftLayers, MayKeepTheSelection) {
  EXPECT_TRUE(read_with_draft_layers(golden("glm_moe_dsa_kept_draft"))->draft_keeps_selection);
  json bad = golden("glm_moe_dsa_kept_draft");
  bad["index_share_for_mtp_iteration"] = "yes";
  expect_refused(bad, "index_share_for_mtp_iteration");
}

TEST(DraftLayers, MustBeThere) {
  json config = large();
  config["num_nextn_predict_layers"] = 0;
  const auto refused = read_with_draft_layers(config);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(refused.error().field, "config.json: num_nextn_predict_layers");
  EXPECT_THAT(refused.error().message, HasSubstr("--speculative mtp needs one"));
  EXPECT_TRUE(read(config).has_value()) << "without drafts it is fine";
}

}  // namespace
}  // namespace weft::worker
