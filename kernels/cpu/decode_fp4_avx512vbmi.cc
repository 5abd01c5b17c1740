// FP4 to bf16 by byte permutes: both bytes of the product of a size (E2M1) and its block's scale are looked
// up among 128, by the size, the scale's fraction and the last bit of its exponent; the rest of the exponent
// is subtracted from the high bytes, where it is whole units; then the sign is put in. Zeros stay zeros, for
// they are below whatever is subtracted. Intrinsics only: see kernels/cpu/bf16-inl.h for why no other header
// belongs here.
#include <immintrin.h>

#include "kernels/cpu/decode.h"

namespace weft::kernels {
namespace {

constexpr long kRecordBytes = 64 + 64 * 8;
constexpr long kAheadRecords = 4;  // fetched early

// bf16 of size · (1 + fraction / 8) · 2^(21 + last bit of the exponent): the largest exponents there are.
constexpr unsigned product(unsigned size, unsigned exponent_bit, unsigned fraction) {
  if (size == 0) return 0;
  // 1, 1.5 times a power of two, the smallest a half.
  const unsigned halves = size == 1 ? 2 : 2 + size % 2, power = size == 1 ? 0 : size / 2;
  unsigned sixteenths = (8 + fraction) * halves;
  unsigned exponent = 127 + 21 + exponent_bit + power - 1;
  if (sixteenths >= 32) return ((exponent + 1) << 7) + (sixteenths - 32) * 4;
  return (exponent << 7) + (sixteenths - 16) * 8;
}

struct Table {
  alignas(64) unsigned char low[128], high[128];
};
// The scale's four bits sit above the size where a code is an upper one, below it where it is a lower one.
constexpr Table make_table(bool lower) {
  Table out{};
  for (unsigned i = 0; i < 128; ++i) {
    const unsigned size = lower ? i >> 4 : i & 7u, scale = lower ? i & 15u : i >> 3;
    const unsigned value = product(size, scale >> 3, scale & 7u);
    out.low[i] = static_cast<unsigned char>(value & 255u);
    out.high[i] = static_cast<unsigned char>(value >> 8);
  }
  return out;
}
constexpr Table kUpper = make_table(false), kLower = make_table(true);

// To each byte of codes its output's scale: bytes 2 · (output mod 4) and the next of either half of 128 bits.
struct Spread {
  alignas(64) unsigned char from[64];
};
constexpr Spread make_spread() {
  Spread out{};
  for (unsigned i = 0; i < 64; ++i) out.from[i] = static_cast<unsigned char>(i / 16 * 4 + i % 8 / 2);
  return out;
}
constexpr Spread kSpread = make_spread();

struct Lookup {
  __m512i low_a, low_b, high_a, high_b;
  explicit Lookup(const Table& table)
      : low_a(_mm512_load_si512(table.low)),
        low_b(_mm512_load_si512(table.low + 64)),
        high_a(_mm512_load_si512(table.high)),
        high_b(_mm512_load_si512(table.high + 64)) {}
  // `codes`: signs in the bits 7. Pairs of k, the first and the second.
  void operator()(__m512i index, __m512i codes, __m512i below, __m512i& first, __m512i& second) const {
    const __m512i low = _mm512_permutex2var_epi8(low_a, index, low_b);
    __m512i high = _mm512_subs_epu8(_mm512_permutex2var_epi8(high_a, index, high_b), below);
    high = _mm512_ternarylogic_epi64(high, codes, _mm512_set1_epi8(-128), 0xf8);  // a | (b & c)
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
  }
};

struct Decoder {
  Lookup upper{kUpper}, lower{kLower};

  // The scales of a block in every byte of codes: as they are, moved up three bits, and what the exponents
  // are below the table's.
  struct Block {
    __m512i scales, moved, below;
    explicit Block(const char* from) {
      // Masked, and no andnot below: the plain forms draw false warnings from GCC 12's own header.
      const __m512i all =
          _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
      scales = _mm512_shuffle_epi8(all, _mm512_load_si512(kSpread.from));
      moved = _mm512_slli_epi16(scales, 3);
      below = _mm512_and_si512(_mm512_srli_epi16(_mm512_xor_si512(scales, _mm512_set1_epi8(-1)), 4),
                               _mm512_set1_epi8(15));
    }
  };

  // 64 bytes of codes: four pairs of k.
  void operator()(const char* from, const Block& block, __m512i (&pairs)[4]) const {
    const __m512i codes = _mm512_loadu_si512(from);
    const __m512i twice = _mm512_add_epi8(codes, codes);
    constexpr int kChoose = 0xca;  // a ? b : c
    upper(_mm512_ternarylogic_epi64(_mm512_set1_epi8(0x78), block.moved, codes, kChoose), codes, block.below,
          pairs[0], pairs[1]);
    lower(_mm512_ternarylogic_epi64(_mm512_set1_epi8(0x0f), block.scales, twice, kChoose), twice, block.below,
          pairs[2], pairs[3]);
  }
};

__m512bh pair_at(const char* from) {
  int word;
  __builtin_memcpy(&word, from, 4);
  return reinterpret_cast<__m512bh>(_mm512_set1_epi32(word));
}

template <int R, int P>
void run_stream(const QuantisedStream& s) {
  const Decoder decode;
  __m512 sums[R][P];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) sums[r][p] = _mm512_setzero_ps();
  }
  const char* w[P];
  for (int p = 0; p < P; ++p) w[p] = reinterpret_cast<const char*>(s.w[p]) + 64;
  const char* x = s.x;
  for (long k = s.k_begin; k < s.k_end; k += 16, x += 32) {
    const long record = k / 64 * kRecordBytes, block = k % 64;
    if (block == 0) {
      for (int p = 0; p < P; ++p) _mm_prefetch(w[p] + record + kAheadRecords * kRecordBytes, _MM_HINT_T0);
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const Decoder::Block scales(w[p] + record + block);
      const char* codes = w[p] + record + 64 + block * 8;
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        _mm_prefetch(codes + half * 64 + kAheadRecords * kRecordBytes, _MM_HINT_T0);
        __m512i pairs[4];
        decode(codes + half * 64, scales, pairs);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) {
            sums[r][p] = _mm512_dpbf16_ps(sums[r][p], pair_at(x + r * s.x_stride_bytes + half * 16 + i * 4),
                                          reinterpret_cast<__m512bh>(pairs[i]));
          }
        }
      }
    }
  }
  for (int p = 0; p < P; ++p) {
    const auto mask = static_cast<__mmask16>((1u << s.columns[p]) - 1u);
    const __m512 scales = _mm512_loadu_ps(w[p] - 64);
    for (int r = 0; r < R; ++r) {
      _mm512_mask_storeu_ps(s.y[p] + r * s.y_stride, mask,
                            _mm512_fmadd_ps(scales, sums[r][p], _mm512_setzero_ps()));
    }
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

void decode_fp4_avx512vbmi(const std::byte* record, int64_t begin, int64_t end, void* out) {
  const Decoder decode;
  const char* scales = reinterpret_cast<const char*>(record);
  char* to = static_cast<char*>(out);
  for (int64_t k = begin; k < end; k += 16) {
    const Decoder::Block block(scales + k);
    for (int half = 0; half < 2; ++half, to += 256) {
      __m512i pairs[4];
      decode(scales + 64 + k * 8 + half * 64, block, pairs);
      for (int i = 0; i < 4; ++i) _mm512_storeu_si512(to + i * 64, pairs[i]);
    }
  }
}

void stream_fp4_avx512vbmi(const QuantisedStream& stream) {
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
