// What config.json says, checked and resolved: the one description that the builder reads.
//
// All families are one module: MLA, with an indexer or without, or grouped queries, and a dense or MoE
// feed-forward (worker/model/README.md says what each family chooses). Both spellings of a field that has two
// are read.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/entry.h"
#include "kernels/router.h"
#include "kv/layout.h"
#include "proto/vocab/cache_format.h"
#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"
#include "worker/model/hash_math.h"
#include "worker/model/quantisation.h"

namespace weft::worker {

// kMla: every head reads the same latent entry (absorbed). kGrouped: the heads of a group read K ‖ V of one
// KV head.
enum class AttentionKind : uint8_t { kMla, kGrouped };
enum class FeedForward : uint8_t { kDense, kMoe };
// kFull: the layer owns an indexer; kShared: it reuses the selection of the last full layer; kNone: dense
// attention.
enum class Indexer : uint8_t { kNone, kFull, kShared };

struct LayerConfig {
  FeedForward feed_forward = FeedForward::kDense;
  Indexer indexer = Indexer::kNone;
  int64_t window = 0;  // rows see the last so many keys, their own among them; 0: all
};

struct ModelConfig {
  std::string model_type;
  DType checkpoint_dtype = DType::kF32;  // of what is not quantised
  Quantisation quantisation;
  int64_t hidden = 0, heads = 0, vocabulary = 0, max_context = 0;
  std::vector<LayerConfig> layers;
  int64_t extra_layers = 0;  // num_nextn_predict_layers: draft layers; their tensors are known
  int64_t draft_layers = 0;  // the last of `layers`: extra_layers if they are loaded, else none
  // A draft layer that runs again for a further guess reads the keys that it chose for the first one.
  bool draft_keeps_selection = false;
  bool tied_embeddings = false;
  float rms_eps = 1e-6f;
  float latent_eps = 1e-6f;  // q_a_layernorm and kv_a_layernorm

  AttentionKind attention = AttentionKind::kMla;
  int kv_heads = 1;   // parts of the entries: heads that share K and V read the same one; 1 with MLA
  int64_t rope = 0;   // width of the part of a query and key that turns
  int64_t value = 0;  // what a head gives to o_proj
  float scale = 0;    // α, with the YaRN square where it applies
  kernels::RopeLayout rope_layout = kernels::RopeLayout::kInterleaved;
  std::vector<double> inverse_frequency;  // [rope / 2], scaling applied
  double rope_factor = 1;                 // A: multiplies cosines and sines

  // MLA: rope is qk_rope_head_dim, value is v_head_dim
  int64_t q_lora_rank = 0;  // 0: plain q_proj
  int64_t latent = 0;       // kv_lora_rank
  int64_t nope = 0;         // qk_nope_head_dim

  // Grouped queries: the first `rope` dimensions of a head turn; value is head_width
  int64_t head_width = 0;     // of queries, keys and values
  bool normed_heads = false;  // q_norm, k_norm: RMSNorm of each head before it turns
  bool qkv_bias = false, output_bias = false;

  // Indexer
  int64_t index_heads = 0, index_width = 0, index_topk = 0;
  kernels::RopeLayout index_rope_layout = kernels::RopeLayout::kHalfSplit;

  // Feed-forward
  int64_t dense_width = 0, expert_width = 0, shared_width = 0;
  // Which segment computes an expert: one of them the whole (expert-parallel), or each a slice of its columns
  // (tensor-parallel). Not in config.json: a choice at load, with its own order of additions.
  bool split_experts = false;
  int64_t experts = 0, experts_per_token = 0, expert_groups = 1, top_expert_groups = 1;
  kernels::RouterScore expert_score = kernels::RouterScore::kSigmoid;
  bool expert_bias = true;  // e_score_correction_bias exists
  bool normalise_experts = true;
  bool mlp_bias = false;  // of dense layers
  float expert_scale = 1;

  std::vector<uint32_t> eos_tokens;

  // The hash model: queries, entries and index keys are hashes (attention_hash.cc), and so is the token. The
  // rest is as in any model of its kind of attention.
  std::optional<hash_model::Shape> hash;

  // Elements of a query head and of the value part of an entry, and where key and value are in one.
  int64_t key_width() const { return attention == AttentionKind::kMla ? latent + rope : head_width; }
  int64_t value_width() const { return attention == AttentionKind::kMla ? latent : head_width; }
  kernels::EntryShape entry_shape() const {
    return {key_width(), attention == AttentionKind::kMla ? 0 : head_width, value_width()};
  }
  int64_t entry_width() const { return entry_shape().width(); }  // of one part
  int64_t group_heads() const { return heads / kv_heads; }       // query heads that read one part
  int64_t main_layers() const { return static_cast<int64_t>(layers.size()) - draft_layers; }
  int64_t index_layers() const;
  // The window of the layers that have one (it is one size for all), and their number.
  int64_t window() const;
  int64_t window_layers() const;
  // The form must be one that the model can have (worker/describe.cc checks it).
  kernels::EntryFormat entry_format(CacheDType type) const;
  kv::CacheGeometry cache_geometry(const CacheFormat& format, int64_t block_tokens) const;
};

// Reads <folder>/config.json (and eos ids of generation_config.json, and hf_quant_config.json, if present).
// kBadCheckpoint names the field; kUnsupported for a model_type or option that this build does not serve.
// With `draft_layers`, the model's draft layers are to be loaded; kUnsupported if it has none.
Result<ModelConfig> read_model_config(const std::string& folder, bool draft_layers = false);

}  // namespace weft::worker
