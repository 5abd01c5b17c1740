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

// Sixteen k share the scales of their outputs.
template <class Store>
HWY_INLINE void Fp4(const std::byte* record, int64_t begin, int64_t end, Store store) {
  for (int64_t k = begin; k < end; k += 16) {
    for (int64_t v = 0; v < kV; ++v) {
      const VF scale = E4m3(Bytes(record + k + v * kL));
      for (int64_t pair = 0; pair < 8; ++pair) {
        const VU codes = Bytes(Codes(record) + (k / 2 + pair) * 16 + v * kL);
        store(k - begin + pair * 2, v * kL, hn::Mul(E2m1(codes), scale),
              hn::Mul(E2m1(hn::ShiftRight<4>(codes)), scale));
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
  if (format == PanelFormat::kFp8 && dtype == DType::kBF16 && have_byte_permutes())
    return decode_fp8_avx512vbmi;
  return HWY_DYNAMIC_DISPATCH(Decoder)(format, dtype);
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
