// Expert choice: scores of all experts, an optional bias that only chooses, optional groups, weights of the
// chosen. noaux_tc is sigmoid scores with a bias; greedy and group_limited_greedy are softmax scores, without
// and with groups. Single-threaded: callers spread rows.
#pragma once

#include <cstdint>

namespace weft::kernels {

// How logits become scores, and what a group is judged by.
enum class RouterScore : uint8_t {
  kSigmoid,  // σ(logit); the sum of the group's two best
  kSoftmax,  // exp(logit) / Σ exp over all experts; the group's best
};

struct Router {
  RouterScore score = RouterScore::kSigmoid;
  int64_t experts = 0;
  int64_t groups = 1;           // n_group
  int64_t top_groups = 1;       // topk_group
  int64_t top_k = 1;            // num_experts_per_tok
  bool normalise = true;        // norm_topk_prob: divide by (sum + 1e-20)
  float scale = 1;              // routed_scaling_factor
  const float* bias = nullptr;  // [experts] e_score_correction_bias; null: none
};

// One row. s = the scores (softmax: 2^((logit − largest)·log2 e), summed in ascending id, each divided by the
// sum); b = s + bias; the best `top_groups` groups by b stay (others −inf); the best top_k of b are chosen.
// All orders: larger first, ties (−0 equals +0) to the lower id. Writes the chosen ids ascending and their
// weights (s without bias, summed in ascending id; s / (sum + 1e-20) · scale, in this order). A NaN is chosen
// only where nothing else is left.
void route(const Router& p, const float* logits, int32_t* ids, float* weights);

}  // namespace weft::kernels
