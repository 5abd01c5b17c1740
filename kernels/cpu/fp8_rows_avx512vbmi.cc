// Rows of E4M3 values to bf16 by byte permutes, 64 at a time. Intrinsics only: see kernels/cpu/bf16-inl.h for
// why no other header belongs here.
#include <immintrin.h>

#include "kernels/cpu/e4m3_table.h"
#include "kernels/fp8_rows.h"

namespace weft::kernels {
namespace {

// Byte i of the low half, then byte i of the high half: the values of codes 0 … 31, and of 32 … 63.
struct Weave {
  alignas(64) unsigned char first[64], second[64];
};
consteval Weave make_weave() {
  Weave out{};
  for (unsigned i = 0; i < 64; ++i) {
    out.first[i] = static_cast<unsigned char>(i % 2 * 64 + i / 2);
    out.second[i] = static_cast<unsigned char>(out.first[i] + 32);
  }
  return out;
}
constexpr Weave kWeave = make_weave();

}  // namespace

void decode_e4m3_avx512vbmi(const uint8_t* in, int64_t count, float scale, uint16_t* out) {
  const __m512i low_a = _mm512_load_si512(kE4m3Table.low), low_b = _mm512_load_si512(kE4m3Table.low + 64);
  const __m512i high_a = _mm512_load_si512(kE4m3Table.high), high_b = _mm512_load_si512(kE4m3Table.high + 64);
  const __m512i first = _mm512_load_si512(kWeave.first), second = _mm512_load_si512(kWeave.second);
  const __m512i sign = _mm512_set1_epi8(-128), one = _mm512_set1_epi8(1), below_nan = _mm512_set1_epi8(126);
  // What the scale, a power of two, adds to a value that is neither zero nor NaN.
  int bits;
  __builtin_memcpy(&bits, &scale, 4);
  const __m512i exponent = _mm512_set1_epi16(static_cast<short>((bits >> 16) - (127 << 7)));
  for (int64_t i = 0; i < count; i += 64) {
    const int64_t left = count - i < 64 ? count - i : 64;
    const __mmask64 here = left == 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
    const __m512i codes = _mm512_maskz_loadu_epi8(here, in + i);
    const __m512i low = _mm512_permutex2var_epi8(low_a, codes, low_b);
    __m512i high = _mm512_permutex2var_epi8(high_a, codes, high_b);
    high = _mm512_ternarylogic_epi64(high, codes, sign, 0xf8);                 // a | (b & c)
    const __m512i sizes = _mm512_ternarylogic_epi64(codes, sign, sign, 0x30);  // a & ~b
    const __mmask64 scaled = _mm512_cmplt_epu8_mask(_mm512_sub_epi8(sizes, one), below_nan);
    __m512i values = _mm512_permutex2var_epi8(low, first, high);
    values = _mm512_mask_add_epi16(values, static_cast<__mmask32>(scaled), values, exponent);
    _mm512_mask_storeu_epi16(out + i, static_cast<__mmask32>(here), values);
    if (left <= 32) continue;
    values = _mm512_permutex2var_epi8(low, second, high);
    values = _mm512_mask_add_epi16(values, static_cast<__mmask32>(scaled >> 32), values, exponent);
    _mm512_mask_storeu_epi16(out + i + 32, static_cast<__mmask32>(here >> 32), values);
  }
}

}  // namespace weft::kernels
