#include "tests/worker/config_cases.h"

namespace weft::worker {

Result<ModelConfig> read(const json& config, const std::string& generation) {
  const test::TempFolder folder;
  test::write_file(folder.file("config.json"), config.dump());
  if (!generation.empty()) test::write_file(folder.file("generation_config.json"), generation);
  return read_model_config(folder.path());
}

json golden(const std::string& name) {
  return json::parse(test::read_file(test::golden_folder(name) + "/config.json"));
}

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

Result<ModelConfig> read_with_draft_layers(const json& config) {
  const test::TempFolder folder;
  test::write_file(folder.file("config.json"), config.dump());
  return read_model_config(folder.path(), true);
}

void expect_refused(const json& config, const std::string& field, ErrorCode code) {
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

json llama() {
  return json::parse(R"({"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]})");
}

}  // namespace weft::worker
