// The bf16 tile with VDPBF16PS. Intrinsics only: see kernels/cpu/bf16-inl.h for the instruction's order and
// for why no other header belongs here. The shape is that of gemm_tile.cc.
#include <immintrin.h>

#include "kernels/cpu/gemm_tile.h"

namespace weft::kernels {
namespace {

__mmask16 mask_of_columns(int columns) { return static_cast<__mmask16>((1u << columns) - 1u); }

__m512bh broadcast(const char* from) {
  int word;
  __builtin_memcpy(&word, from, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(word));
}

// One accumulator an output, over steps [begin, end).
template <int R, int P>
inline __attribute__((always_inline)) void walk(const char* const (&x)[R], const uint32_t* const (&w)[P],
                                                int64_t begin, int64_t end, __m512 (&sums)[R][P]) {
  for (int64_t step = begin; step < end; ++step) {
    __m512bh panel[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) panel[p] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w[p] + step * 16));
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = broadcast(x[r] + step * 4);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) sums[r][p] = _mm512_dpbf16_ps(sums[r][p], pair, panel[p]);
    }
  }
}

template <int R, int P>
inline __attribute__((always_inline)) void start(const GemmTile& t, __m512 (&sums)[R][P]) {
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      const float* y = t.y[p] + r * t.y_stride;
      sums[r][p] = t.carry ? _mm512_maskz_loadu_ps(mask_of_columns(t.columns[p]), y) : _mm512_setzero_ps();
    }
  }
}

// Where the accumulators are the result.
template <int R, int P>
void run_plain(const GemmTile& t, const char* const (&x)[R], const uint32_t* const (&w)[P]) {
  __m512 sums[R][P];
  start<R, P>(t, sums);
  int64_t fetched = 0;
  for (int64_t step = 0; step < t.steps;) {
    const int64_t fetch_end =
        fetched + t.fetch_per_round < t.fetch_steps ? fetched + t.fetch_per_round : t.fetch_steps;
    for (; fetched < fetch_end; ++fetched) {
      for (int p = 0; p < P; ++p) __builtin_prefetch(t.fetch[p] + fetched * 16, 0, 2);
    }
    const int64_t end = step + kFetchEvery < t.steps ? step + kFetchEvery : t.steps;
    walk<R, P>(x, w, step, end, sums);
    step = end;
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      _mm512_mask_storeu_ps(t.y[p] + r * t.y_stride, mask_of_columns(t.columns[p]), sums[r][p]);
    }
  }
}

// y = fma(scales, sums, y or +0); the sums start again.
template <int R, int P>
inline __attribute__((always_inline)) void add_scaled(const GemmTile& t, int64_t block, bool add,
                                                      __m512 (&sums)[R][P]) {
#pragma GCC unroll 8
  for (int p = 0; p < P; ++p) {
    const __m512 scales = _mm512_loadu_ps(t.scales[p] + block * t.scale_stride);
    const __mmask16 mask = mask_of_columns(t.columns[p]);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      float* y = t.y[p] + r * t.y_stride;
      const __m512 base = add ? _mm512_maskz_loadu_ps(mask, y) : _mm512_setzero_ps();
      _mm512_mask_storeu_ps(y, mask, _mm512_fmadd_ps(scales, sums[r][p], base));
      sums[r][p] = _mm512_setzero_ps();
    }
  }
}

// Where the accumulators are scaled, block by block. Nothing is fetched early.
template <int R, int P>
void run_scaled(const GemmTile& t, const char* const (&x)[R], const uint32_t* const (&w)[P]) {
  __m512 sums[R][P];
  start<R, P>(t, sums);
  int64_t end = t.block_steps > 0 && t.first_steps < t.steps ? t.first_steps : t.steps;
  for (int64_t step = 0, block = 0;; ++block) {
    walk<R, P>(x, w, step, end, sums);
    add_scaled<R, P>(t, block, t.add || block > 0, sums);
    if (end == t.steps) return;
    step = end;
    end = end + t.block_steps < t.steps ? end + t.block_steps : t.steps;
  }
}

template <int R, int P>
void run_tile(const GemmTile& t) {
  const uint32_t* w[P];
  const char* x[R];
  for (int p = 0; p < P; ++p) w[p] = t.w[p];
  for (int r = 0; r < R; ++r) x[r] = reinterpret_cast<const char*>(t.x) + r * t.x_stride_bytes;
  t.scales[0] == nullptr ? run_plain<R, P>(t, x, w) : run_scaled<R, P>(t, x, w);
}

template <int R, int P>
void choose_panels(const GemmTile& t) {
  if constexpr (P > 1) {
    if (t.panels < P) return choose_panels<R, (P > 4 ? 4 : P - 1)>(t);
  }
  run_tile<R, P>(t);
}

void choose_rows(const GemmTile& t) {
  switch (t.rows) {
    case 1:
      return choose_panels<1, 8>(t);
    case 2:
      return choose_panels<2, 8>(t);
    case 3:
      return choose_panels<3, 8>(t);
    case 4:
      return choose_panels<4, 4>(t);
    case 5:
      return choose_panels<5, 4>(t);
    case 6:
      return choose_panels<6, 4>(t);
  }
}

}  // namespace

TileKernel bf16_tile_avx512bf16() { return {.run = choose_rows, .max_panels = {0, 8, 8, 8, 4, 4, 4}}; }

}  // namespace weft::kernels
