#include "worker/model/config.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>
#include <utility>

#include "kernels/indexer.h"
#include "proto/vocab/check.h"
#include "proto/vocab/units.h"
#include "worker/model/field_reader.h"
#include "worker/model/json_file.h"
#include "worker/model/rope.h"

namespace weft::worker {

namespace {

constexpr int64_t kConfigBytesMax = 4 * kMiB;
constexpr int kConfigNestingMax = 16;

// Far beyond any released model; they keep sizes and products of two sizes inside int64.
constexpr int64_t kWidthMax = int64_t{1} << 20;
constexpr int64_t kLayersMax = 1024;
constexpr int64_t kDraftLayersMax = 64;
constexpr int64_t kHeadsMax = 1024;
constexpr int64_t kExpertsMax = 4096;
constexpr int64_t kExpertsOfAllLayersMax = int64_t{1} << 17;
constexpr int64_t kVocabularyMax = int64_t{1} << 24;
constexpr int64_t kContextMax = int64_t{1} << 30;

// The router, and which fields speak of it.
enum class Experts : uint8_t {
  kNone,       // every layer is dense
  kCorrected,  // noaux_tc: sigmoid with a correction bias
  kSoftmax,    // greedy or group_limited_greedy
  kQwen,       // softmax, no groups, no shared expert, fields of its own
};

// Which layers a sliding window is of, where config.json has one.
enum class Windows : uint8_t {
  kNone,        // none: not served
  kFromLayer,   // those of layer_types, else from max_window_layers on
  kEverywhere,  // all, whatever these say
};

// What a model_type fixes beside what its config.json says.
struct Family {
  const char* model_type;
  AttentionKind attention = AttentionKind::kMla;
  bool has_indexer = false;
  bool index_interleaved = false;  // unless config.json says otherwise
  Experts experts = Experts::kCorrected;
  std::optional<int64_t> dense_layers = {};  // where config.json neither counts nor lists them
  // Grouped queries.
  bool normed_heads = false;          // always, whatever config.json says
  bool qkv_bias = false;              // always
  bool attention_bias_is_all = true;  // attention_bias speaks of o_proj, too
  double rotary_share = 1;            // where config.json does not say; 1: it must not say otherwise
  Windows windows = Windows::kNone;
  bool hash = false;  // queries and entries are computed, not projected
};

constexpr Family kFamilies[] = {
    {.model_type = "deepseek_v2", .experts = Experts::kSoftmax},
    {.model_type = "deepseek_v3"},
    {.model_type = "deepseek_v32", .has_indexer = true},
    {.model_type = "glm4_moe",
     .attention = AttentionKind::kGrouped,
     .dense_layers = 1,
     .attention_bias_is_all = false,
     .rotary_share = 0.5},
    {.model_type = "glm4_moe_lite", .dense_layers = 1},
    {.model_type = "glm_moe_dsa", .has_indexer = true, .index_interleaved = true},
    {.model_type = "llama", .attention = AttentionKind::kGrouped, .experts = Experts::kNone},
    {.model_type = "qwen2",
     .attention = AttentionKind::kGrouped,
     .experts = Experts::kNone,
     .qkv_bias = true,
     .attention_bias_is_all = false,
     .windows = Windows::kFromLayer},
    {.model_type = "qwen3",
     .attention = AttentionKind::kGrouped,
     .experts = Experts::kNone,
     .normed_heads = true,
     .windows = Windows::kFromLayer},
    {.model_type = "qwen3_moe",
     .attention = AttentionKind::kGrouped,
     .experts = Experts::kQwen,
     .normed_heads = true,
     .windows = Windows::kEverywhere},
    {.model_type = "weft_hash",
     .attention = AttentionKind::kGrouped,
     .experts = Experts::kNone,
     .windows = Windows::kFromLayer,
     .hash = true},
    {.model_type = "weft_hash_mla", .experts = Experts::kNone, .hash = true},
    {.model_type = "weft_hash_dsa", .has_indexer = true, .experts = Experts::kNone, .hash = true},
};

const Family* read_family(FieldReader& f, ModelConfig& c) {
  c.model_type = f.text("model_type");
  std::string names;
  for (const Family& family : kFamilies) {
    if (c.model_type == family.model_type) return &family;
    names += (names.empty() ? "" : ", ") + std::string(family.model_type);
  }
  f.fail("model_type", "'" + c.model_type + "' is not one of " + names, ErrorCode::kUnsupported);
  return nullptr;
}

const char* draft_layers_field(FieldReader& f) {
  return f.has("num_mtp_layers") ? "num_mtp_layers" : "num_nextn_predict_layers";
}

void read_sizes(FieldReader& f, ModelConfig& c) {
  c.hidden = f.integer("hidden_size", 1, kWidthMax);
  c.heads = f.integer("num_attention_heads", 1, kHeadsMax);
  c.vocabulary = f.integer("vocab_size", 1, kVocabularyMax);
  c.max_context = f.integer("max_position_embeddings", 1, kContextMax);
  c.layers.resize(static_cast<size_t>(f.integer("num_hidden_layers", 1, kLayersMax)));
  c.extra_layers = f.integer(draft_layers_field(f), 0, kDraftLayersMax, 0);
  c.tied_embeddings = f.boolean("tie_word_embeddings", false);
  c.rms_eps = static_cast<float>(f.number("rms_norm_eps", 1e-12, 1.0));
}

void refuse(FieldReader& f, bool present, const char* field, const std::string& what) {
  if (present) f.fail(field, what + " is not served", ErrorCode::kUnsupported);
}

// A list with one entry for each layer; draft layers, which are not run, may have theirs behind.
void check_length(FieldReader& f, const ModelConfig& c, const char* field, size_t listed) {
  const size_t count = c.layers.size();
  if (f.failed() || (listed >= count && listed <= count + static_cast<size_t>(c.extra_layers))) return;
  f.fail(field, "has " + std::to_string(listed) + " entries for " + std::to_string(count) + " layers");
}

void read_mla(FieldReader& f, ModelConfig& c) {
  c.q_lora_rank = f.integer("q_lora_rank", 1, kWidthMax, 0);
  c.latent = f.integer("kv_lora_rank", 1, kWidthMax);
  c.nope = f.integer("qk_nope_head_dim", 1, kWidthMax);
  c.rope = f.integer("qk_rope_head_dim", 2, kWidthMax);
  c.value = f.integer("v_head_dim", 1, kWidthMax);
  if (c.rope % 2 != 0) f.fail("qk_rope_head_dim", "must be even");
  // MLA has one latent head; the field only repeats the number of heads.
  if (f.integer("num_key_value_heads", 1, kHeadsMax, c.heads) != c.heads) {
    f.fail("num_key_value_heads", "must equal num_attention_heads");
  }
  c.rope_layout = f.boolean("rope_interleave", true) ? kernels::RopeLayout::kInterleaved
                                                     : kernels::RopeLayout::kHalfSplit;
  read_rotary_share(f, 1.0, /*partial=*/false);
  refuse(f, f.boolean("attention_bias", false), "attention_bias", "true");
  Rope rope = read_rope(f, c.rope, c.max_context);
  c.inverse_frequency = std::move(rope.inverse_frequency);
  c.rope_factor = rope.factor;
  c.scale = static_cast<float>(rope.score_growth / std::sqrt(static_cast<double>(c.nope + c.rope)));
}

// Whether each layer slides, by layer_types; empty if there is none.
std::vector<bool> sliding_layers(FieldReader& f, const ModelConfig& c) {
  std::vector<bool> slides;
  if (!f.has("layer_types")) return slides;
  for (const std::string& kind : f.texts("layer_types")) {
    slides.push_back(kind == "sliding_attention");
    refuse(f, !slides.back() && kind != "full_attention", "layer_types", "'" + kind + "'");
  }
  check_length(f, c, "layer_types", slides.size());
  return slides;
}

void read_windows(FieldReader& f, ModelConfig& c, const Family& family) {
  constexpr const char* kWanted = "use_sliding_window";
  const bool wanted = f.boolean(kWanted, false) && f.has("sliding_window");
  const int64_t window = wanted ? f.integer("sliding_window", 1, kContextMax) : 0;
  const auto count = static_cast<int64_t>(c.layers.size());
  std::vector<bool> slides;
  if (family.windows != Windows::kEverywhere) slides = sliding_layers(f, c);
  if (slides.empty()) {
    const bool everywhere = family.windows == Windows::kEverywhere;
    const int64_t first = wanted && !everywhere ? f.integer("max_window_layers", 0, kLayersMax) : 0;
    for (int64_t layer = 0; layer < count; ++layer) slides.push_back(wanted && layer >= first);
  }
  for (int64_t layer = 0; layer < count && !f.failed(); ++layer) {
    if (!slides[static_cast<size_t>(layer)]) continue;
    if (!wanted)
      f.fail("layer_types", "has layers that slide, but there is no window: see use_sliding_window");
    refuse(f, family.windows == Windows::kNone, "sliding_window", "of this model_type");
    c.layers[static_cast<size_t>(layer)].window = window;
  }
}

void read_grouped(FieldReader& f, ModelConfig& c, const Family& family) {
  c.attention = AttentionKind::kGrouped;
  c.kv_heads = static_cast<int>(f.integer("num_key_value_heads", 1, kv::kMaxParts, c.heads));
  if (c.kv_heads > kv::kMaxParts) {
    f.fail("num_key_value_heads", "missing, and the " + std::to_string(c.heads) +
                                      " of num_attention_heads are more than " +
                                      std::to_string(kv::kMaxParts));
  } else if (!f.failed() && c.heads % c.kv_heads != 0) {
    f.fail("num_key_value_heads", "must divide num_attention_heads, " + std::to_string(c.heads));
  }
  if (!f.has("head_dim") && c.hidden % c.heads != 0) {
    f.fail("hidden_size", "must be a multiple of num_attention_heads, for there is no head_dim");
  }
  c.value = c.head_width = f.integer("head_dim", 1, kWidthMax, c.hidden / c.heads);
  c.rope =
      static_cast<int64_t>(static_cast<double>(c.head_width) *
                           read_rotary_share(f, family.rotary_share, /*partial=*/family.rotary_share < 1));
  if (c.rope < 2 || c.rope % 2 != 0)
    f.fail("head_dim", "the dimensions that turn must be even and at least 2");
  c.rope_layout = kernels::RopeLayout::kHalfSplit;
  c.normed_heads = family.normed_heads || f.boolean("use_qk_norm", false);
  const bool bias = f.boolean("attention_bias", false);
  c.qkv_bias = family.qkv_bias || bias;
  c.output_bias = family.attention_bias_is_all && bias;
  read_windows(f, c, family);
  if (f.failed()) return;
  Rope rope = read_rope(f, c.rope, c.max_context);
  c.inverse_frequency = std::move(rope.inverse_frequency);
  c.rope_factor = rope.factor;
  c.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(c.head_width)));
}

// The text of a field that must hold one of `served`; the first of them if it is missing.
std::string refuse_other_than(FieldReader& f, const char* field, std::initializer_list<const char*> served) {
  std::string value = f.text(field, *served.begin());
  std::string names;
  for (const char* name : served) {
    if (value == name) return value;
    names += (names.empty() ? "" : " and ") + std::string(name);
  }
  f.fail(field, "'" + value + "' is not served for this model_type, only " + names, ErrorCode::kUnsupported);
  return *served.begin();
}

void read_dtype(FieldReader& f, ModelConfig& c) {
  const char* field = f.has("dtype") ? "dtype" : "torch_dtype";
  const std::string name = f.text(field, "float32");
  if (name == "bfloat16") {
    c.checkpoint_dtype = DType::kBF16;
  } else if (name == "float32" || name == "float16") {  // float16 is widened exactly
    c.checkpoint_dtype = DType::kF32;
  } else {
    f.fail(field, "'" + name + "' is not served", ErrorCode::kUnsupported);
  }
}

// ---- feed-forward -----------------------------------------------------------------------------------

void read_qwen_layer_kinds(FieldReader& f, ModelConfig& c) {
  const int64_t every = f.integer("decoder_sparse_step", 1, kLayersMax, 1);
  const std::vector<int64_t> dense = f.integers("mlp_only_layers", 0, kLayersMax);
  for (int64_t layer = 0; layer < std::ssize(c.layers); ++layer) {
    const bool moe = (layer + 1) % every == 0 && std::find(dense.begin(), dense.end(), layer) == dense.end();
    c.layers[static_cast<size_t>(layer)].feed_forward = moe ? FeedForward::kMoe : FeedForward::kDense;
  }
}

void read_layer_kinds(FieldReader& f, ModelConfig& c, const Family& family) {
  if (family.experts == Experts::kNone) return;  // all dense
  const auto count = static_cast<int64_t>(c.layers.size());
  if (f.has("mlp_layer_types")) {
    const std::vector<std::string> kinds = f.texts("mlp_layer_types");
    check_length(f, c, "mlp_layer_types", kinds.size());
    for (size_t layer = 0; layer < c.layers.size() && !f.failed(); ++layer) {
      if (kinds[layer] != "dense" && kinds[layer] != "sparse") {
        f.fail("mlp_layer_types", "'" + kinds[layer] + "' is neither dense nor sparse");
      }
      c.layers[layer].feed_forward = kinds[layer] == "sparse" ? FeedForward::kMoe : FeedForward::kDense;
    }
    return;
  }
  if (family.experts == Experts::kQwen) return read_qwen_layer_kinds(f, c);
  const int64_t first_moe = f.integer("first_k_dense_replace", 0, kLayersMax, family.dense_layers);
  const int64_t every = f.integer("moe_layer_freq", 1, kLayersMax, 1);
  for (int64_t layer = 0; layer < count; ++layer) {
    const bool moe = layer >= first_moe && layer % every == 0;
    c.layers[static_cast<size_t>(layer)].feed_forward = moe ? FeedForward::kMoe : FeedForward::kDense;
  }
}

// How the router scores experts, which groups it considers, and what weighs the chosen.
void read_router(FieldReader& f, ModelConfig& c, const Family& family) {
  c.expert_bias = family.experts == Experts::kCorrected;
  if (family.experts == Experts::kQwen) {
    c.expert_score = kernels::RouterScore::kSoftmax;
    c.normalise_experts = f.boolean("norm_topk_prob", false);
    return;
  }
  c.expert_groups = f.integer("n_group", 1, kExpertsMax, 1);
  c.top_expert_groups = f.integer("topk_group", 1, kExpertsMax, 1);
  c.expert_scale = static_cast<float>(f.number("routed_scaling_factor", 1e-6, 1e6, 1.0));
  if (family.experts == Experts::kCorrected) {
    c.expert_score = kernels::RouterScore::kSigmoid;
    refuse_other_than(f, "scoring_func", {"sigmoid"});
    refuse_other_than(f, "topk_method", {"noaux_tc"});
    c.normalise_experts = f.boolean("norm_topk_prob", true);
    return;
  }
  c.expert_score = kernels::RouterScore::kSoftmax;
  refuse_other_than(f, "scoring_func", {"softmax"});
  if (refuse_other_than(f, "topk_method", {"greedy", "group_limited_greedy"}) == "greedy") {
    c.expert_groups = c.top_expert_groups = 1;
  }
  // As the model's authors compute it: weights are normalised or scaled, never both, and one alone is scaled.
  c.normalise_experts = f.boolean("norm_topk_prob", false) && c.experts_per_token > 1;
  if (c.normalise_experts) c.expert_scale = 1;
}

void read_experts(FieldReader& f, ModelConfig& c, const Family& family) {
  const bool qwen = family.experts == Experts::kQwen;
  const char* count_field = !qwen                  ? "n_routed_experts"
                            : f.has("num_experts") ? "num_experts"
                                                   : "num_local_experts";
  c.experts = f.integer(count_field, 2, kExpertsMax);
  c.experts_per_token = f.integer("num_experts_per_tok", 1, kExpertsMax);
  c.expert_width = f.integer("moe_intermediate_size", 1, kWidthMax);
  if (!qwen) c.shared_width = f.integer("n_shared_experts", 0, 64, 0) * c.expert_width;
  read_router(f, c, family);
  if (f.failed()) return;
  if (c.experts * static_cast<int64_t>(c.layers.size()) > kExpertsOfAllLayersMax) {
    f.fail(count_field, "times num_hidden_layers must not exceed " + std::to_string(kExpertsOfAllLayersMax));
  }
  if (c.experts % c.expert_groups != 0) {
    f.fail("n_group", "must divide n_routed_experts, " + std::to_string(c.experts));
  } else if (c.expert_score == kernels::RouterScore::kSigmoid && c.experts / c.expert_groups < 2) {
    f.fail("n_group",
           "must leave at least two experts to a group: a group's score is the sum of its best two");
  }
  if (c.top_expert_groups > c.expert_groups) {
    f.fail("topk_group", "must not exceed n_group, " + std::to_string(c.expert_groups));
  }
  const int64_t allowed = c.experts / c.expert_groups * c.top_expert_groups;
  if (c.experts_per_token > allowed) {
    f.fail("num_experts_per_tok",
           "must not exceed the experts of topk_group groups, " + std::to_string(allowed));
  }
}

void read_feed_forward(FieldReader& f, ModelConfig& c, const Family& family) {
  read_layer_kinds(f, c, family);
  bool dense = false;
  bool moe = false;
  for (const LayerConfig& layer : c.layers) {
    (layer.feed_forward == FeedForward::kMoe ? moe : dense) = true;
  }
  if (dense) c.dense_width = f.integer("intermediate_size", 1, kWidthMax);
  c.mlp_bias = f.boolean("mlp_bias", false);
  refuse(f, moe && c.mlp_bias, "mlp_bias", "true, beside experts,");
  if (moe) read_experts(f, c, family);
}

// ---- indexer ----------------------------------------------------------------------------------------

// One letter per layer, 'F' or 'S': the list of types, else the pattern, else the schedule.
std::string indexer_pattern(FieldReader& f, int64_t layer_count) {
  std::string pattern;
  if (f.has("indexer_types")) {
    for (const std::string& kind : f.texts("indexer_types")) {
      if (kind != "full" && kind != "shared")
        f.fail("indexer_types", "'" + kind + "' is neither full nor shared");
      pattern += kind == "full" ? 'F' : 'S';
    }
    return pattern;
  }
  if (f.has("index_topk_pattern")) {
    pattern = f.text("index_topk_pattern");
    if (pattern.find_first_not_of("FS") != std::string::npos) {
      f.fail("index_topk_pattern", "must hold only the letters F and S");
    }
    return pattern;
  }
  const int64_t every = f.integer("index_topk_freq", 1, kLayersMax, 1);
  const int64_t offset = f.integer("index_skip_topk_offset", 0, kLayersMax, 2);
  for (int64_t layer = 0; layer < layer_count; ++layer) {
    pattern += std::max<int64_t>(layer - offset + 1, 0) % every == 0 ? 'F' : 'S';
  }
  return pattern;
}

void read_indexer(FieldReader& f, ModelConfig& c, const Family& family) {
  c.index_heads = f.integer("index_n_heads", 1, kHeadsMax);
  c.index_width = f.integer("index_head_dim", 1, kWidthMax);
  c.index_topk = f.integer("index_topk", 1, kContextMax);
  c.index_rope_layout = f.boolean("indexer_rope_interleave", family.index_interleaved)
                            ? kernels::RopeLayout::kInterleaved
                            : kernels::RopeLayout::kHalfSplit;
  c.draft_keeps_selection = f.boolean("index_share_for_mtp_iteration", false);
  if (c.index_width < c.rope) f.fail("index_head_dim", "must be at least qk_rope_head_dim");
  if (c.q_lora_rank == 0 && !family.hash)
    f.fail("q_lora_rank", "missing: the indexer's query comes from the query latent");
  const auto count = static_cast<int64_t>(c.layers.size());
  const std::string pattern = indexer_pattern(f, count);
  if (f.failed()) return;
  const char* field = f.has("indexer_types") ? "indexer_types" : "index_topk_pattern";
  check_length(f, c, field, pattern.size());
  if (f.failed()) return;
  if (pattern[0] != 'F') {
    f.fail(field, "the first layer shares a selection, but there is none before it");
    return;
  }
  for (size_t layer = 0; layer < c.layers.size(); ++layer) {
    c.layers[layer].indexer = pattern[layer] == 'F' ? Indexer::kFull : Indexer::kShared;
  }
}

// ---- the hash model ---------------------------------------------------------------------------------

// The softmax scale with which a score of one doubles a weight, exactly.
constexpr float kHashScale = 1 / std::numbers::log2e_v<float>;
static_assert(kHashScale * std::numbers::log2e_v<float> == 1);

// Sums must be exact in float32: of digits over the context, of heads' digits over all layers (with room for
// what a norm rounds), of index scores.
constexpr int64_t kHashHeadsOfAllLayersMax = 1 << 16;
constexpr int64_t kHashIndexProductsMax = 1 << 17;

std::vector<int> selections_of(const ModelConfig& c) {
  std::vector<int> layers;
  for (const LayerConfig& layer : c.layers) {
    layers.push_back((layers.empty() ? -1 : layers.back()) + (layer.indexer == Indexer::kFull ? 1 : 0));
  }
  return layers;
}

void read_hash(FieldReader& f, ModelConfig& c) {
  const bool mla = c.attention == AttentionKind::kMla;
  hash_model::Shape s;
  s.layers = static_cast<int>(c.layers.size());
  s.heads = static_cast<int>(c.heads);
  s.parts = c.kv_heads;
  // A value has two more columns: one that is 1, and one for the count. The residual has one more.
  s.digits = static_cast<int>(
      std::min({int64_t{hash_model::kDigitsMax}, c.value_width() - 2, c.value, c.hidden - 1}));
  s.key_bits = static_cast<int>(std::min<int64_t>(hash_model::kKeyBitsMax, mla ? c.rope : c.head_width));
  s.vocabulary = static_cast<uint32_t>(c.vocabulary);
  for (const LayerConfig& layer : c.layers) s.windows.push_back(layer.window);
  if (c.index_layers() > 0) s.selection = selections_of(c);
  s.index_topk = c.index_topk;
  s.index_heads = static_cast<int>(c.index_heads);
  s.index_width = static_cast<int>(c.index_width);
  c.scale = kHashScale;
  if (s.digits < 1) f.fail(mla ? "kv_lora_rank" : "head_dim", "must be at least 3, and hidden_size 2");
  if (c.max_context > hash_model::kContextMax) {
    f.fail("max_position_embeddings",
           "must not exceed " + std::to_string(hash_model::kContextMax) + " in a hash model");
  }
  if (c.heads * s.layers > kHashHeadsOfAllLayersMax) {
    f.fail("num_hidden_layers", "times num_attention_heads must not exceed " +
                                    std::to_string(kHashHeadsOfAllLayersMax) + " in a hash model");
  }
  if (c.index_heads * c.index_width > kHashIndexProductsMax) {
    f.fail("index_n_heads", "times index_head_dim must not exceed " + std::to_string(kHashIndexProductsMax) +
                                " in a hash model");
  }
  c.hash = std::move(s);
}

// ---- draft layers -----------------------------------------------------------------------------------

// They have experts if any layer has, and always an indexer of their own.
void add_draft_layers(FieldReader& f, ModelConfig& c) {
  if (c.extra_layers == 0) {
    f.fail(draft_layers_field(f), "the model has no draft layer; --speculative mtp needs one",
           ErrorCode::kUnsupported);
  }
  c.draft_layers = c.extra_layers;
  for (int64_t i = 0; i < c.draft_layers; ++i) {
    c.layers.push_back({c.experts > 0 ? FeedForward::kMoe : FeedForward::kDense,
                        c.index_topk > 0 ? Indexer::kFull : Indexer::kNone});
  }
}

// ---- files ------------------------------------------------------------------------------------------

Result<nlohmann::json> read_object(const std::string& folder, const std::string& name) {
  TRY(const std::string text, read_text_file(folder + "/" + name, kConfigBytesMax));
  nlohmann::json out;
  TRY_VOID(parse_json(text, kConfigNestingMax, name, out));
  if (!out.is_object()) return error(ErrorCode::kBadCheckpoint, "is not a JSON object", name);
  return out;
}

// Nothing, if there is no such file.
template <typename Read>
Result<void> read_optional(const std::string& folder, const char* name, Read read) {
  const Result<nlohmann::json> object = read_object(folder, name);
  if (!object.has_value()) {
    return object.error().code == ErrorCode::kNotFound ? Result<void>() : Result<void>(object.error());
  }
  FieldReader f(*object, name);
  read(f);
  return f.failed() ? Result<void>(f.error()) : Result<void>();
}

void read_eos(FieldReader& f, ModelConfig& c) {
  const std::vector<int64_t> ids = f.integers("eos_token_id", 0, c.vocabulary - 1);
  if (!f.failed() && !ids.empty()) c.eos_tokens.assign(ids.begin(), ids.end());
}

}  // namespace

int64_t ModelConfig::index_layers() const {
  int64_t count = 0;
  for (const LayerConfig& layer : layers) count += layer.indexer == Indexer::kFull ? 1 : 0;
  return count;
}

int64_t ModelConfig::window() const {
  int64_t window = 0;
  for (const LayerConfig& layer : layers) window = std::max(window, layer.window);
  return window;
}

int64_t ModelConfig::window_layers() const {
  return std::count_if(layers.begin(), layers.end(),
                       [](const LayerConfig& layer) { return layer.window > 0; });
}

kernels::EntryFormat ModelConfig::entry_format(CacheDType type) const {
  kernels::EntryFormat format{compute_dtype(type), entry_width(), {}};
  const bool mla = attention == AttentionKind::kMla;
  CHECK(mla || type != CacheDType::kFp8DsMla);
  if (type == CacheDType::kFp8DsMla) format.fp8 = {1, latent, true};
  if (type == CacheDType::kFp8) {
    format.fp8 = mla ? kernels::Fp8Part{1, latent + rope, false} : kernels::Fp8Part{2, head_width, true};
  }
  return format;
}

kv::CacheGeometry ModelConfig::cache_geometry(const CacheFormat& format, int64_t block_tokens) const {
  const int64_t index_key_bytes = kernels::index_key_bytes(index_width, format.index_query_dtype(),
                                                           format.index_keys == CacheDType::kFp8);
  kv::CacheGeometry out;
  out.block_tokens = block_tokens;
  out.heads = heads;
  out.streams[static_cast<size_t>(kv::Stream::kEntries)] = {static_cast<int64_t>(layers.size()),
                                                            entry_format(format.entries).bytes(), kv_heads};
  out.streams[static_cast<size_t>(kv::Stream::kIndexKeys)] = {index_layers(),
                                                              index_layers() == 0 ? 0 : index_key_bytes};
  return out;
}

Result<ModelConfig> read_model_config(const std::string& folder, bool draft_layers) {
  TRY(const nlohmann::json object, read_object(folder, "config.json"));
  FieldReader f(object, "config.json");
  ModelConfig c;
  const Family* family = read_family(f, c);
  if (f.failed()) return f.error();
  c.quantisation = read_quantisation(f, "quantization_config");
  refuse_other_than(f, "hidden_act", {"silu"});
  read_sizes(f, c);
  read_dtype(f, c);
  if (f.failed()) return f.error();
  family->attention == AttentionKind::kMla ? read_mla(f, c) : read_grouped(f, c, *family);
  if (f.failed()) return f.error();
  read_feed_forward(f, c, *family);
  if (family->has_indexer) read_indexer(f, c, *family);
  if (family->hash && !f.failed()) read_hash(f, c);
  read_eos(f, c);
  if (draft_layers) add_draft_layers(f, c);
  if (f.failed()) return f.error();

  const bool of_its_own = c.quantisation.coding == WeightCoding::kNone;
  TRY_VOID(read_optional(folder, "hf_quant_config.json", [&](FieldReader& q) {
    if (of_its_own) c.quantisation = read_quantisation(q, "quantization");
  }));
  TRY_VOID(read_optional(folder, "generation_config.json", [&](FieldReader& g) { read_eos(g, c); }));
  return c;
}

}  // namespace weft::worker
