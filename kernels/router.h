// noaux_tc expert choice (DeepSeek-V3): sigmoid scores, a bias that only chooses, groups, normalised weights.
// Single-threaded: callers spread rows.
#pragma once

#include <cstdint>

namespace weft::kernels {

struct Router {
  int64_t experts = 0;
  int64_t groups = 1;           // n_group
  int64_t top_groups = 1;       // topk_group
  int64_t top_k = 1;            // num_experts_per_tok
  bool normalise = true;        // norm_topk_prob: divide by (sum + 1e-20)
  float scale = 1;              // routed_scaling_factor
  const float* bias = nullptr;  // [experts] e_score_correction_bias
};

// One row. σ = sigmoid(logits); b = σ + bias; a group's score is the sum of its two largest b; the best
// `top_groups` groups stay (others −inf); the best top_k of b are chosen. All orders: larger first, ties to
// the lower id. Writes the chosen ids ascending and their weights (unbiased σ, summed in ascending id;
// σ / (sum + 1e-20) · scale, in this order). A NaN is chosen only where nothing else is left.
void route(const Router& p, const float* logits, int32_t* ids, float* weights);

}  // namespace weft::kernels
