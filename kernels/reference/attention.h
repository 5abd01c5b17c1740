// Attention in double, by its definition: softmax over all entries at once, no order of additions worth
// naming. The oracle for kernels/attention.h; slow. Owns nothing, any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention.h"

namespace weft::kernels::reference {

struct AttentionInput {
  int64_t heads = 0;
  EntryShape shape;
  std::vector<double> query;    // [heads][key]
  std::vector<double> entries;  // [entry_count][shape.width()]
  double scale_log2 = 0;        // the weights are 2^(scale_log2 · q·key), normalised
  int64_t entry_count() const { return static_cast<int64_t>(entries.size()) / shape.width(); }
};

// [heads][value]: Σ softmax · value. Zeros where there is no entry.
std::vector<double> attention(const AttentionInput& in);

// [heads]: log2 Σ 2^(scale_log2 · q·key); −infinity where there is no entry.
std::vector<double> log2_sum(const AttentionInput& in);

}  // namespace weft::kernels::reference
