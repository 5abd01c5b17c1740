// The score products of attention: up to 4 queries against a strip of entries, entry by entry.
//
// dot(h, u) = the tree (8, 4, 2, 1) over 16 lanes of q[h] · e[u]; lane = word index mod 16, each lane walking
// words upwards from +0; a word is one float32 or a pair of bf16. Words missing from the last 16 count as
// zeros.
//
// A tile of queries × entries keeps one vector of 16 lanes per product in registers: 4 × 4 of them take 8
// loads for 16 multiply-adds. Their trees are then added together, as in a transposition: each level halves
// the vectors, and the 16 sums come out in one. It is the same tree for every product, so the tile's shape
// changes no bit. Stateless, any thread with flush-to-zero on. No errors.
#pragma once

#include <cstdint>

#include "proto/vocab/ids.h"

namespace weft::kernels {

inline constexpr int64_t kStripQueries = 4;

struct WordRow {
  const float* words = nullptr;  // 32-bit words, whole groups of 16
  const float* tail = nullptr;   // [16]: the words after those, then zeros; null where there are none
};

struct DotStrip {
  const WordRow* queries = nullptr;
  int64_t query_count = 0;  // 1 … kStripQueries
  const WordRow* entries = nullptr;
  int64_t entry_count = 0;
  int64_t words = 0;  // a multiple of 16; the tails are all null or all given
  float scale = 0;
  float* out = nullptr;  // out[h · out_stride + u] = dot(h, u) · scale
  int64_t out_stride = 0;
};

using StripDots = void (*)(const DotStrip& strip);
StripDots strip_dots(DType dtype);

// With VDPBF16PS; only where have_bf16_dot().
void strip_dots_avx512bf16(const DotStrip& strip);

}  // namespace weft::kernels
