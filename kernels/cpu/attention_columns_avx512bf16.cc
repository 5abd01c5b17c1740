// The columns of cpu/attention_columns.h with VDPBF16PS: the order of Bf16Step in cpu/attention_columns.cc,
// hence the same bits. Intrinsics alone (see cpu/bf16-inl.h).
#include <immintrin.h>

#include <cstring>

#include "kernels/cpu/attention_columns.h"

namespace weft::kernels {
namespace {

constexpr int kVectors = kColumnStep / 16;

template <int kQueries>
struct Tile {
  __m512 sums[kQueries][kVectors];
};

template <int kQueries>
[[gnu::always_inline]] inline void add(Tile<kQueries>& left, const Tile<kQueries>& right) {
#pragma GCC unroll 4
  for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) left.sums[q][v] = left.sums[q][v] + right.sums[q][v];
  }
}

template <int kQueries>
[[gnu::always_inline]] inline void walk(Tile<kQueries>& tile, const float* const (&queries)[kQueries],
                                        const float* columns, int64_t word) {
  const float* from = columns + word * kColumnStep;
  __m512 entries[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) entries[v] = _mm512_loadu_ps(from + v * 16);
#pragma GCC unroll 4
  for (int q = 0; q < kQueries; ++q) {
    int pair;  // of bf16, which may start at any two bytes
    std::memcpy(&pair, queries[q] + word, sizeof pair);
    const __m512i left = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      tile.sums[q][v] = _mm512_dpbf16_ps(tile.sums[q][v], reinterpret_cast<__m512bh>(left),
                                         reinterpret_cast<__m512bh>(entries[v]));
    }
  }
}

// The sum of lanes kLane, kLane + kStride, … < 16, by the tree.
template <int kQueries, int kLane, int kStride>
[[gnu::always_inline]] inline Tile<kQueries> sum(const float* const (&queries)[kQueries],
                                                 const float* columns, int64_t words) {
  Tile<kQueries> left;
  if constexpr (kStride < 16) {
    left = sum<kQueries, kLane, 2 * kStride>(queries, columns, words);
    add(left, sum<kQueries, kLane + kStride, 2 * kStride>(queries, columns, words));
  } else {
#pragma GCC unroll 4
    for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) left.sums[q][v] = _mm512_setzero_ps();
    }
    for (int64_t w = 0; w < words; w += 16) walk(left, queries, columns, w + kLane);
  }
  return left;
}

template <int kQueries>
void rows_of(const DotColumns& p, int64_t query, int64_t step) {
  const float* queries[kQueries];
  for (int q = 0; q < kQueries; ++q) queries[q] = p.queries[query + q].words;
  const Tile<kQueries> tile = sum<kQueries, 0, 1>(queries, p.columns + step * p.words, p.words);
#pragma GCC unroll 4
  for (int q = 0; q < kQueries; ++q) {
    float* out = p.out + (query + q) * kGroupEntries + step;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      _mm512_storeu_ps(out + v * 16, tile.sums[q][v] * _mm512_set1_ps(p.scale));
  }
}

}  // namespace

void column_dots_avx512bf16(const DotColumns& p) {
  for (int64_t step = 0; step < p.entry_count; step += kColumnStep) {
    int64_t query = 0;
    for (; query + 4 <= p.query_count; query += 4) rows_of<4>(p, query, step);
    for (; query < p.query_count; ++query) rows_of<1>(p, query, step);
  }
}

}  // namespace weft::kernels
