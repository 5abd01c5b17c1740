// The weighted sums of cpu/attention_values.cc with VDPBF16PS: the order of its PairStep, hence the same
// bits. Intrinsics alone (see cpu/bf16-inl.h).
#include <immintrin.h>

#include <cstring>

#include "kernels/cpu/attention_values.h"

namespace weft::kernels {
namespace {

inline __m512 dot(__m512 sum, __m512i weights, __m512i values) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(values));
}

template <int kQueries, int kVectors, bool kSum>
void tile(const PairSlice& slice, int64_t query) {
  const GroupValues& group = *slice.group;
  float* const* partials = group.partials + query;
  const float* weights = group.weights + query * kGroupEntries;
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
  __m512 sums[kQueries][kVectors];
  __m512 totals[kQueries];
#pragma GCC unroll 4
  for (int q = 0; q < kQueries; ++q) {
    const __m512 factor = _mm512_set1_ps(group.factors[query + q]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[q][v] = _mm512_loadu_ps(partials[q] + slice.at + v * 16) * factor;
    if (kSum) totals[q] = _mm512_set1_ps(partials[q][group.value_width]) * factor;
  }
  const float* values = slice.values;
  for (int64_t pair = 0; pair < slice.pairs; ++pair, values += kVectors * 16) {
    __m512i value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) value[v] = _mm512_loadu_si512(values + v * 16);
#pragma GCC unroll 4
    for (int q = 0; q < kQueries; ++q) {
      int word;
      std::memcpy(&word, weights + q * kGroupEntries + pair, sizeof word);
      const __m512i weight = _mm512_set1_epi32(word);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[q][v] = dot(sums[q][v], weight, value[v]);
      if (kSum) totals[q] = dot(totals[q], weight, ones);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(partials[q] + slice.at + v * 16, sums[q][v]);
    if (kSum) partials[q][group.value_width] = _mm512_cvtss_f32(totals[q]);
  }
}

template <int kVectors, bool kSum>
void all_queries(const PairSlice& slice) {
  const int64_t queries = slice.group->queries;
  int64_t query = 0;
  for (; query + 4 <= queries; query += 4) tile<4, kVectors, kSum>(slice, query);
  for (; query + 2 <= queries; query += 2) tile<2, kVectors, kSum>(slice, query);
  if (query < queries) tile<1, kVectors, kSum>(slice, query);
}

}  // namespace

void add_pairs_64_avx512bf16(const PairSlice& slice) {
  slice.at == 0 ? all_queries<4, true>(slice) : all_queries<4, false>(slice);
}

void add_pairs_16_avx512bf16(const PairSlice& slice) {
  slice.at == 0 ? all_queries<1, true>(slice) : all_queries<1, false>(slice);
}

}  // namespace weft::kernels
