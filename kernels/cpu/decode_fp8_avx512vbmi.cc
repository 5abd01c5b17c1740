// E4M3 to bf16 by byte permutes: both bytes of a bf16 are looked up among 128 by the code without its sign,
// then woven together. Intrinsics only: see kernels/cpu/bf16-inl.h for why no other header belongs here.
#include <immintrin.h>

#include "kernels/cpu/decode.h"
#include "kernels/cpu/e4m3_table.h"

namespace weft::kernels {
namespace {

constexpr long kRecordBytes = 64 + 128 * 16;
constexpr long kAhead = 2048;  // bytes that are fetched early

// Sixteen outputs × four k, as they lie in a record, to two vectors of pairs.
struct Decoder {
  __m512i low_a = _mm512_load_si512(kE4m3Table.low), low_b = _mm512_load_si512(kE4m3Table.low + 64);
  __m512i high_a = _mm512_load_si512(kE4m3Table.high), high_b = _mm512_load_si512(kE4m3Table.high + 64);
  __m512i sign = _mm512_set1_epi8(-128), low_bytes = _mm512_set1_epi16(0xff);

  void operator()(const char* from, __m512i& first, __m512i& second) const {
    const __m512i codes = _mm512_loadu_si512(from);
    const __m512i low = _mm512_permutex2var_epi8(low_a, codes, low_b);
    __m512i high = _mm512_permutex2var_epi8(high_a, codes, high_b);
    high = _mm512_ternarylogic_epi64(high, codes, sign, 0xf8);                            // a | (b & c)
    first = _mm512_ternarylogic_epi64(low_bytes, low, _mm512_slli_epi16(high, 8), 0xca);  // a ? b : c
    second = _mm512_ternarylogic_epi64(low_bytes, _mm512_srli_epi16(low, 8), high, 0xca);
  }
};

__m512bh pair_at(const char* from) {
  int word;
  __builtin_memcpy(&word, from, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(word));
}

// y = fma(scales, sums, y or +0). Totals lie in y, so that all registers are for a block's sums.
template <int R, int P>
inline __attribute__((always_inline)) void add_block(const QuantisedStream& s, const char* const (&scales)[P],
                                                     bool first, const __m512 (&sums)[R][P]) {
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    const __m512 factor = _mm512_loadu_ps(scales[p]);
    const auto mask = static_cast<__mmask16>((1u << s.columns[p]) - 1u);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      float* y = s.y[p] + r * s.y_stride;
      const __m512 base = first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, y);
      _mm512_mask_storeu_ps(y, mask, _mm512_fmadd_ps(factor, sums[r][p], base));
    }
  }
}

template <int R, int P>
void run_stream(const QuantisedStream& s) {
  const Decoder decode;
  const char* w[P];
  for (int p = 0; p < P; ++p) w[p] = reinterpret_cast<const char*>(s.w[p]);
  for (long k = s.k_begin, end = 0; k < s.k_end; k = end) {
    const long block = k / 128;
    end = (block + 1) * 128 < s.k_end ? (block + 1) * 128 : s.k_end;
    const long record = block * kRecordBytes;
    const char* x = s.x + (k - s.k_begin) * 2;
    __m512 sums[R][P];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) sums[r][p] = _mm512_setzero_ps();
    }
    const long from = record + 64 + (k - block * 128) * 16;
    const long fours = (end - k) / 4;
    for (long i = 0; i < fours; ++i) {
      __m512i first[P], second[P];
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        _mm_prefetch(w[p] + from + i * 64 + kAhead, _MM_HINT_T0);
        decode(w[p] + from + i * 64, first[p], second[p]);
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512bh a = pair_at(x + r * s.x_stride_bytes + i * 8);
        const __m512bh b = pair_at(x + r * s.x_stride_bytes + i * 8 + 4);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) {
          sums[r][p] = _mm512_dpbf16_ps(sums[r][p], a, reinterpret_cast<__m512bh>(first[p]));
          sums[r][p] = _mm512_dpbf16_ps(sums[r][p], b, reinterpret_cast<__m512bh>(second[p]));
        }
      }
    }
    if ((end - k) % 4 != 0) {  // a last pair
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        __m512i first, second;
        decode(w[p] + from + fours * 64, first, second);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          sums[r][p] = _mm512_dpbf16_ps(sums[r][p], pair_at(x + r * s.x_stride_bytes + fours * 8),
                                        reinterpret_cast<__m512bh>(first));
        }
      }
    }
    const char* scales[P];
    for (int p = 0; p < P; ++p) scales[p] = w[p] + record;
    add_block<R, P>(s, scales, k == s.k_begin, sums);
  }
}

template <int R>
void choose_panels(const QuantisedStream& s) {
  switch (s.panels) {
    case 1:
      return run_stream<R, 1>(s);
    case 2:
      return run_stream<R, 2>(s);
    case 3:
      if constexpr (R <= 2) return run_stream<R, 3>(s);
      break;
    case 4:
      if constexpr (R <= 2) return run_stream<R, 4>(s);
      break;
  }
}

}  // namespace

void decode_fp8_avx512vbmi(const std::byte* record, int64_t begin, int64_t end, void* out) {
  const Decoder decode;
  const char* from = reinterpret_cast<const char*>(record) + 64 + begin * 16;
  char* to = static_cast<char*>(out);
  for (int64_t k = begin; k < end; k += 4, from += 64, to += 128) {
    __m512i first, second;
    decode(from, first, second);
    _mm512_storeu_si512(to, first);
    _mm512_storeu_si512(to + 64, second);
  }
}

void stream_fp8_avx512vbmi(const QuantisedStream& stream) {
  switch (stream.rows) {
    case 1:
      return choose_panels<1>(stream);
    case 2:
      return choose_panels<2>(stream);
    case 3:
      return choose_panels<3>(stream);
    case 4:
      return choose_panels<4>(stream);
    case 5:
      return choose_panels<5>(stream);
    case 6:
      return choose_panels<6>(stream);
  }
}

}  // namespace weft::kernels
