#include "kernels/fp8_rows.h"

#include "kernels/cpu/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/fp8_rows.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "kernels/cpu/lanes-inl.h"
#include "kernels/fp8.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {
namespace {

constexpr int64_t kStep = static_cast<int64_t>(kLanes);

HWY_INLINE VU U(uint32_t value) { return hn::Set(U32(), value); }
HWY_INLINE VF AsFloat(VU bits) { return hn::BitCast(F32(), bits); }
HWY_INLINE VU AsBits(VF value) { return hn::BitCast(U32(), value); }

// f32_to_e4m3() of x / scale, in the low byte.
HWY_INLINE VU Encode(VF x, VF scale) {
  const VU bits = AsBits(hn::Div(x, scale));
  const VU sign = hn::And(hn::ShiftRight<24>(bits), U(0x80));
  const VU all = hn::And(bits, U(0x7fffffff));
  const VU size = hn::Min(all, AsBits(hn::Set(F32(), kE4m3Max)));
  const VU small = hn::Sub(AsBits(hn::Add(AsFloat(size), hn::Set(F32(), 0x1p14f))), U(0x46800000));
  const VU rounding = hn::Add(hn::And(hn::ShiftRight<20>(size), U(1)), U(0x7ffff));
  const VU normal = hn::Sub(hn::ShiftRight<20>(hn::Add(size, rounding)), U(120 << 3));
  VU code = hn::IfThenElse(hn::Lt(size, AsBits(hn::Set(F32(), 0x1p-6f))), small, normal);
  code = hn::IfThenElse(hn::Lt(all, U(0x7f800000)), code, U(0x7f));
  return hn::Or(code, sign);
}

void EncodeRow(const float* in, int64_t count, float scale, uint8_t* out) {
  const hn::Rebind<uint8_t, U32> d8;
  const VF s = hn::Set(F32(), scale);
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const VU codes = Encode(hn::LoadU(F32(), in + i), s);
    hn::StoreU(hn::DemoteTo(d8, hn::BitCast(I32(), codes)), d8, out + i);
  }
  for (; i < count; ++i) out[i] = f32_to_e4m3(in[i] / scale);
}

#if HWY_TARGET != HWY_SCALAR
// Whole vectors from element i on, as many as there are; returns the next i. By integers alone: a normal
// value keeps its fraction and gets another exponent, of the eight others a table holds the result.
template <class D>
HWY_INLINE int64_t DecodeVectors(D d, const uint8_t* in, int64_t i, int64_t count, uint16_t exponent,
                                 uint16_t* out) {
  const hn::Rebind<uint8_t, D> d8;
  const hn::Repartition<uint8_t, D> bytes;
  // 0, 1, … 7 · 2⁻⁹
  alignas(16) static constexpr uint16_t kBelowNormal[8] = {0,      0x3b00, 0x3b80, 0x3bc0,
                                                           0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const auto plain = hn::LoadDup128(d, kBelowNormal);
  const auto scaled = hn::Add(plain, hn::Set(d, exponent));
  const auto table = hn::BitCast(bytes, hn::IfThenZeroElse(hn::Eq(plain, hn::Zero(d)), scaled));
  const auto offset = hn::Set(d, static_cast<uint16_t>((120 << 7) + exponent));
  constexpr auto kWidth = static_cast<int64_t>(hn::MaxLanes(d));
  for (; i + kWidth <= count; i += kWidth) {
    const auto code = hn::PromoteTo(d, hn::LoadU(d8, in + i));
    const auto size = hn::And(code, hn::Set(d, 0x7f));
    const auto normal = hn::Add(hn::ShiftLeft<4>(size), offset);
    // Bytes 2 · code and 2 · code + 1 of the table.
    const auto low = hn::ShiftLeft<1>(hn::And(code, hn::Set(d, 7)));
    const auto index = hn::Add(hn::Or(low, hn::ShiftLeft<8>(low)), hn::Set(d, 0x0100));
    const auto small = hn::BitCast(d, hn::TableLookupBytes(table, hn::BitCast(bytes, index)));
    auto value = hn::IfThenElse(hn::Lt(size, hn::Set(d, 8)), small, normal);
    value = hn::IfThenElse(hn::Eq(size, hn::Set(d, 0x7f)), hn::Set(d, 0x7fc0), value);
    hn::StoreU(hn::Or(value, hn::ShiftLeft<8>(hn::Xor(code, size))), d, out + i);
  }
  return i;
}
#endif

void DecodeRow(const uint8_t* in, int64_t count, float scale, uint16_t* out) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const auto exponent = static_cast<uint16_t>((std::bit_cast<uint32_t>(scale) >> 16) - (127u << 7));
  i = DecodeVectors(hn::CappedTag<uint16_t, 32>(), in, i, count, exponent, out);
  i = DecodeVectors(hn::CappedTag<uint16_t, 8>(), in, i, count, exponent, out);
#endif
  for (; i < count; ++i) {
    out[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(e4m3_to_f32(in[i]) * scale) >> 16);
  }
}

float FiniteMax(const float* in, int64_t count) {
  VU largest = U(0);
  for (int64_t i = 0; i < count; i += kStep) {
    const VU size = hn::And(AsBits(LoadPart(F32(), in + i, count - i)), U(0x7fffffff));
    largest = hn::Max(largest, hn::IfThenElse(hn::Lt(size, U(0x7f800000)), size, U(0)));
  }
  return std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(U32(), largest)));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(EncodeRow);
HWY_EXPORT(DecodeRow);
HWY_EXPORT(FiniteMax);

void encode_e4m3(const float* in, int64_t count, float scale, uint8_t* out) {
  HWY_DYNAMIC_DISPATCH(EncodeRow)(in, count, scale, out);
}

void decode_e4m3(const uint8_t* in, int64_t count, float scale, uint16_t* out) {
  have_byte_permutes() ? decode_e4m3_avx512vbmi(in, count, scale, out)
                       : HWY_DYNAMIC_DISPATCH(DecodeRow)(in, count, scale, out);
}

float finite_max(const float* in, int64_t count) { return HWY_DYNAMIC_DISPATCH(FiniteMax)(in, count); }

float quantise_e4m3(const float* in, int64_t count, bool power_of_two, uint8_t* out) {
  const float scale = fp8_scale(finite_max(in, count), power_of_two);
  encode_e4m3(in, count, scale, out);
  return scale;
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
