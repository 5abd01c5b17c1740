// The strips of cpu/attention_dots.h with VDPBF16PS: the order of Bf16Step in cpu/attention_dots.cc, hence
// the same bits. Intrinsics alone (see cpu/bf16-inl.h).
#include <immintrin.h>

#include "kernels/cpu/attention_dots.h"

namespace weft::kernels {
namespace {

inline __m512 dot(__m512 sum, __m512 a, __m512 b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

// One level of the trees of two products: x's lanes i + i + distance and y's, x's first within what is left
// of it.
inline __m512 add_8(__m512 x, __m512 y) {
  return _mm512_maskz_shuffle_f32x4(0xffff, x, y, 0x44) + _mm512_maskz_shuffle_f32x4(0xffff, x, y, 0xee);
}
inline __m512 add_4(__m512 x, __m512 y) {
  // Blocks x0 y0 x2 y2 and x1 y1 x3 y3.
  return _mm512_mask_shuffle_f32x4(x, 0xf0f0, y, y, 0xa0) + _mm512_mask_shuffle_f32x4(y, 0x0f0f, x, x, 0xf5);
}
inline __m512 add_2(__m512 x, __m512 y) {
  return _mm512_maskz_shuffle_ps(0xffff, x, y, 0x44) + _mm512_maskz_shuffle_ps(0xffff, x, y, 0xee);
}
inline __m512 add_1(__m512 x, __m512 y) {
  // Lanes x0 y0 x2 y2 and x1 y1 x3 y3 of every block.
  return _mm512_mask_moveldup_ps(x, 0xaaaa, y) + _mm512_mask_movehdup_ps(y, 0x5555, x);
}

template <int kQueries>
void strip_of(const DotStrip& strip, int64_t query) {
  constexpr int kEntries = 16 / kQueries;
  const WordRow* queries = strip.queries + query;
  for (int64_t first = 0; first < strip.entry_count; first += kEntries) {
    const int64_t count = strip.entry_count - first < kEntries ? strip.entry_count - first : kEntries;
    const WordRow* rows[kEntries];  // beyond the strip: the last one again, and not stored
    for (int64_t u = 0; u < kEntries; ++u) rows[u] = &strip.entries[first + (u < count ? u : count - 1)];
    const float* q[kQueries];
    const float* e[kEntries];
#pragma GCC unroll 16
    for (int h = 0; h < kQueries; ++h) q[h] = queries[h].words;
#pragma GCC unroll 16
    for (int u = 0; u < kEntries; ++u) e[u] = rows[u]->words;
    __m512 sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) sums[i] = _mm512_setzero_ps();
    const auto step = [&](int64_t at) {
      __m512 left[kQueries];
#pragma GCC unroll 16
      for (int h = 0; h < kQueries; ++h) left[h] = _mm512_loadu_ps(q[h] + at);
#pragma GCC unroll 16
      for (int u = 0; u < kEntries; ++u) {
        const __m512 entry = _mm512_loadu_ps(e[u] + at);
#pragma GCC unroll 16
        for (int h = 0; h < kQueries; ++h)
          sums[h * kEntries + u] = dot(sums[h * kEntries + u], left[h], entry);
      }
    };
    for (int64_t w = 0; w < strip.words; w += 16) step(w);
    if (queries[0].tail != nullptr) {
#pragma GCC unroll 16
      for (int h = 0; h < kQueries; ++h) q[h] = queries[h].tail;
#pragma GCC unroll 16
      for (int u = 0; u < kEntries; ++u) e[u] = rows[u]->tail;
      step(0);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sums[i] = add_8(sums[i], sums[i + 8]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[i] = add_4(sums[i], sums[i + 4]);
    const __m512 total = add_1(add_2(sums[0], sums[2]), add_2(sums[1], sums[3]));
    alignas(64) float t[16];
    _mm512_store_ps(t, total * _mm512_set1_ps(strip.scale));
    for (int64_t h = 0; h < kQueries; ++h) {
      float* out = strip.out + (query + h) * strip.out_stride + first;
      if (count == kEntries) {
        __builtin_memcpy(out, t + h * kEntries, sizeof(float) * kEntries);
        continue;
      }
      for (int64_t u = 0; u < count; ++u) out[u] = t[h * kEntries + u];
    }
  }
}

}  // namespace

void strip_dots_avx512bf16(const DotStrip& strip) {
  if (strip.query_count == 4) return strip_of<4>(strip, 0);
  if (strip.query_count >= 2) strip_of<2>(strip, 0);
  if (strip.query_count != 2) strip_of<1>(strip, strip.query_count - 1);
}

}  // namespace weft::kernels
