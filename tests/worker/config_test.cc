// Goal: config.json of the MLA families means what their authors mean by it. Method: the golden folders and
// the published shapes of large models, expected values written out.
#include <cmath>

#include "tests/worker/config_cases.h"

namespace weft::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Config, LargeModel) {
  const auto config = read(large());
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(config->checkpoint_dtype, DType::kBF16);
  EXPECT_EQ(config->extra_layers, 1);
  EXPECT_EQ(config->layers.size(), 61u);
  EXPECT_EQ(feed_forwards(*config).substr(0, 5), "dddmm");
  EXPECT_EQ(indexers(*config), std::string(61, '-'));
  EXPECT_EQ(config->entry_width(), 576);
  EXPECT_EQ(config->index_layers(), 0);
  EXPECT_EQ(config->shared_width, 2048);
  EXPECT_THAT(config->eos_tokens, ElementsAre(1u));
  EXPECT_NEAR(config->scale, std::pow(192.0, -0.5) * 1.8738542, 1e-7);  // (0.1 ln 40 + 1)² = 1.8738542
  EXPECT_EQ(config->rope_factor, 1.0);
  const auto geometry = config->cache_geometry(DType::kBF16, 64);
  EXPECT_EQ(geometry.token_bytes(), 61 * 576 * 2);
  EXPECT_EQ(geometry.block_tokens, 64);
  EXPECT_EQ(config->cache_geometry(CacheDType::kFp8DsMla, 64).token_bytes(), 61 * 656);
  EXPECT_EQ(config->cache_geometry(CacheDType::kFp8, 64).token_bytes(), 61 * 576);
}

// 78 layers, of which 21 own an indexer; the draft layer would be one more.
TEST(Config, BytesOfAPublishedSparseModel) {
  json wide = golden("glm_moe_dsa");
  wide.update({{"num_hidden_layers", 78},
               {"kv_lora_rank", 512},
               {"qk_rope_head_dim", 64},
               {"index_head_dim", 128},
               {"index_topk_freq", 4},
               {"index_skip_topk_offset", 3},
               {"first_k_dense_replace", 3}});
  wide.erase("indexer_types");
  wide.erase("mlp_layer_types");
  const auto config = read(wide);
  ASSERT_TRUE(config.has_value()) << config.error().text();
  ASSERT_EQ(config->index_layers(), 21);
  const auto bytes = [&](CacheFormat format) { return config->cache_geometry(format, 64).token_bytes(); };
  EXPECT_EQ(bytes(CacheDType::kFp8DsMla), 656 * 78 + 132 * 21);
  EXPECT_EQ(bytes(CacheDType::kFp8DsMla) + 656 + 132, 54'728);  // with a draft layer
  EXPECT_EQ(bytes(CacheDType::kFp8), 44'928 + 2'772);
  EXPECT_EQ(bytes(DType::kBF16), 1152 * 78 + 256 * 21);
}

// The published fields of DeepSeek-V2 that differ from V3's.
json large_v2() {
  json config = large();
  config["model_type"] = "deepseek_v2";
  config.erase("num_nextn_predict_layers");
  config.update({{"vocab_size", 102400},
                 {"hidden_size", 5120},
                 {"intermediate_size", 12288},
                 {"moe_intermediate_size", 1536},
                 {"num_hidden_layers", 60},
                 {"n_shared_experts", 2},
                 {"n_routed_experts", 160},
                 {"num_experts_per_tok", 6},
                 {"n_group", 8},
                 {"topk_group", 3},
                 {"routed_scaling_factor", 16.0},
                 {"topk_method", "group_limited_greedy"},
                 {"scoring_func", "softmax"},
                 {"norm_topk_prob", false},
                 {"first_k_dense_replace", 1},
                 {"eos_token_id", 100001}});
  config["rope_scaling"]["mscale"] = config["rope_scaling"]["mscale_all_dim"] = 0.707;
  return config;
}

TEST(Config, DeepseekV2) {
  const auto config = read(large_v2());
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(config->expert_score, kernels::RouterScore::kSoftmax);
  EXPECT_FALSE(config->expert_bias);
  EXPECT_FALSE(config->normalise_experts);
  EXPECT_EQ(config->expert_groups, 8);
  EXPECT_EQ(config->top_expert_groups, 3);
  EXPECT_EQ(config->expert_scale, 16.0f);
  EXPECT_EQ(config->shared_width, 3072);
  EXPECT_EQ(config->rope_layout, kernels::RopeLayout::kInterleaved);
  EXPECT_EQ(config->rope_factor, 1.0);
  EXPECT_NEAR(config->scale, std::pow(192.0, -0.5) * 1.5896261651208736, 1e-8);
  EXPECT_EQ(indexers(*config), std::string(60, '-'));
}

TEST(Config, DeepseekV2Lite) {
  json lite = large_v2();
  lite.update({{"q_lora_rank", nullptr}, {"topk_method", "greedy"}, {"routed_scaling_factor", 1.0}});
  auto config = read(lite);
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(config->q_lora_rank, 0);
  EXPECT_EQ(config->expert_groups, 1);  // greedy looks at no groups, whatever their number
  EXPECT_EQ(config->top_expert_groups, 1);
  for (const char* field : {"n_group", "topk_group", "topk_method", "scoring_func", "norm_topk_prob"}) {
    lite[field] = nullptr;
  }
  config = read(lite);
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(config->expert_score, kernels::RouterScore::kSoftmax);
  EXPECT_FALSE(config->normalise_experts);
}

// Normalised or scaled, never both; a single expert is scaled.
TEST(Config, DeepseekV2Weights) {
  json config = large_v2();
  config["norm_topk_prob"] = true;
  EXPECT_TRUE(read(config)->normalise_experts);
  EXPECT_EQ(read(config)->expert_scale, 1.0f);
  config["num_experts_per_tok"] = 1;
  EXPECT_FALSE(read(config)->normalise_experts);
  EXPECT_EQ(read(config)->expert_scale, 16.0f);
  config["n_group"] = 160;  // one expert to a group, judged by it
  EXPECT_TRUE(read(config).has_value());
  config["topk_method"] = "noaux_tc";
  expect_refused(config, "topk_method", ErrorCode::kUnsupported);
  config = large_v2();
  config["scoring_func"] = "sigmoid";
  expect_refused(config, "scoring_func", ErrorCode::kUnsupported);
}

// The published fields of GLM-4.7-Flash.
TEST(Config, Glm4MoeLite) {
  json published = json::parse(R"({"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"],
    "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536,
    "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20, "hidden_act": "silu",
    "rms_norm_eps": 1e-05, "attention_bias": false, "max_position_embeddings": 202752, "rope_theta": 1000000,
    "rope_scaling": null, "partial_rotary_factor": 1.0, "q_lora_rank": 768, "kv_lora_rank": 512,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64,
    "n_shared_experts": 1, "num_experts_per_tok": 4, "norm_topk_prob": true, "routed_scaling_factor": 1.8,
    "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1, "dtype": "bfloat16", "tie_word_embeddings": false})");
  auto config = read(published);
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(feed_forwards(*config), "d" + std::string(46, 'm'));
  EXPECT_EQ(config->expert_score, kernels::RouterScore::kSigmoid);
  EXPECT_TRUE(config->expert_bias);
  EXPECT_TRUE(config->normalise_experts);
  EXPECT_EQ(config->expert_scale, 1.8f);
  EXPECT_EQ(config->rms_eps, 1e-5f);
  EXPECT_EQ(config->latent_eps, 1e-6f);
  EXPECT_EQ(config->extra_layers, 1);
  EXPECT_EQ(config->rope_layout, kernels::RopeLayout::kInterleaved);
  EXPECT_NEAR(config->scale, 1.0 / 16, 1e-9);
  EXPECT_EQ(config->index_layers(), 0);
  published.erase("first_k_dense_replace");  // the first layer is dense where nothing says so
  EXPECT_EQ(feed_forwards(*read(published)), "d" + std::string(46, 'm'));
  published["first_k_dense_replace"] = 3;
  EXPECT_EQ(feed_forwards(*read(published)), "ddd" + std::string(44, 'm'));
}

TEST(Config, GoldenFolders) {
  EXPECT_EQ(feed_forwards(*read_model_config(test::golden_folder("deepseek_v2_lite"))), "dmm");
  EXPECT_EQ(feed_forwards(*read_model_config(test::golden_folder("deepseek_v2"))), "ddmdm");
  EXPECT_EQ(feed_forwards(*read_model_config(test::golden_folder("glm4_moe_lite"))), "dmdm");
  auto config = read_model_config(test::golden_folder("deepseek_v3"));
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(feed_forwards(*config), "dmm");
  EXPECT_EQ(config->expert_groups, 4);
  EXPECT_EQ(config->top_expert_groups, 2);
  EXPECT_EQ(config->rope_layout, kernels::RopeLayout::kInterleaved);

  config = read_model_config(test::golden_folder("deepseek_v3_plain"));
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(config->q_lora_rank, 0);
  EXPECT_EQ(config->rope_layout, kernels::RopeLayout::kHalfSplit);
  EXPECT_FALSE(config->normalise_experts);
  EXPECT_EQ(config->expert_scale, 1.25f);

  config = read_model_config(test::golden_folder("deepseek_v32"));
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(indexers(*config), "FFF");
  EXPECT_EQ(config->index_rope_layout, kernels::RopeLayout::kHalfSplit);
  EXPECT_TRUE(config->tied_embeddings);
  EXPECT_EQ(config->shared_width, 80);
  EXPECT_NEAR(config->rope_factor, (0.08 * std::log(4.0) + 1) / (0.1 * std::log(4.0) + 1), 1e-12);

  config = read_model_config(test::golden_folder("glm_moe_dsa"));
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(indexers(*config), "FFSSFS");
  EXPECT_EQ(config->index_layers(), 3);
  EXPECT_EQ(config->index_rope_layout, kernels::RopeLayout::kInterleaved);
  EXPECT_EQ(config->rms_eps, 1e-5f);
  EXPECT_EQ(config->latent_eps, 1e-6f);
  const auto geometry = config->cache_geometry(DType::kF32, 8);
  EXPECT_EQ(geometry.stream(kv::Stream::kEntries).token_bytes(), 6 * 40 * 4);
  EXPECT_EQ(geometry.stream(kv::Stream::kIndexKeys).token_bytes(), 3 * 16 * 4);
}

TEST(Config, SharedSelections) {
  json config = golden("glm_moe_dsa");
  config.erase("indexer_types");
  EXPECT_EQ(indexers(*read(config)), "FFFFFF");
  config["num_hidden_layers"] = 12;
  config["index_topk_freq"] = 4;
  config["index_skip_topk_offset"] = 3;
  EXPECT_EQ(indexers(*read(config)), "FFFSSSFSSSFS");
  config["num_hidden_layers"] = 7;
  config["index_topk_freq"] = 3;
  config.erase("index_skip_topk_offset");
  EXPECT_EQ(indexers(*read(config)), "FFSSFSS");
  config["index_topk_pattern"] = "FSFSFSS";  // beats the schedule
  EXPECT_EQ(indexers(*read(config)), "FSFSFSS");
  config["num_nextn_predict_layers"] = 1;  // an entry for the draft layer
  config["index_topk_pattern"] = "FSFSFSSF";
  EXPECT_EQ(indexers(*read(config)), "FSFSFSS");
  config["index_topk_pattern"] = "FSFSFSSFF";
  expect_refused(config, "index_topk_pattern");
  config["index_topk_pattern"] = "SSFSFSS";
  expect_refused(config, "index_topk_pattern");
  config["index_topk_pattern"] = "FXFSFSS";
  expect_refused(config, "index_topk_pattern");
}

TEST(Config, LayerKinds) {
  json config = large();
  config["num_hidden_layers"] = 8;
  config["moe_layer_freq"] = 2;
  EXPECT_EQ(feed_forwards(*read(config)), "ddddmdmd");
  config["mlp_layer_types"] = {"sparse", "dense", "dense", "dense", "sparse", "sparse", "sparse", "dense"};
  EXPECT_EQ(feed_forwards(*read(config)), "mdddmmmd");
  config["mlp_layer_types"][1] = "medium";
  expect_refused(config, "mlp_layer_types");
  config["mlp_layer_types"] = {"sparse"};
  expect_refused(config, "mlp_layer_types");
  config = large();
  config["first_k_dense_replace"] = 100;  // no experts at all: their fields may be missing
  config.erase("n_routed_experts");
  EXPECT_EQ(feed_forwards(*read(config)), std::string(61, 'd'));
}

TEST(Config, EosTokens) {
  json config = large();
  config["eos_token_id"] = {1, 128};
  EXPECT_THAT(read(config)->eos_tokens, ElementsAre(1u, 128u));
  EXPECT_THAT(read(config, R"({"eos_token_id": [5, 6]})")->eos_tokens, ElementsAre(5u, 6u));
  EXPECT_THAT(read(config, R"({"temperature": 1})")->eos_tokens, ElementsAre(1u, 128u));
  const auto bad = read(config, R"({"eos_token_id": 129280})");
  ASSERT_FALSE(bad.has_value());
  EXPECT_EQ(bad.error().field, "generation_config.json: eos_token_id");
  EXPECT_FALSE(read(config, "nonsense").has_value());
  config.erase("eos_token_id");
  EXPECT_TRUE(read(config)->eos_tokens.empty());
}

}  // namespace
}  // namespace weft::worker
