#include "tests/bench/random_model.h"

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "proto/vocab/random.h"
#include "worker/model/weight_plan.h"

namespace weft::bench {
namespace {

using Json = nlohmann::ordered_json;

Json config() {
  return {{"model_type", "deepseek_v3"},
          {"torch_dtype", "float32"},
          {"vocab_size", 512},
          {"hidden_size", 256},
          {"num_hidden_layers", 2},
          {"first_k_dense_replace", 2},
          {"intermediate_size", 512},
          {"num_attention_heads", 16},
          {"num_key_value_heads", 16},
          {"q_lora_rank", 128},
          {"kv_lora_rank", 128},
          {"qk_nope_head_dim", 64},
          {"qk_rope_head_dim", 32},
          {"v_head_dim", 64},
          {"max_position_embeddings", 1 << 20},
          {"rms_norm_eps", 1e-6},
          {"rope_theta", 1e6},
          {"n_routed_experts", 8},
          {"n_shared_experts", 1},
          {"num_experts_per_tok", 2},
          {"moe_intermediate_size", 64},
          {"n_group", 1},
          {"topk_group", 1},
          {"norm_topk_prob", true},
          {"routed_scaling_factor", 1.0},
          {"scoring_func", "sigmoid"},
          {"topk_method", "noaux_tc"},
          {"eos_token_id", 1}};
}

Result<void> write(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << bytes;
  file.close();
  if (!file) return error(ErrorCode::kIo, "cannot write '" + path + "'");
  return {};
}

}  // namespace

Result<void> write_dense_model(const std::string& folder) {
  std::error_code ignored;
  std::filesystem::create_directories(folder, ignored);
  TRY_VOID(write(folder + "/config.json", config().dump(2)));
  TRY(const worker::ModelConfig model, worker::read_model_config(folder));
  worker::ModelWeights unused;
  std::map<std::string, std::vector<int64_t>> tensors;  // some are the source of two packed ones
  for (const worker::WeightPlace& place : worker::plan_weights(model, DType::kF32, unused).places) {
    tensors[place.source.name] = place.source.shape;
  }
  SplitMix64 random(1);
  Json header;
  std::string data;
  for (const auto& [name, shape] : tensors) {
    const size_t begin = data.size();
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    const double size = shape.size() == 1 ? 0 : std::sqrt(3 / static_cast<double>(shape.back()));
    for (int64_t i = 0; i < count; ++i) {
      const auto value = static_cast<float>(shape.size() == 1 ? 1 : size * (2 * random.uniform() - 1));
      char bytes[sizeof value];
      std::memcpy(bytes, &value, sizeof value);
      data.append(bytes, sizeof value);
    }
    header[name] = {{"dtype", "F32"}, {"shape", shape}, {"data_offsets", {begin, data.size()}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  char bytes[sizeof length];
  std::memcpy(bytes, &length, sizeof length);
  return write(folder + "/model.safetensors", std::string(bytes, sizeof bytes) + text + data);
}

}  // namespace weft::bench
