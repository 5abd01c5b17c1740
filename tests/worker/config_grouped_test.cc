// Goal: config.json of the grouped-query families means what their authors mean by it. Method: the published
// fields of each family, expected values written out.
#include <cmath>

#include "tests/worker/config_cases.h"

namespace weft::worker {
namespace {

TEST(Config, Llama) {
  auto config = read(llama());
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(config->attention, AttentionKind::kGrouped);
  EXPECT_EQ(config->kv_heads, 8);
  EXPECT_EQ(config->head_width, 128);  // hidden / heads
  EXPECT_EQ(config->rope, 128);
  EXPECT_EQ(config->value, 128);
  EXPECT_EQ(config->entry_width(), 256);
  EXPECT_EQ(config->group_heads(), 4);
  EXPECT_EQ(config->rope_layout, kernels::RopeLayout::kHalfSplit);
  EXPECT_NEAR(config->scale, std::pow(128.0, -0.5), 1e-8);
  EXPECT_FALSE(config->normed_heads || config->qkv_bias || config->output_bias || config->mlp_bias);
  EXPECT_EQ(feed_forwards(*config), std::string(32, 'd'));
  EXPECT_EQ(indexers(*config), std::string(32, '-'));
  const kv::CacheGeometry geometry = config->cache_geometry(DType::kBF16, 64);
  EXPECT_EQ(geometry.parts(), 8);
  EXPECT_EQ(geometry.stream(kv::Stream::kEntries).bytes_per_token, 512);
  EXPECT_EQ(config->cache_geometry(CacheDType::kFp8, 64).stream(kv::Stream::kEntries).bytes_per_token, 264);
  EXPECT_EQ(geometry.token_bytes(), 2 * 2 * 4096 / 4 * 32);  // K and V of a quarter of the heads

  json given = llama();
  given.update({{"head_dim", 64}, {"attention_bias", true}, {"mlp_bias", true}});
  config = read(given);
  EXPECT_EQ(config->head_width, 64);
  EXPECT_TRUE(config->qkv_bias && config->output_bias && config->mlp_bias);
  given.erase("num_key_value_heads");  // one for every query head
  EXPECT_EQ(read(given)->kv_heads, 32);
  given["pretraining_tp"] = 2;  // how sums were cut in training; the weights are whole
  EXPECT_TRUE(read(given).has_value());
}

// Fields of Qwen2.5-7B: biases without a field that says so, and a window that no layer uses.
TEST(Config, Qwen2) {
  json given = llama();
  given.erase("attention_bias");
  given.erase("rope_scaling");
  given.update({{"model_type", "qwen2"},
                {"num_hidden_layers", 28},
                {"max_window_layers", 28},
                {"sliding_window", 131072},
                {"use_sliding_window", false}});
  const auto config = read(given);
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_TRUE(config->qkv_bias);
  EXPECT_FALSE(config->output_bias || config->normed_heads);
  given["use_sliding_window"] = true;
  EXPECT_TRUE(read(given).has_value());
}

std::vector<int64_t> windows(const ModelConfig& config) {
  std::vector<int64_t> out;
  for (const LayerConfig& layer : config.layers) out.push_back(layer.window);
  return out;
}

TEST(Config, SlidingWindows) {
  json given = llama();
  given.erase("rope_scaling");
  given.update({{"model_type", "qwen3"},
                {"num_hidden_layers", 3},
                {"use_sliding_window", true},
                {"sliding_window", 4096},
                {"max_window_layers", 2}});
  using Windows = std::vector<int64_t>;
  const auto from_layer = read(given);
  ASSERT_TRUE(from_layer.has_value()) << from_layer.error().text();
  EXPECT_EQ(windows(*from_layer), (Windows{0, 0, 4096}));
  EXPECT_EQ(from_layer->window(), 4096);
  EXPECT_EQ(from_layer->window_layers(), 1);
  given["layer_types"] = {"sliding_attention", "full_attention", "sliding_attention"};
  EXPECT_EQ(windows(*read(given)), (Windows{4096, 0, 4096}));
  given["layer_types"] = {"full_attention", "chunked_attention", "full_attention"};
  expect_refused(given, "layer_types", ErrorCode::kUnsupported);
  given["layer_types"] = {"full_attention", "sliding_attention", "full_attention"};
  given["use_sliding_window"] = false;
  expect_refused(given, "layer_types", ErrorCode::kBadCheckpoint);
  given.erase("layer_types");
  EXPECT_EQ(windows(*read(given)), (Windows{0, 0, 0}));
  given["use_sliding_window"] = true;
  given.erase("max_window_layers");
  expect_refused(given, "max_window_layers", ErrorCode::kBadCheckpoint);
  given["sliding_window"] = 0;
  expect_refused(given, "sliding_window", ErrorCode::kBadCheckpoint);
  given["sliding_window"] = nullptr;
  EXPECT_EQ(windows(*read(given)), (Windows{0, 0, 0}));
  given.update({{"model_type", "llama"}, {"sliding_window", 4096}, {"max_window_layers", 2}});
  expect_refused(given, "sliding_window", ErrorCode::kUnsupported);
}

// Fields of Qwen3-30B-A3B.
TEST(Config, Qwen3) {
  json given = llama();
  given.erase("rope_scaling");
  given.update(
      {{"model_type", "qwen3"}, {"head_dim", 128}, {"hidden_size", 2048}, {"num_key_value_heads", 4}});
  auto config = read(given);
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_TRUE(config->normed_heads);
  EXPECT_EQ(config->heads * config->value, 4096);  // not hidden_size
  given.update({{"model_type", "qwen3_moe"},
                {"num_hidden_layers", 6},
                {"num_experts", 128},
                {"num_experts_per_tok", 8},
                {"moe_intermediate_size", 768},
                {"norm_topk_prob", true},
                {"decoder_sparse_step", 1},
                {"mlp_only_layers", json::array()}});
  config = read(given);
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(feed_forwards(*config), "mmmmmm");
  EXPECT_EQ(config->expert_score, kernels::RouterScore::kSoftmax);
  EXPECT_TRUE(config->normalise_experts);
  EXPECT_FALSE(config->expert_bias);
  EXPECT_EQ(config->expert_groups, 1);
  EXPECT_EQ(config->expert_scale, 1.0f);
  EXPECT_EQ(config->shared_width, 0);
  json slides = given;
  slides.update({{"use_sliding_window", true}, {"sliding_window", 4096}, {"max_window_layers", 6}});
  EXPECT_EQ(read(slides)->window_layers(), 6);  // here it is of all layers
  given.update({{"decoder_sparse_step", 2}, {"mlp_only_layers", {3}}, {"norm_topk_prob", nullptr}});
  config = read(given);
  EXPECT_EQ(feed_forwards(*config), "dmdddm");
  EXPECT_FALSE(config->normalise_experts);
}

// Fields of GLM-4.6: half of a head turns where nothing says so.
TEST(Config, Glm4Moe) {
  json given = llama();
  given.erase("rope_scaling");
  given.update({{"model_type", "glm4_moe"},
                {"head_dim", 128},
                {"num_attention_heads", 96},
                {"attention_bias", true},
                {"use_qk_norm", true},
                {"n_routed_experts", 160},
                {"n_shared_experts", 1},
                {"num_experts_per_tok", 8},
                {"moe_intermediate_size", 1536},
                {"first_k_dense_replace", 3},
                {"routed_scaling_factor", 2.5},
                {"norm_topk_prob", true},
                {"num_nextn_predict_layers", 1}});
  auto config = read(given);
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(config->rope, 64);
  EXPECT_EQ(config->inverse_frequency.size(), 32u);
  EXPECT_TRUE(config->qkv_bias && config->normed_heads);
  EXPECT_FALSE(config->output_bias);
  EXPECT_EQ(config->expert_score, kernels::RouterScore::kSigmoid);
  EXPECT_TRUE(config->expert_bias);
  EXPECT_EQ(config->extra_layers, 1);
  EXPECT_EQ(feed_forwards(*config), "ddd" + std::string(29, 'm'));
  given["partial_rotary_factor"] = 1.0;
  EXPECT_EQ(read(given)->rope, 128);
  given.erase("partial_rotary_factor");
  given["rope_parameters"] = {{"rope_theta", 1e6}, {"rope_type", "default"}, {"partial_rotary_factor", 0.25}};
  EXPECT_EQ(read(given)->rope, 32);
  given.erase("use_qk_norm");
  EXPECT_FALSE(read(given)->normed_heads);
}

TEST(Config, BadGroupsAreNamed) {
  json given = llama();
  given["num_key_value_heads"] = 7;
  expect_refused(given, "num_key_value_heads");
  given = llama();
  given.update({{"num_attention_heads", 256}, {"num_key_value_heads", 128}});  // beyond the parts of a block
  expect_refused(given, "num_key_value_heads");
  given = llama();
  given.erase("num_key_value_heads");  // as many as query heads: beyond them, too
  given["num_attention_heads"] = 128;
  expect_refused(given, "num_key_value_heads");
  given = llama();
  given["layer_types"] = json::array({"full_attention"});  // says nothing of the other layers
  expect_refused(given, "layer_types");
  given = llama();
  given["hidden_size"] = 4100;
  expect_refused(given, "hidden_size");
  given["head_dim"] = 33;
  expect_refused(given, "head_dim");
  given = llama();
  given.update({{"model_type", "qwen3_moe"},
                {"num_experts", 8},
                {"num_experts_per_tok", 2},
                {"moe_intermediate_size", 16},
                {"mlp_bias", true}});
  expect_refused(given, "mlp_bias", ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace weft::worker
