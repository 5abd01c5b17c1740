// Attention of owned rows over expanded MLA entries: keys W_UK c ‖ k_pe and values W_UV c of each head,
// instead of absorbed queries and latent values.
//
// For long prompts this costs less arithmetic (a key has nope + rope elements, not latent + rope). Its sums
// have another order, so it is outside the promise of equal bits. The context is expanded shard by shard and
// head by head, never as a whole. W_UK is needed the other way round than for absorption: a copy in private
// memory, made when first used. Rows are dense. Belongs to the thread that runs the step.
#pragma once

#include <vector>

#include "worker/model/attend.h"
#include "worker/model/step_state.h"

namespace weft::worker {

class Expanded {
 public:
  explicit Expanded(StepState& state) : state_(state) {}

  // For own rows of all spans that expand: queries [whole row][head][nope + rope] in the cache's dtype, rope
  // applied; out [whole row][head][value].
  void attend(int64_t layer, const std::byte* queries, float* out);

 private:
  struct Context;
  void attend_span(const SpanRoute& span, int64_t layer, const std::byte* queries, float* out);
  void gather(const SpanRoute& span, int64_t layer, int shard, int64_t end, Context& context);
  void expand_head(int64_t layer, int64_t head, Context& context);
  const kernels::PackedMatrix& key_weights(int64_t layer);
  int64_t key_width() const { return state_.config.nope + state_.config.rope; }
  int64_t entry_width() const { return key_width() + state_.config.value; }

  StepState& state_;
  struct KeyWeights {
    std::vector<std::byte> memory;
    kernels::PackedMatrix matrix;  // heads groups of [nope, latent]
  };
  std::vector<KeyWeights> key_weights_;  // by layer
  Operand latent_operand_;
};

}  // namespace weft::worker
