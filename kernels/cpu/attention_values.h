// What follows the score products in attention: softmax weights of a group, the weighted sum of its
// values, and merging of partials. The order is that of kernels/attention.h. Stateless, any thread with
// flush-to-zero on.
#pragma once

#include <cstdint>

#include "kernels/attention.h"
#include "proto/vocab/ids.h"

namespace weft::kernels {

// m grows, and accumulators are rescaled, at the borders of groups (kGroupEntries).

// scores[0 … count): exponents t in, weights p out; columns up to the next multiple of 16 are overwritten.
// float32: p itself. bf16: p rounded to bf16, side by side from the front of `scores`, so that word i is the
// pair of entries 2i and 2i + 1; a missing odd one is 0.
// Raises m to the largest n; returns the factor 2^(old m − new m) that takes the accumulators so far to the
// new m.
float group_weights(DType dtype, float* scores, int64_t count, int32_t& m);

// Queries that add the same entries of a group.
struct GroupValues {
  DType dtype = DType::kF32;
  int64_t queries = 0;
  int64_t value_offset = 0, value_width = 0;  // elements of an entry
  const void* const* entries = nullptr;
  int64_t entry_count = 0;           // 1 … kGroupEntries
  const float* weights = nullptr;    // [queries][kGroupEntries], as group_weights leaves them
  const float* factors = nullptr;    // [queries]
  float* const* partials = nullptr;  // [queries], each o and l: multiplied by the factor, then added to
};
void add_values(const GroupValues& group);

// What two partials are multiplied by before they are added: powers of two.
struct MergeFactor {
  float a = 1, b = 1;
};

// Dimensions [at, at + 64 or 16) of o, and l if at is 0, of the queries of a bf16 group.
// values[pair][dimension]: two entries' values, the even one in the low half.
struct PairSlice {
  const GroupValues* group = nullptr;
  const float* values = nullptr;
  int64_t pairs = 0;
  int64_t at = 0;
};
// With VDPBF16PS; only where have_bf16_dot().
void add_pairs_64_avx512bf16(const PairSlice& slice);
void add_pairs_16_avx512bf16(const PairSlice& slice);

}  // namespace weft::kernels
