// float32 ↔ bf16 by lanes; the rounding is that of kernels/bf16.h, bit for bit.
#include <cstring>

#include "kernels/gemm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/convert.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "kernels/bf16.h"
#include "kernels/cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {

void ToBf16(const float* in, int64_t count, uint16_t* out) {
  const I32 di;
  const hn::Rebind<uint16_t, I32> du16;
  const auto one = hn::Set(di, 1);
  int64_t i = 0;
  for (; i + static_cast<int64_t>(kLanes) <= count; i += static_cast<int64_t>(kLanes)) {
    const auto value = hn::LoadU(F32(), in + i);
    const auto bits = hn::BitCast(U32(), value);
    const auto half = hn::ShiftRight<16>(bits);
    const auto rounding = hn::Add(hn::And(half, hn::BitCast(U32(), one)), hn::Set(U32(), 0x7fffu));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, rounding));
    const auto quiet = hn::Or(half, hn::Set(U32(), 0x40u));
    const auto is_number = hn::RebindMask(U32(), hn::Eq(value, value));
    // Below 2^16, so the saturating narrowing keeps the bits.
    hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, hn::IfThenElse(is_number, rounded, quiet))), du16, out + i);
  }
  for (; i < count; ++i) out[i] = f32_to_bf16(in[i]);
}

void FromBf16(const uint16_t* in, int64_t count, float* out) {
  const hn::Rebind<uint16_t, U32> du16;
  int64_t i = 0;
  for (; i + static_cast<int64_t>(kLanes) <= count; i += static_cast<int64_t>(kLanes)) {
    const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(du16, in + i)));
    hn::StoreU(hn::BitCast(F32(), bits), F32(), out + i);
  }
  for (; i < count; ++i) out[i] = bf16_to_f32(in[i]);
}

}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(ToBf16);
HWY_EXPORT(FromBf16);

void convert(const float* in, int64_t count, DType dtype, void* out) {
  if (dtype == DType::kF32) {
    if (in != out) std::memmove(out, in, static_cast<size_t>(count) * sizeof(float));
  } else {
    HWY_DYNAMIC_DISPATCH(ToBf16)(in, count, static_cast<uint16_t*>(out));
  }
}

void convert_to_f32(const void* in, DType dtype, int64_t count, float* out) {
  if (dtype == DType::kF32) {
    if (in != out) std::memmove(out, in, static_cast<size_t>(count) * sizeof(float));
  } else {
    HWY_DYNAMIC_DISPATCH(FromBf16)(static_cast<const uint16_t*>(in), count, out);
  }
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
