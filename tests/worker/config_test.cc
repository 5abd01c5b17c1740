// Goal: config.json means what the model's authors mean by it, in both spellings; a bad value is refused by
// name. Method: the golden folders and the published shape of a large model, expected values written out;
// then one damaged field at a time; then random damage.
#include "worker/model/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "proto/vocab/random.h"
#include "tests/worker/checkpoint_files.h"

namespace weft::worker {
namespace {

using nlohmann::json;
using test::TempFolder;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Result<ModelConfig> read(const json& config, const std::string& generation = {}) {
  const TempFolder folder;
  test::write_file(folder.file("config.json"), config.dump());
  if (!generation.empty()) test::write_file(folder.file("generation_config.json"), generation);
  return read_model_config(folder.path());
}

json golden(const std::string& name) {
  return json::parse(test::read_file(test::golden_folder(name) + "/config.json"));
}

// The published shape of DeepSeek-V3.
json large() {
  return json::parse(R"({"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1,
    "first_k_dense_replace": 3, "norm_topk_prob": true, "scoring_func": "sigmoid", "hidden_act": "silu",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "rope_theta": 10000, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                     "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "num_nextn_predict_layers": 1, "eos_token_id": 1, "tie_word_embeddings": false, "attention_bias": false})");
}

Result<ModelConfig> read_with_draft_layer(const json& config) {
  const TempFolder folder;
  test::write_file(folder.file("config.json"), config.dump());
  return read_model_config(folder.path(), true);
}

void expect_refused(const json& config, const std::string& field,
                    ErrorCode code = ErrorCode::kBadCheckpoint) {
  const auto read_config = read(config);
  ASSERT_FALSE(read_config.has_value()) << field;
  EXPECT_EQ(read_config.error().field, "config.json: " + field) << read_config.error().text();
  EXPECT_EQ(read_config.error().code, code) << read_config.error().text();
  EXPECT_FALSE(read_config.error().message.empty());
}

std::string indexers(const ModelConfig& config) {
  std::string out;
  for (const LayerConfig& layer : config.layers) {
    out += layer.indexer == Indexer::kNone ? '-' : layer.indexer == Indexer::kFull ? 'F' : 'S';
  }
  return out;
}

std::string feed_forwards(const ModelConfig& config) {
  std::string out;
  for (const LayerConfig& layer : config.layers) out += layer.feed_forward == FeedForward::kMoe ? 'm' : 'd';
  return out;
}

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

// Frequencies that transformers computes (float32) for the same fields.
TEST(Config, YarnFrequencies) {
  auto config = read(large());
  ASSERT_TRUE(config.has_value());
  ASSERT_EQ(config->inverse_frequency.size(), 32u);
  const std::pair<size_t, double> expected[] = {{0, 1.0},
                                                {1, 0.749894202},
                                                {10, 0.0562341288},
                                                {11, 0.0390069261},
                                                {15, 0.0083345091},
                                                {16, 0.00550000044},
                                                {19, 0.00137051346},
                                                {22, 0.00017782794},
                                                {23, 3.3338034e-05},
                                                {31, 3.33380353e-06}};
  for (const auto& [j, frequency] : expected) {
    EXPECT_NEAR(config->inverse_frequency[j], frequency, 1e-6 * frequency) << j;
  }
  json other = large();
  other["rope_scaling"]["truncate"] = false;
  other["rope_scaling"]["beta_fast"] = 16;
  other["rope_scaling"]["beta_slow"] = 2;
  config = read(other);
  ASSERT_TRUE(config.has_value());
  EXPECT_NEAR(config->inverse_frequency[13], 0.0233312435, 1e-8);
  EXPECT_NEAR(config->inverse_frequency[20], 0.000123952457, 1e-9);
}

TEST(Config, YarnMagnitudes) {
  json config = large();
  json& rope = config["rope_scaling"];
  rope["mscale"] = 0.707;
  EXPECT_NEAR(read(config)->rope_factor, 0.9210423553163399, 1e-12);
  rope.erase("mscale");
  rope.erase("mscale_all_dim");
  EXPECT_NEAR(read(config)->rope_factor, 1.3688879454113936, 1e-12);
  EXPECT_NEAR(read(config)->scale, std::pow(192.0, -0.5), 1e-8);
  rope["attention_factor"] = 0.5;
  EXPECT_EQ(read(config)->rope_factor, 0.5);
  // Without a factor the ratio of the two context lengths takes its place; here they agree.
  rope.erase("factor");
  rope["mscale_all_dim"] = 1.0;
  EXPECT_EQ(read(config)->inverse_frequency, read(large())->inverse_frequency);
}

// Frequencies that transformers computes (float32) for the same fields.
TEST(Config, Llama3Frequencies) {
  json config = large();
  config["rope_theta"] = 500000;
  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8},
                            {"low_freq_factor", 1},
                            {"high_freq_factor", 4},
                            {"original_max_position_embeddings", 8192}};
  const auto llama3 = read(config);
  ASSERT_TRUE(llama3.has_value()) << llama3.error().text();
  const std::pair<size_t, double> expected[] = {{0, 1.0},
                                                {8, 0.0376060307},
                                                {14, 0.00321144611},
                                                {15, 0.00137189368},
                                                {16, 0.000524846022},
                                                {17, 0.000178507791},
                                                {18, 7.78465546e-05},
                                                {31, 3.7673226e-07}};
  for (const auto& [j, frequency] : expected) {
    EXPECT_NEAR(llama3->inverse_frequency[j], frequency, 2e-6 * frequency) << j;
  }
  EXPECT_EQ(llama3->rope_factor, 1.0);
  EXPECT_NEAR(llama3->scale, std::pow(192.0, -0.5), 1e-8);
  config["rope_scaling"]["high_freq_factor"] = 1;
  expect_refused(config, "rope_scaling.high_freq_factor");
  for (const char* field : {"factor", "low_freq_factor", "high_freq_factor"}) {
    json without = config;
    without["rope_scaling"].erase(field);
    expect_refused(without, std::string("rope_scaling.") + field);
  }
}

TEST(Config, BothRopeSpellings) {
  json newer = large();
  newer["rope_parameters"] = newer["rope_scaling"];
  newer.erase("rope_scaling");
  newer["rope_parameters"]["rope_theta"] = newer["rope_theta"];
  newer.erase("rope_theta");
  newer["rope_parameters"]["rope_type"] = "yarn";
  newer["rope_parameters"].erase("type");
  newer["dtype"] = newer["torch_dtype"];
  newer.erase("torch_dtype");
  const auto a = read(large());
  const auto b = read(newer);
  ASSERT_TRUE(b.has_value()) << b.error().text();
  EXPECT_EQ(a->inverse_frequency, b->inverse_frequency);
  EXPECT_EQ(a->scale, b->scale);
  EXPECT_EQ(b->checkpoint_dtype, DType::kBF16);
}

TEST(Config, PlainAndLinearRope) {
  json config = large();
  config["rope_scaling"] = nullptr;
  auto read_config = read(config);
  ASSERT_TRUE(read_config.has_value());
  for (size_t j = 0; j < 32; ++j) {
    EXPECT_NEAR(read_config->inverse_frequency[j], std::pow(10000.0, -static_cast<double>(j) / 32), 1e-12);
  }
  config["rope_scaling"] = {{"type", "linear"}, {"factor", 4}};
  EXPECT_NEAR(read(config)->inverse_frequency[0], 0.25, 1e-12);
  EXPECT_NEAR(read(config)->inverse_frequency[31], 3.33380376e-05, 1e-10);
  // The softmax scale grows with the field, not with the kind of scaling.
  config["rope_scaling"]["mscale_all_dim"] = 0.707;
  EXPECT_NEAR(read(config)->scale, std::pow(192.0, -0.5) * 1.2056281810045126, 1e-8);
}

// Only a rotation of the whole width is served, wherever the field stands.
TEST(Config, PartialRotation) {
  json config = golden("glm4_moe_lite");
  ASSERT_EQ(config["partial_rotary_factor"], 1.0);
  config["partial_rotary_factor"] = 0.5;
  expect_refused(config, "partial_rotary_factor", ErrorCode::kUnsupported);
  config = large();
  config["rope_scaling"]["partial_rotary_factor"] = 0.5;
  expect_refused(config, "rope_scaling.partial_rotary_factor", ErrorCode::kUnsupported);
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

// ---- grouped queries ----------------------------------------------------------------------------------

// The published fields of Llama-3.1-8B.
json llama() {
  return json::parse(R"({"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]})");
}

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

TEST(Config, MissingFieldsAreNamed) {
  for (const char* field :
       {"model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
        "num_hidden_layers", "num_attention_heads", "n_routed_experts", "kv_lora_rank", "qk_rope_head_dim",
        "v_head_dim", "qk_nope_head_dim", "num_experts_per_tok", "first_k_dense_replace",
        "max_position_embeddings", "rms_norm_eps", "rope_theta"}) {
    json config = large();
    config.erase(field);
    expect_refused(config, field);
    config[field] = nullptr;
    expect_refused(config, field);
  }
  for (const char* field : {"index_n_heads", "index_head_dim", "index_topk", "q_lora_rank"}) {
    json config = golden("glm_moe_dsa");
    config.erase(field);
    expect_refused(config, field);
  }
}

TEST(Config, BadValuesAreNamed) {
  const auto with = [](const char* field, const json& value) {
    json config = large();
    config[field] = value;
    return config;
  };
  for (const char* field :
       {"hidden_size", "num_hidden_layers", "kv_lora_rank", "vocab_size", "n_routed_experts"}) {
    for (const json& value : {json(0), json(-1), json(1.5), json("64"), json(true), json(json::array({1})),
                              json(uint64_t{1} << 63), json(int64_t{1} << 40)}) {
      expect_refused(with(field, value), field);
    }
  }
  expect_refused(with("qk_rope_head_dim", 63), "qk_rope_head_dim");
  expect_refused(with("num_key_value_heads", 8), "num_key_value_heads");
  expect_refused(with("n_routed_experts", 4096), "n_routed_experts");  // in 61 layers
  expect_refused(with("n_group", 7), "n_group");
  expect_refused(with("n_group", 256), "n_group");
  expect_refused(with("topk_group", 9), "topk_group");
  expect_refused(with("num_experts_per_tok", 129), "num_experts_per_tok");
  expect_refused(with("rms_norm_eps", 0), "rms_norm_eps");
  expect_refused(with("rms_norm_eps", "small"), "rms_norm_eps");
  expect_refused(with("rope_theta", 1), "rope_theta");
  expect_refused(with("norm_topk_prob", 1), "norm_topk_prob");
  expect_refused(with("eos_token_id", {1, "x"}), "eos_token_id");
  expect_refused(with("eos_token_id", 129280), "eos_token_id");
  expect_refused(with("rope_scaling", 4), "rope_scaling");
  expect_refused(with("num_nextn_predict_layers", -1), "num_nextn_predict_layers");
  expect_refused(with("routed_scaling_factor", -2), "routed_scaling_factor");

  json config = large();
  config["rope_scaling"]["factor"] = 0.5;
  expect_refused(config, "rope_scaling.factor");
  config = large();
  config["rope_scaling"]["beta_slow"] = 64;
  expect_refused(config, "rope_scaling.beta_fast");
  config = golden("glm_moe_dsa");
  config["index_head_dim"] = 4;
  expect_refused(config, "index_head_dim");
  config = golden("glm_moe_dsa");
  config["indexer_types"][2] = "half";
  expect_refused(config, "indexer_types");
  config = golden("glm_moe_dsa");
  config["indexer_types"] = {"full"};
  expect_refused(config, "indexer_types");
}

TEST(Config, WhatIsNotServed) {
  const std::pair<const char*, json> cases[] = {
      {"model_type", "gpt2"},      {"attention_bias", true},  {"hidden_act", "gelu"},
      {"scoring_func", "softmax"}, {"topk_method", "greedy"}, {"torch_dtype", "float64"},
  };
  for (const auto& [field, value] : cases) {
    json config = large();
    config[field] = value;
    expect_refused(config, field, ErrorCode::kUnsupported);
  }
  json config = large();
  config["rope_scaling"]["type"] = "longrope";
  expect_refused(config, "rope_scaling.type", ErrorCode::kUnsupported);
  EXPECT_THAT(read(config).error().message, "'longrope' is not served; default, linear, llama3 and yarn are");
  config = large();
  config["model_type"] = "gpt2";
  EXPECT_THAT(
      read(config).error().message,
      "'gpt2' is not one of deepseek_v2, deepseek_v3, deepseek_v32, glm4_moe, glm4_moe_lite, glm_moe_dsa, "
      "llama, qwen2, qwen3, qwen3_moe");
}

TEST(Config, FilesThatAreNoObject) {
  const TempFolder folder;
  EXPECT_EQ(read_model_config(folder.path()).error().code, ErrorCode::kNotFound);
  const auto refused = [&](const std::string& text, const std::string& why) {
    test::write_file(folder.file("config.json"), text);
    const auto config = read_model_config(folder.path());
    ASSERT_FALSE(config.has_value());
    EXPECT_EQ(config.error().code, ErrorCode::kBadCheckpoint);
    EXPECT_EQ(config.error().field, "config.json");
    EXPECT_THAT(config.error().message, HasSubstr(why));
  };
  refused("", "not JSON");
  refused("[1]", "not a JSON object");
  refused("{\"a\":1,", "not JSON");
  refused(std::string(1'000'000, '['), "nested deeper");
  refused("{\"a\":1,\"b\":{\"c\":2,\"c\":3}}", "'c' appears twice");
  refused(std::string(4 << 20, ' ') + "{}", "larger than");
}

// One field at a time becomes something else: an error or a configuration, never a crash.
TEST(Config, RandomDamageNeverCrashes) {
  constexpr uint64_t kSeed = 7;
  const json strange[] = {nullptr,
                          true,
                          0,
                          -1,
                          1,
                          2,
                          3,
                          65,
                          1e300,
                          -0.5,
                          1 << 30,
                          "",
                          "full",
                          "F",
                          "S",
                          "yarn",
                          "llama3",
                          "greedy",
                          json::array(),
                          json::object(),
                          json::array({"full"}),
                          json::array({0})};
  int accepted = 0;
  for (uint64_t round = 0; round < 1000; ++round) {
    SplitMix64 random(kSeed + round);
    json config = golden(random.below(2) == 0   ? "glm_moe_dsa"
                         : random.below(2) == 0 ? "deepseek_v32"
                                                : "deepseek_v2");
    json& object = random.below(4) == 0 ? config["rope_parameters"] : config;
    const uint64_t changes = 1 + random.below(2);
    for (uint64_t i = 0; i < changes; ++i) {
      auto at = object.begin();
      std::advance(at, static_cast<int64_t>(random.below(object.size())));
      *at = strange[random.below(std::size(strange))];
    }
    const auto config_read = read(config);
    if (!config_read.has_value()) {
      EXPECT_FALSE(config_read.error().field.empty()) << "seed " << kSeed << " round " << round;
      continue;
    }
    ++accepted;
    for (const double frequency : config_read->inverse_frequency) {
      EXPECT_TRUE(std::isfinite(frequency)) << "seed " << kSeed << " round " << round << " " << config.dump();
    }
    EXPECT_TRUE(std::isfinite(config_read->scale) && config_read->scale > 0);
  }
  EXPECT_GT(accepted, 80);
}

TEST(DraftLayer, HasExpertsAndAnIndexerOfItsOwn) {
  auto config = read_with_draft_layer(large());
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(config->layers.size(), 62u);
  EXPECT_EQ(config->main_layers(), 61);
  EXPECT_EQ(config->layers.back().feed_forward, FeedForward::kMoe);
  EXPECT_EQ(config->layers.back().indexer, Indexer::kNone);
  EXPECT_EQ(config->cache_geometry(DType::kBF16, 64).stream(kv::Stream::kEntries).layers, 62);
  config = read_with_draft_layer(golden("glm_moe_dsa_draft"));
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_EQ(indexers(*config), "FSFF");
  EXPECT_EQ(config->index_layers(), 3);
}

TEST(DraftLayer, MustBeThereAndBeOne) {
  json config = large();
  for (const int count : {0, 2}) {
    config["num_nextn_predict_layers"] = count;
    const auto refused = read_with_draft_layer(config);
    ASSERT_FALSE(refused.has_value());
    EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
    EXPECT_EQ(refused.error().field, "config.json: num_nextn_predict_layers");
    EXPECT_THAT(refused.error().message, HasSubstr("--speculative mtp needs one"));
    EXPECT_TRUE(read(config).has_value()) << "without drafts it is fine";
  }
}

}  // namespace
}  // namespace weft::worker
