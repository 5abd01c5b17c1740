// What follows the score products in attention: softmax weights of a group, the weighted sum of its
// values, and merging of partials. The order is that of kernels/attention.h. Stateless, any thread with
// flush-to-zero on.
#pragma once

#include <cstdint>

#include "kernels/attention.h"
#include "proto/vocab/ids.h"

namespace weft::kernels {

// m grows, and accumulators are rescaled, at the borders of groups (kGroupEntries).

// scores[0 … count): exponents t in, weights p out (columns up to the next multiple of 16 are overwritten).
// Raises m to the largest n; returns the factor 2^(old m − new m) that takes the accumulators so far to the
// new m.
float group_weights(float* scores, int64_t count, int32_t& m);

// Queries that add the same entries of a group.
struct GroupValues {
  DType dtype = DType::kF32;
  int64_t queries = 0;
  int64_t value_offset = 0, value_width = 0;  // elements of an entry
  const void* const* entries = nullptr;
  int64_t entry_count = 0;           // 1 … kGroupEntries
  const float* weights = nullptr;    // [queries][kGroupEntries]
  const float* factors = nullptr;    // [queries]
  float* const* partials = nullptr;  // [queries], each o and l: multiplied by the factor, then added to
};
void add_values(const GroupValues& group);

}  // namespace weft::kernels
