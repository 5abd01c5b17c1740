// Goal: a bad value is refused by name. Method: one damaged field at a time; then random damage, seed
// printed.
#include <cmath>

#include "proto/vocab/random.h"
#include "tests/worker/config_cases.h"

namespace weft::worker {
namespace {

using test::TempFolder;
using ::testing::HasSubstr;

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
      "llama, qwen2, qwen3, qwen3_moe, weft_hash, weft_hash_mla, weft_hash_dsa");
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

}  // namespace
}  // namespace weft::worker
