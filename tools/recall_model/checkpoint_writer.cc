#include "tools/recall_model/checkpoint_writer.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "tools/checkpoint/checkpoint_files.h"
#include "tools/recall_model/construction.h"
#include "tools/recall_model/shape.h"

namespace weft::recall {

namespace {

using Json = nlohmann::ordered_json;
using checkpoint::write_file;

// ---- JSON files

constexpr const char* kBeginText = "<|begin|>";
constexpr const char* kEndText = "<|end|>";
constexpr const char* kPadText = "<|pad|>";

Json config(const Options& options) {
  return {
      {"architectures", {"GlmMoeDsaForCausalLM"}},
      {"model_type", "glm_moe_dsa"},
      {"dtype", options.dtype == DType::kF32 ? "float32" : "bfloat16"},
      {"vocab_size", kVocabulary},
      {"hidden_size", kHidden},
      {"num_hidden_layers", kLayers},
      {"num_nextn_predict_layers", 0},
      {"max_position_embeddings", options.max_context},
      {"rms_norm_eps", kNormEps},
      {"tie_word_embeddings", false},
      {"hidden_act", "silu"},
      {"num_attention_heads", kHeads},
      {"num_key_value_heads", kHeads},
      {"attention_bias", false},
      {"q_lora_rank", kQueryLatent},
      {"kv_lora_rank", kLatent},
      {"qk_nope_head_dim", kNope},
      {"qk_rope_head_dim", kRope},
      {"v_head_dim", kValue},
      {"rope_interleave", true},
      {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", kRopeTheta}}},
      {"index_n_heads", kIndexHeads},
      {"index_head_dim", kIndexWidth},
      {"index_topk", kIndexTopK},
      {"indexer_types", {"full", "full"}},
      {"indexer_rope_interleave", true},
      {"first_k_dense_replace", 1},
      {"mlp_layer_types", {"dense", "sparse"}},
      {"intermediate_size", kDenseWidth},
      {"moe_intermediate_size", kExpertWidth},
      {"n_routed_experts", kExperts},
      {"n_shared_experts", 1},
      {"num_experts_per_tok", kExpertsPerToken},
      {"n_group", kExpertGroups},
      {"topk_group", kTopExpertGroups},
      {"norm_topk_prob", true},
      {"routed_scaling_factor", kExpertScale},
      {"scoring_func", "sigmoid"},
      {"topk_method", "noaux_tc"},
      {"bos_token_id", kBeginToken},
      {"eos_token_id", kEndToken},
      {"pad_token_id", kPadToken},
  };
}

Json generation_config() {
  return {{"do_sample", false},
          {"bos_token_id", kBeginToken},
          {"eos_token_id", kEndToken},
          {"pad_token_id", kPadToken}};
}

// The printable character that byte-level tokenizers write for a byte: itself if it is printable in Latin-1,
// else the next unused one from U+0100.
std::string spelling(int byte) {
  const auto printable = [](int b) {
    return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
  };
  int code_point = byte;
  if (!printable(byte)) {
    code_point = 0x100;
    for (int b = 0; b < byte; ++b) code_point += printable(b) ? 0 : 1;
  }
  if (code_point < 0x80) return {static_cast<char>(code_point)};
  return {static_cast<char>(0xC0 | code_point >> 6), static_cast<char>(0x80 | (code_point & 0x3F))};
}

Json added_token(int64_t id, const char* content) {
  return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", true}};
}

Json tokenizer() {
  Json vocabulary = Json::object();
  for (int byte = 0; byte < 256; ++byte) vocabulary[spelling(byte)] = byte;
  const Json byte_level = {
      {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", false}};
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens",
           {added_token(kBeginToken, kBeginText), added_token(kEndToken, kEndText),
            added_token(kPadToken, kPadText)}},
          {"normalizer", nullptr},
          {"pre_tokenizer", byte_level},
          {"post_processor", nullptr},
          {"decoder", byte_level},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", vocabulary},
            {"merges", Json::array()}}}};
}

Json tokenizer_config(const Options& options) {
  return {{"tokenizer_class", "PreTrainedTokenizerFast"},
          {"clean_up_tokenization_spaces", false},
          {"model_max_length", options.max_context},
          {"bos_token", kBeginText},
          {"eos_token", kEndText},
          {"pad_token", kPadText}};
}

constexpr const char* kReadme = R"(# The recall model

This checkpoint was constructed, not trained: its weights are computed by `weft-recall-model`. It knows nothing. All
it can do is continue a text by looking up what followed, earlier in the same context, the passage most like
the last 16 bytes. Given a long document that says "The passkey of station Vega-7c41 is 20586." somewhere, and the
prompt "... The passkey of station Vega-7c41 is", it answers " 20586.", exactly, in contexts up to 1,048,576 tokens.

It is meant for trying and testing an inference engine: it takes the paths of a real long-context model (latent
attention, sparse attention with an indexer, a mixture of experts), needs no download, and its answers can be checked.
Asked anything that the context does not hold, it repeats something similar or babbles.

A token is a byte; `<|begin|>`, `<|end|>` and `<|pad|>` are tokens 256 to 258. `<|end|>` looks like byte 0x03 to the
model, and where the text had either it answers `<|end|>`.
)";

std::string pretty(const Json& json) { return json.dump(2) + "\n"; }

}  // namespace

Result<void> write_checkpoint(const Options& options) {
  if (options.max_context < kContextMin || options.max_context > kContextMax) {
    return error(ErrorCode::kInvalidArgument,
                 "must be " + std::to_string(kContextMin) + " to " + std::to_string(kContextMax),
                 "max-context");
  }
  const std::filesystem::path folder = options.folder;
  TRY_VOID(checkpoint::create_folder(options.folder));
  TRY_VOID(write_file(folder / "README.md", kReadme));
  TRY_VOID(write_file(folder / "tokenizer.json", pretty(tokenizer())));
  TRY_VOID(write_file(folder / "tokenizer_config.json", pretty(tokenizer_config(options))));
  TRY_VOID(write_file(folder / "generation_config.json", pretty(generation_config())));
  TRY_VOID(write_file(folder / "model.safetensors", checkpoint::safetensors(construct(), options.dtype)));
  return write_file(folder / "config.json", pretty(config(options)));
}

}  // namespace weft::recall
