// MLA attention in double, by its definition: softmax over all entries at once, no order of additions worth
// naming. The oracle for kernels/mla_attention.h; slow. Owns nothing, any thread.
#pragma once

#include <cstdint>
#include <vector>

namespace weft::kernels::reference {

struct AttentionInput {
  int64_t heads = 0;
  int64_t latent = 0;
  int64_t rope = 0;
  std::vector<double> query;    // [heads][latent + rope]
  std::vector<double> entries;  // [entry_count][latent + rope]
  double scale_log2 = 0;        // the weights are 2^(scale_log2 · q·e), normalised
  int64_t width() const { return latent + rope; }
  int64_t entry_count() const { return static_cast<int64_t>(entries.size()) / width(); }
};

// [heads][latent]: Σ softmax · latent part. Zeros where there is no entry.
std::vector<double> mla_attention(const AttentionInput& in);

// [heads]: log2 Σ 2^(scale_log2 · q·e); −infinity where there is no entry.
std::vector<double> log2_sum(const AttentionInput& in);

}  // namespace weft::kernels::reference
