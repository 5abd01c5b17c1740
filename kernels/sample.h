// The next token of one row of logits.
//
// A candidate's weight is 2^((logit − largest) · (log2 e / temperature)), in float32 by this library's exp2;
// weights are summed in double. u is uniform in [0, 1), the upper 53 bits of the first two words of Philox.
// The token drawn is the first, by ascending id, at which the running sum exceeds u · (sum of all kept).
// Allocates; single-threaded.
#pragma once

#include <cstdint>

namespace weft::kernels {

struct Sampler {
  float temperature = 0;  // 0: greedy (largest logit, ties to the lower id)
  uint32_t top_k = 0;     // 0: off
  float top_p = 1;        // 1: off
  uint64_t seed = 0;
};

// Candidates are ordered by (logit descending, id ascending); top_k cuts first, then top_p keeps the shortest
// prefix whose weight reaches top_p of theirs. The draw is Philox4x32-10 with key = seed and counter =
// position, so a token depends on its row, seed and position only. All logits must be finite.
uint32_t sample(const Sampler& p, const float* logits, int64_t vocabulary, uint64_t position);

}  // namespace weft::kernels
