// Decoding by lanes of 16 outputs, for every instruction set.
#include "kernels/cpu/decode.h"

#include <cstring>

#include "kernels/cpu/dispatch.h"
#include "kernels/gemm.h"
#include "kernels/quantised_panel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/decode.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "kernels/cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {

constexpr int64_t kL = static_cast<int64_t>(kLanes);
constexpr int64_t kV = static_cast<int64_t>(kVectorsPer16);

// A sign, an exponent of this bias and `kFraction` bits, to float32; no code is taken for NaN or infinity.
template <int kFraction, int kBias, int kSignBit>
HWY_INLINE VF SmallFloat(VU code) {
  const U32 du;
  const VU size = hn::And(code, hn::Set(du, (1u << kSignBit) - 1));
  const VU normal = hn::Add(hn::ShiftLeft<23 - kFraction>(size), hn::Set(du, uint32_t{127 - kBias} << 23));
  constexpr float kUnit = kBias == 1 ? 0.5f : 0x1p-9f;  // of the subnormals: 2^(1 − bias − fraction)
  const auto integer = hn::BitCast(I32(), size);
  const VF small = hn::Mul(hn::ConvertTo(F32(), integer), hn::Set(F32(), kUnit));
  const auto is_small = hn::RebindMask(F32(), hn::Lt(integer, hn::Set(I32(), 1 << kFraction)));
  const VF value = hn::IfThenElse(is_small, small, hn::BitCast(F32(), normal));
  const VU sign = hn::ShiftLeft<31 - kSignBit>(hn::And(code, hn::Set(du, 1u << kSignBit)));
  return hn::BitCast(F32(), hn::Or(hn::BitCast(du, value), sign));
}
HWY_INLINE VF E4m3(VU code) { return SmallFloat<3, 7, 7>(code); }

// The lower four bits of each lane.
HWY_INLINE VF E2m1(VU code) {
#if HWY_TARGET == HWY_AVX3
  HWY_ALIGN static constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                                  -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  const VU low = hn::And(code, hn::Set(U32(), 15u));
  return hn::TableLookupLanes(hn::Load(F32(), kValues), hn::IndicesFromVec(F32(), low));
#else
  return SmallFloat<1, 1, 3>(code);
#endif
}

HWY_INLINE VU Bytes(const std::byte* from) {
  const hn::Rebind<uint8_t, U32> d8;
  return hn::PromoteTo(U32(), hn::LoadU(d8, reinterpret_cast<const uint8_t*>(from)));
}

// Exact where the lower halves are zero, as they are in all that is decoded here.
HWY_INLINE VU Bf16Pair(VF even, VF odd) {
  return hn::Or(hn::ShiftRight<16>(hn::BitCast(U32(), even)), hn::BitCast(U32(), odd));
}

HWY_INLINE const std::byte* Codes(const std::byte* record) { return record + QuantisedPanel::kScaleBytes; }

// Four k of each output in 32 bits, in the order 0, 2, 1, 3; Store takes the first k, the outputs and the
// values.
template <class Store>
HWY_INLINE void Fp8(const std::byte* record, int64_t begin, int64_t end, Store store) {
  const uint32_t* codes = reinterpret_cast<const uint32_t*>(Codes(record));
  for (int64_t k = begin; k < end; k += 4) {
    for (int64_t v = 0; v < kV; ++v) {
      const VU four = hn::LoadU(U32(), codes + k * 4 + v * kL);
      store(k - begin, v * kL, E4m3(four), E4m3(hn::ShiftRight<16>(four)), E4m3(hn::ShiftRight<8>(four)),
            E4m3(hn::ShiftRight<24>(four)));
    }
  }
}

void Fp8ToF32(const std::byte* record, int64_t begin, int64_t end, void* out) {
  float* to = static_cast<float*>(out);
  Fp8(record, begin, end, [&](int64_t k, int64_t o, VF k0, VF k1, VF k2, VF k3) HWY_ATTR {
    hn::StoreU(k0, F32(), to + k * 16 + o);
    hn::StoreU(k1, F32(), to + (k + 1) * 16 + o);
    hn::StoreU(k2, F32(), to + (k + 2) * 16 + o);
    hn::StoreU(k3, F32(), to + (k + 3) * 16 + o);
  });
}

void Fp8ToBf16(const std::byte* record, int64_t begin, int64_t end, void* out) {
  uint32_t* to = static_cast<uint32_t*>(out);
  Fp8(record, begin, end, [&](int64_t k, int64_t o, VF k0, VF k1, VF k2, VF k3) HWY_ATTR {
    hn::StoreU(Bf16Pair(k0, k1), U32(), to + k / 2 * 16 + o);
    hn::StoreU(Bf16Pair(k2, k3), U32(), to + (k / 2 + 1) * 16 + o);
  });
}

// The scale of a block of FP4 codes: five bits of exponent, three of fraction, no sign.
HWY_INLINE VF BlockScale(VU byte) {
  return hn::BitCast(F32(), hn::Add(hn::ShiftLeft<20>(byte), hn::Set(U32(), (127u - 9) << 23)));
}

// Of 64 bytes of FP4 codes those of outputs [v · kL, (v + 1) · kL): for two pairs of k the byte of the even
// one, and above it that of the odd one.
HWY_INLINE void Fp4Pairs(const std::byte* codes, int64_t v, VU (&pairs)[2]) {
#if HWY_TARGET == HWY_SCALAR
  const auto* bytes = reinterpret_cast<const uint8_t*>(codes) + v / 4 * 16 + v % 4 * 2;
  for (int i = 0; i < 2; ++i) {
    pairs[i] = hn::Set(U32(), static_cast<uint32_t>(bytes[i * 8] | bytes[i * 8 + 1] << 8));
  }
#else
  const hn::Repartition<uint16_t, U32> d;
  const auto words = hn::LoadU(d, reinterpret_cast<const uint16_t*>(codes) + v * kL * 2);
  pairs[0] = hn::BitCast(U32(), hn::InterleaveLower(d, words, hn::Zero(d)));
  pairs[1] = hn::BitCast(U32(), hn::InterleaveUpper(d, words, hn::Zero(d)));
#endif
}

// The upper or the lower code of the lowest byte, as E2m1() takes it.
HWY_INLINE VU Fp4Code(VU byte, bool lower) {
  if (lower) return hn::ShiftRight<3>(byte);
  return hn::Or(hn::And(byte, hn::Set(U32(), 7u)), hn::And(hn::ShiftRight<4>(byte), hn::Set(U32(), 8u)));
}

// Sixteen k share the scales of their outputs; Store takes the first k of a pair, the outputs and the values.
template <class Store>
HWY_INLINE void Fp4(const std::byte* record, int64_t begin, int64_t end, Store store) {
  for (int64_t k = begin; k < end; k += 16) {
    for (int64_t v = 0; v < kV; ++v) {
      const VF scale = BlockScale(Bytes(record + k + v * kL));
      for (int64_t half = 0; half < 2; ++half) {
        VU pairs[2];
        Fp4Pairs(Codes(record) + k * 8 + half * 64, v, pairs);
        for (const bool lower : {false, true}) {
          for (int64_t i = 0; i < 2; ++i) {
            const VU odd = hn::ShiftRight<8>(pairs[i]);
            store(k - begin + half * 8 + (lower ? 4 : 0) + i * 2, v * kL,
                  hn::Mul(E2m1(Fp4Code(pairs[i], lower)), scale), hn::Mul(E2m1(Fp4Code(odd, lower)), scale));
          }
        }
      }
    }
  }
}

void Fp4ToF32(const std::byte* record, int64_t begin, int64_t end, void* out) {
  float* to = static_cast<float*>(out);
  Fp4(record, begin, end, [&](int64_t k, int64_t o, VF even, VF odd) HWY_ATTR {
    hn::StoreU(even, F32(), to + k * 16 + o);
    hn::StoreU(odd, F32(), to + (k + 1) * 16 + o);
  });
}

void Fp4ToBf16(const std::byte* record, int64_t begin, int64_t end, void* out) {
  uint32_t* to = static_cast<uint32_t*>(out);
  Fp4(record, begin, end, [&](int64_t k, int64_t o, VF even, VF odd) HWY_ATTR {
    hn::StoreU(Bf16Pair(even, odd), U32(), to + k / 2 * 16 + o);
  });
}

DecodeRecord Decoder(PanelFormat format, DType dtype) {
  const bool bf16 = dtype == DType::kBF16;
  if (format == PanelFormat::kFp4) return bf16 ? Fp4ToBf16 : Fp4ToF32;
  return bf16 ? Fp8ToBf16 : Fp8ToF32;
}

}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(Decoder);

DecodeRecord decode_record(PanelFormat format, DType dtype) {
  if (dtype == DType::kBF16 && have_byte_permutes()) {
    return format == PanelFormat::kFp8 ? decode_fp8_avx512vbmi : decode_fp4_avx512vbmi;
  }
  return HWY_DYNAMIC_DISPATCH(Decoder)(format, dtype);
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
