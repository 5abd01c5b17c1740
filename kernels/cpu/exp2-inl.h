// The one exp2 of this library, over lanes: x = n + f, n = rint(x), 2^x = 2^f · 2^n. Every lane sees the same
// operations whatever the lane count or instruction set, so scalar and vector results have the same bits.
//
// 2^f on [−0.5, 0.5] is 1 + f·(polynomial of degree 5), Horner, fused multiply-adds: exact at integers; the
// polynomial's own error is below 2^-27, the total within 2 ulp (kernels/elementwise_test tries every float).
#if defined(WEFT_KERNELS_CPU_EXP2_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_KERNELS_CPU_EXP2_INL_H_
#undef WEFT_KERNELS_CPU_EXP2_INL_H_
#else
#define WEFT_KERNELS_CPU_EXP2_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {

// 2^f for f in [−0.5, 0.5].
template <class V>
HWY_INLINE V Exp2Fraction(V f) {
  const hn::DFromV<V> d;
  V p = hn::Set(d, 0x1.44138ap-13f);
  p = Fma(p, f, hn::Set(d, 0x1.5f089p-10f));
  p = Fma(p, f, hn::Set(d, 0x1.3b2a54p-7f));
  p = Fma(p, f, hn::Set(d, 0x1.c6af6cp-5f));
  p = Fma(p, f, hn::Set(d, 0x1.ebfbep-3f));
  p = Fma(p, f, hn::Set(d, 0x1.62e43p-1f));
  return Fma(p, f, hn::Set(d, 1.0f));
}

// 2^n as a float for integer lanes n: 0 below −126, infinity above 127. Exact.
template <class VI, class D = hn::Rebind<float, hn::DFromV<VI>>>
HWY_INLINE hn::Vec<D> PowerOfTwo(VI n) {
  const hn::DFromV<VI> di;
  const VI clamped = hn::Min(hn::Max(n, hn::Set(di, -127)), hn::Set(di, 128));
  return hn::BitCast(D(), hn::ShiftLeft<23>(hn::Add(clamped, hn::Set(di, 127))));
}

// 2^x: 0 below −126, infinity from 127.5 up, NaN for NaN.
template <class V>
HWY_INLINE V Exp2(V x) {
  const hn::DFromV<V> d;
  // The clamp keeps the conversion to integers in range; NaN stays NaN through f.
  const V clamped = hn::Min(hn::Max(x, hn::Set(d, -127.0f)), hn::Set(d, 128.0f));
  const V n = hn::Round(clamped);
  const V scaled = hn::Mul(Exp2Fraction(hn::Sub(clamped, n)), PowerOfTwo(hn::NearestInt(clamped)));
  // Without this, −126.5 … −126 would give denormals wherever flush-to-zero is off.
  const V flushed = hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -126.0f)), scaled);
  return hn::IfThenElse(hn::Eq(x, x), flushed, x);
}

}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
