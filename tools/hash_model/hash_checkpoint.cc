#include "tools/hash_model/hash_checkpoint.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tools/checkpoint/checkpoint_files.h"

namespace weft::hash_checkpoint {
namespace {

using Json = nlohmann::ordered_json;
using checkpoint::Tensor;

constexpr int64_t kDenseWidth = 64;
constexpr int64_t kRope = 8, kNope = 8;  // MLA: the rotary part holds bits; the other is not used
constexpr int64_t kIndexHeads = 2, kIndexWidth = 16;

Tensor constant(std::string name, std::vector<int64_t> shape, float value) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return {std::move(name), std::move(shape), std::vector<float>(static_cast<size_t>(count), value)};
}

// Column 0 of the residual is always 1: it says by how much a norm has scaled the others.
Tensor embedding(const Options& o) {
  Tensor out = constant("model.embed_tokens.weight", {o.vocabulary, o.width}, 0);
  for (int64_t token = 0; token < o.vocabulary; ++token) out.values[static_cast<size_t>(token * o.width)] = 1;
  return out;
}

// Digit j of every head goes to column 1 + j.
Tensor output_projection(const Options& o, const std::string& name) {
  Tensor out = constant(name, {o.width, o.heads * o.width}, 0);
  for (int64_t j = 0; j + 1 < o.width; ++j) {
    for (int64_t head = 0; head < o.heads; ++head)
      out.values[static_cast<size_t>((1 + j) * o.heads * o.width + head * o.width + j)] = 1;
  }
  return out;
}

std::vector<Tensor> tensors(const Options& o) {
  std::vector<Tensor> out = {embedding(o)};
  for (int64_t layer = 0; layer < o.layers; ++layer) {
    const std::string p = "model.layers." + std::to_string(layer) + ".";
    out.push_back(constant(p + "input_layernorm.weight", {o.width}, 1));
    out.push_back(constant(p + "mlp.down_proj.weight", {o.width, kDenseWidth}, 0));
    out.push_back(constant(p + "mlp.gate_proj.weight", {kDenseWidth, o.width}, 0));
    out.push_back(constant(p + "mlp.up_proj.weight", {kDenseWidth, o.width}, 0));
    out.push_back(constant(p + "post_attention_layernorm.weight", {o.width}, 1));
    out.push_back(output_projection(o, p + "self_attn.o_proj.weight"));
  }
  out.push_back(constant("model.norm.weight", {o.width}, 1));
  return out;
}

Json config(const Options& o) {
  const char* const types[] = {"weft_hash", "weft_hash_mla", "weft_hash_dsa"};
  Json out = {
      {"model_type", types[static_cast<size_t>(o.attention)]},
      {"dtype", o.dtype == DType::kF32 ? "float32" : "bfloat16"},
      {"vocab_size", o.vocabulary},
      {"hidden_size", o.width},
      {"intermediate_size", kDenseWidth},
      {"num_hidden_layers", o.layers},
      {"max_position_embeddings", o.max_context},
      {"rms_norm_eps", 1e-6},
      {"rope_theta", 10000.0},
      {"tie_word_embeddings", true},
      {"hidden_act", "silu"},
      {"num_attention_heads", o.heads},
  };
  if (o.attention == Attention::kGrouped) {
    out.update({{"num_key_value_heads", o.kv_heads}, {"head_dim", o.width}});
    if (o.window == 0) return out;
    Json kinds = Json::array();
    for (int64_t layer = 0; layer < o.layers; ++layer)
      kinds.push_back(layer % 2 == 1 ? "sliding_attention" : "full_attention");
    out.update({{"use_sliding_window", true}, {"sliding_window", o.window}, {"layer_types", kinds}});
    return out;
  }
  out.update({{"q_lora_rank", nullptr},
              {"kv_lora_rank", o.width},
              {"qk_nope_head_dim", kNope},
              {"qk_rope_head_dim", kRope},
              {"v_head_dim", o.width}});
  if (o.attention == Attention::kMla) return out;
  Json kinds = Json::array();
  for (int64_t layer = 0; layer < o.layers; ++layer) kinds.push_back(layer % 2 == 1 ? "shared" : "full");
  out.update({{"index_n_heads", kIndexHeads},
              {"index_head_dim", kIndexWidth},
              {"index_topk", o.index_topk},
              {"indexer_types", kinds}});
  return out;
}

constexpr const char* kReadme = R"(# A hash model

Written by `weft-hash-model`. It knows nothing and reads no text: the next token is a hash of what the cache holds of
every token before it, salted with the request's seed. Whoever knows the prompt and the seed can compute what must
come, so an engine that loses, repeats or mixes up anything it cached is found out at the next token. Its entries are
small integers that every cache format holds exactly.
)";

Result<void> check(const Options& o) {
  const auto refuse = [](const char* option, const std::string& why) {
    return error(ErrorCode::kInvalidArgument, why, option);
  };
  if (o.attention == Attention::kGrouped && o.heads % o.kv_heads != 0) {
    return refuse("kv-heads",
                  std::to_string(o.kv_heads) + " must divide the " + std::to_string(o.heads) + " of --heads");
  }
  if (o.window > 0 && o.attention != Attention::kGrouped)
    return refuse("window", "only models of grouped queries have windows");
  return {};
}

}  // namespace

Result<void> write_checkpoint(const Options& options) {
  TRY_VOID(check(options));
  TRY_VOID(checkpoint::create_folder(options.folder));
  const std::filesystem::path folder = options.folder;
  TRY_VOID(checkpoint::write_file(folder / "README.md", kReadme));
  TRY_VOID(checkpoint::write_file(folder / "model.safetensors",
                                  checkpoint::safetensors(tensors(options), options.dtype)));
  return checkpoint::write_file(folder / "config.json", config(options).dump(2) + "\n");
}

}  // namespace weft::hash_checkpoint
