// Goal: what config.json says of quantised weights names the modules that it means; what is not served is
// refused by field. Method: the quantised golden folders; one changed field at a time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/worker/checkpoint_files.h"

namespace weft::worker {
namespace {

using nlohmann::json;
using test::golden_folder;
using test::TempFolder;
using ::testing::HasSubstr;

// What config.json leaves out stays plain: by name, by '*' and by expression.
TEST(QuantisedWeights, ModulesLeftOut) {
  const auto quantises = [](const char* golden, const char* module) {
    return read_model_config(golden_folder(golden)).value().quantisation.quantises(module);
  };
  EXPECT_FALSE(quantises("glm_moe_dsa_fp8", "model.layers.1.self_attn.q_a_proj"));
  EXPECT_TRUE(quantises("glm_moe_dsa_fp8", "model.layers.0.self_attn.q_a_proj"));
  EXPECT_FALSE(quantises("qwen3_moe_nvfp4", "model.layers.2.self_attn.o_proj"));
  EXPECT_TRUE(quantises("qwen3_moe_nvfp4", "model.layers.2.mlp.experts.0.gate_proj"));
  EXPECT_FALSE(quantises("llama_nvfp4", "model.layers.1.self_attn.k_proj"));
  EXPECT_TRUE(quantises("llama_nvfp4", "model.layers.1.self_attn.v_proj"));
  EXPECT_FALSE(quantises("llama", "model.layers.1.self_attn.v_proj"));
}

TEST(ModuleNames, WholePartsOnly) {
  ModuleNames names;
  for (const char* entry :
       {"lm_head", "mlp.gate", "model.layers.6", "model.layers.*.mlp.shared*", "re:.*x_proj$"}) {
    ASSERT_TRUE(names.add(entry).has_value());
  }
  for (const char* module :
       {"lm_head", "model.lm_head", "model.layers.3.mlp.gate", "model.layers.6.mlp.up_proj",
        "model.layers.12.mlp.shared_experts.up_proj", "a.x_proj"}) {
    EXPECT_TRUE(names.match(module)) << module;
  }
  for (const char* module : {"model.layers.61.mlp.up_proj", "model.layers.3.mlp.gate_proj", "lm_header",
                             "head", "model.layers.3.mlp.experts.0.up_proj", "a.x_proj.b", ""}) {
    EXPECT_FALSE(names.match(module)) << module;
  }
  EXPECT_EQ(ModuleNames().add("re:(").error().code, ErrorCode::kBadCheckpoint);
  // An expression that would run for ever gives up.
  ASSERT_TRUE(names.add("re:(a+)+b").has_value());
  EXPECT_FALSE(names.match(std::string(200, 'a')));
}

Result<ModelConfig> read_with(const char* golden, const char* path, const json& value) {
  json config = json::parse(test::read_file(golden_folder(golden) + "/config.json"));
  config[json::json_pointer(std::string("/quantization_config") + path)] = value;
  const TempFolder folder;
  test::write_file(folder.file("config.json"), config.dump());
  return read_model_config(folder.path());
}

void expect_unsupported(const char* golden, const char* path, const json& value, const char* why) {
  const auto config = read_with(golden, path, value);
  ASSERT_FALSE(config.has_value()) << path << " " << value;
  EXPECT_EQ(config.error().code, ErrorCode::kUnsupported) << config.error().text();
  EXPECT_THAT(config.error().text(), HasSubstr("config.json: quantization_config."));
  EXPECT_THAT(config.error().message, HasSubstr(why));
}

TEST(QuantisationConfig, WhatIsNotServed) {
  for (const char* method : {"awq", "gptq", "bitsandbytes", "mxfp4", ""}) {
    expect_unsupported(
        "glm_moe_dsa_fp8", "/quant_method", method,
        "is not served, only fp8 (e4m3, blocks of 128 × 128), modelopt and compressed-tensors (NVFP4)");
  }
  expect_unsupported("glm_moe_dsa_fp8", "/fmt", "e5m2", "'e5m2' is not served, only e4m3");
  expect_unsupported("glm_moe_dsa_fp8", "/weight_block_size", {64, 128}, "only blocks of [128, 128]");
  expect_unsupported("glm_moe_dsa_fp8", "/weight_block_size", nullptr, "only blocks of [128, 128]");
  expect_unsupported("qwen3_moe_nvfp4", "/quant_algo", "FP8", "'FP8' is not served, only NVFP4");
  expect_unsupported("qwen3_moe_nvfp4", "/group_size", 32, "only groups of 16");
  expect_unsupported("llama_nvfp4", "/format", "pack-quantized", "only nvfp4-pack-quantized");
  expect_unsupported("llama_nvfp4", "/config_groups/group_0/weights/num_bits", 8,
                     "only symmetric floats of 4 bits");
  expect_unsupported("llama_nvfp4", "/config_groups/group_1", json::object(), "only one group");
}

TEST(QuantisationConfig, BadFields) {
  const auto refused = [](const char* golden, const char* path, const json& value, const char* field) {
    const auto config = read_with(golden, path, value);
    ASSERT_FALSE(config.has_value()) << path << " " << value;
    EXPECT_EQ(config.error().code, ErrorCode::kBadCheckpoint) << config.error().text();
    EXPECT_THAT(config.error().field, HasSubstr(field));
  };
  refused("glm_moe_dsa_fp8", "", 4, "quantization_config");
  refused("glm_moe_dsa_fp8", "/quant_method", nullptr, "quant_method");
  refused("glm_moe_dsa_fp8", "/modules_to_not_convert", {1}, "modules_to_not_convert");
  refused("llama_nvfp4", "/ignore", {"re:("}, "ignore");
  refused("llama_nvfp4", "/config_groups/group_0/weights", nullptr, "weights");
}

// Only the modules that the group names.
TEST(QuantisationConfig, Targets) {
  const auto config = read_with("llama_nvfp4", "/config_groups/group_0/targets", {"re:.*mlp.*"});
  ASSERT_TRUE(config.has_value()) << config.error().text();
  EXPECT_TRUE(config->quantisation.quantises("model.layers.0.mlp.up_proj"));
  EXPECT_FALSE(config->quantisation.quantises("model.layers.0.self_attn.v_proj"));
}

// Where config.json is silent, modelopt's own file speaks.
TEST(QuantisationConfig, ModeloptsFile) {
  json config = json::parse(test::read_file(golden_folder("qwen3_moe_nvfp4") + "/config.json"));
  config.erase("quantization_config");
  const TempFolder folder;
  test::write_file(folder.file("config.json"), config.dump());
  test::write_file(
      folder.file("hf_quant_config.json"),
      R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16,
                       "kv_cache_quant_algo": null, "exclude_modules": ["lm_head", "*self_attn*"]}})");
  const auto read = read_model_config(folder.path());
  ASSERT_TRUE(read.has_value()) << read.error().text();
  EXPECT_EQ(read->quantisation.coding, WeightCoding::kNvfp4Modelopt);
  EXPECT_FALSE(read->quantisation.quantises("model.layers.0.self_attn.q_proj"));
  EXPECT_TRUE(read->quantisation.quantises("model.layers.0.mlp.experts.1.up_proj"));
  test::write_file(folder.file("hf_quant_config.json"), R"({"quantization": {"quant_algo": "W4A8_AWQ"}})");
  EXPECT_EQ(read_model_config(folder.path()).error().field, "hf_quant_config.json: quantization.quant_algo");
}

}  // namespace
}  // namespace weft::worker
