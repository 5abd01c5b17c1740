// The score products of attention where many queries read the same entries: the same sums as
// cpu/attention_dots.h, bit for bit, with lanes over entries.
//
// The words of a group of entries are transposed once, [step of entries][word][entry], for all queries. One
// product's 16 accumulators are then 16 vectors over entries, and its tree (8, 4, 2, 1) is additions of whole
// vectors, walked depth first so that few of them live at a time: no shuffle is paid per product. Stateless,
// any thread with flush-to-zero on. No errors.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention_dots.h"
#include "kernels/cpu/attention_values.h"
#include "proto/vocab/ids.h"

namespace weft::kernels {

// From how many queries up transposing pays. bf16 walks half as many words between shuffles, so they weigh
// more.
constexpr int64_t column_queries(DType dtype) { return dtype == DType::kF32 ? 32 : 16; }
inline constexpr int64_t kColumnStep = 32;  // entries are computed in whole steps

// columns[(u div step · words + w) · step + u mod step] = word w of entry u; up to the next whole step the
// last entry is repeated. `words` is a multiple of 16.
void transpose_words(const void* const* entries, int64_t entry_count, int64_t words, float* columns);

struct DotColumns {
  const WordRow* queries = nullptr;  // without tails
  int64_t query_count = 0;
  const float* columns = nullptr;
  int64_t entry_count = 0;  // 1 … kGroupEntries
  int64_t words = 0;        // a multiple of 16
  float scale = 0;
  float* out = nullptr;  // [queries][kGroupEntries]; written to the end of the last step
};
using ColumnDots = void (*)(const DotColumns& columns);
ColumnDots column_dots(DType dtype);

// With VDPBF16PS; only where have_bf16_dot().
void column_dots_avx512bf16(const DotColumns& columns);

}  // namespace weft::kernels
