// The packed weights of a model, in the weight arena, and how they get there.
//
// The layout of the arena is a pure function of configuration and weight dtype, so every worker computes the
// same one. Each tensor has one writer (tensor i is packed by rank i mod `packers`, the ranks there are at
// start) and a seal: the XXH3 of its packed bytes, in the arena's directory, without which nobody reads it. A
// respawned worker finds its seals, checks them against the bytes, and packs nothing but what does not match.
//
// A fresh arena is zeros. Ranks may load at the same time from several processes: they share only the
// directory's words, which are atomic. A matrix is packed for the views that the runner takes of it;
// weight_plan.h lists them.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/gemm.h"
#include "worker/model/config.h"

namespace weft::worker {

struct Mlp {                                                                   // SwiGLU
  kernels::PackedMatrix gate, up;                                              // [width, hidden]
  kernels::PackedMatrix down;                                                  // [hidden, width]
  const float *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;  // null without mlp_bias
};

struct LayerWeights {
  const float* input_norm = nullptr;           // [hidden]
  const float* post_attention_norm = nullptr;  // [hidden]

  // AttentionKind::kMla.
  kernels::PackedMatrix q_a;  // [q_lora_rank, hidden]; empty (k = 0) without q_lora_rank
  const float* q_a_norm = nullptr;
  kernels::PackedMatrix q_b;   // heads groups of [nope + rope, q_lora_rank]; [.., hidden] without q_lora_rank
  kernels::PackedMatrix kv_a;  // [latent + rope, hidden]
  const float* kv_a_norm = nullptr;
  kernels::PackedMatrix w_uk;  // heads groups of [latent, nope]: q̃ = W_UKᵀ q_nope
  kernels::PackedMatrix w_uv;  // heads groups of [value, latent]
  kernels::PackedMatrix o;     // [hidden, heads · value]

  // AttentionKind::kGrouped; o is as above.
  kernels::PackedMatrix q;     // heads groups of [head_width, hidden]
  kernels::PackedMatrix k, v;  // kv_heads groups of [head_width, hidden]
  const float *q_bias = nullptr, *k_bias = nullptr, *v_bias = nullptr;  // null without qkv_bias
  const float *q_norm = nullptr, *k_norm = nullptr;  // [head_width]; null unless normed_heads
  const float* o_bias = nullptr;                     // [hidden]; null without output_bias

  // Indexer::kFull only.
  kernels::PackedMatrix index_q;        // index_heads groups of [index_width, q_lora_rank]
  kernels::PackedMatrix index_k;        // [index_width, hidden]
  const float* index_k_norm = nullptr;  // LayerNorm weight, bias: [index_width]
  const float* index_k_norm_bias = nullptr;
  kernels::PackedMatrix index_weights;  // [index_heads, hidden], always float32

  Mlp dense;                           // FeedForward::kDense
  kernels::PackedMatrix router;        // [experts, hidden], always float32
  const float* router_bias = nullptr;  // [experts]; null without expert_bias
  std::vector<Mlp> experts;
  Mlp shared;  // shared_width 0: empty
};

// What a draft layer has beside a layer's weights. Embedding and head are the model's.
struct DraftWeights {
  const float* embedding_norm = nullptr;  // enorm: [hidden]
  const float* hidden_norm = nullptr;     // hnorm: [hidden]
  kernels::PackedMatrix combine;          // eh_proj: [hidden, 2 hidden], the embedding's half first
  const float* norm = nullptr;            // shared_head.norm: [hidden]
};

struct ModelWeights {
  DType dtype = DType::kF32;
  const std::byte* embedding = nullptr;  // [vocabulary][hidden], dtype, rows as stored (not packed)
  std::vector<LayerWeights> layers;
  const float* final_norm = nullptr;
  kernels::PackedMatrix head;       // [vocabulary, hidden]
  std::vector<DraftWeights> draft;  // of the last layers, where draft layers are loaded
};

// Bytes of the weight arena, directory included.
int64_t weight_arena_bytes(const ModelConfig& config, DType dtype);

struct LoadCounts {
  int64_t tensors_done = 0, tensors_total = 0;  // of this rank's share
  int64_t bytes_done = 0, bytes_total = 0;
  int64_t tensors_packed = 0;  // of tensors_done; the others were sealed before
};

// Opens the checkpoint (model.safetensors, or the shards of model.safetensors.index.json), checks that every
// expected tensor is there exactly once with the right shape and that nothing else is (draft layers and
// rotary tables excepted), and packs this rank's unsealed share into the arena. Expert matrices may be one
// tensor each or fused per layer. Ranks from `packers` on have no share. Every value must be finite, also in
// the dtype it is packed in. `progress` is called after each tensor; it may be empty. kBadCheckpoint names
// file and tensor, kUnsupported an element type; kFailedPrecondition: the arena holds another model or dtype.
Result<LoadCounts> load_weights(const std::string& folder, const ModelConfig& config, DType dtype,
                                std::byte* arena, int64_t arena_bytes, int rank, int packers,
                                const std::function<void(const LoadCounts&)>& progress);

// Views into an arena whose tensors are all sealed; kFailedPrecondition names the first that is not.
Result<ModelWeights> view_weights(const ModelConfig& config, DType dtype, const std::byte* arena,
                                  int64_t arena_bytes);

}  // namespace weft::worker
