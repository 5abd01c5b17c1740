// What config.json says, checked and resolved: the one description that the builder reads.
//
// All families are one module: MLA, with an indexer or without, and a dense or MoE feed-forward
// (worker/model/README.md says what each family chooses). Both spellings of a field that has two are read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/elementwise.h"
#include "kernels/router.h"
#include "kv/layout.h"
#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"

namespace weft::worker {

enum class FeedForward : uint8_t { kDense, kMoe };
// kFull: the layer owns an indexer; kShared: it reuses the selection of the last full layer; kNone: dense
// attention.
enum class Indexer : uint8_t { kNone, kFull, kShared };

struct LayerConfig {
  FeedForward feed_forward = FeedForward::kDense;
  Indexer indexer = Indexer::kNone;
};

struct ModelConfig {
  std::string model_type;
  DType checkpoint_dtype = DType::kF32;
  int64_t hidden = 0, heads = 0, vocabulary = 0, max_context = 0;
  std::vector<LayerConfig> layers;
  int64_t extra_layers = 0;  // num_nextn_predict_layers: draft layers whose tensors are known and not loaded
  bool tied_embeddings = false;
  float rms_eps = 1e-6f;
  float latent_eps = 1e-6f;  // q_a_layernorm and kv_a_layernorm

  int kv_heads = 1;  // parts of the entries: heads that share K and V read the same one; 1 with MLA

  // MLA
  int64_t q_lora_rank = 0;                // 0: plain q_proj
  int64_t latent = 0;                     // kv_lora_rank
  int64_t nope = 0, rope = 0, value = 0;  // qk_nope_head_dim, qk_rope_head_dim, v_head_dim
  float scale = 0;                        // α, with the YaRN square where it applies
  kernels::RopeLayout rope_layout = kernels::RopeLayout::kInterleaved;
  std::vector<double> inverse_frequency;  // [rope / 2], scaling applied
  double rope_factor = 1;                 // A: multiplies cosines and sines

  // Indexer
  int64_t index_heads = 0, index_width = 0, index_topk = 0;
  kernels::RopeLayout index_rope_layout = kernels::RopeLayout::kHalfSplit;

  // Feed-forward
  int64_t dense_width = 0, expert_width = 0, shared_width = 0;
  int64_t experts = 0, experts_per_token = 0, expert_groups = 1, top_expert_groups = 1;
  kernels::RouterScore expert_score = kernels::RouterScore::kSigmoid;
  bool expert_bias = true;  // e_score_correction_bias exists
  bool normalise_experts = true;
  float expert_scale = 1;

  std::vector<uint32_t> eos_tokens;

  int64_t entry_width() const { return latent + rope; }  // of one part
  int64_t index_layers() const;
  kv::CacheGeometry cache_geometry(DType cache_dtype, int64_t block_tokens) const;
};

// Reads <folder>/config.json (and eos ids of generation_config.json, if present). kBadCheckpoint names the
// field; kUnsupported for a model_type or option that this build does not serve.
Result<ModelConfig> read_model_config(const std::string& folder);

}  // namespace weft::worker
