// bf16 pairs in 32-bit lanes: the element with the even index in the low half, the odd one in the high half.
//
// VDPBF16PS, by Intel's pseudo code (and as measured bit for bit on AMD Zen 5), is per 32-bit lane
//   acc = fma(a.high, b.high, acc);  acc = fma(a.low, b.low, acc)
// — the odd element first — with round to nearest even, denormal inputs read as zero and denormal results
// flushed. PairDot does the same in float32 and therefore has the same bits once flush-to-zero is on in the
// thread. Files *_avx512bf16.cc use the instruction itself; they hold intrinsics alone, because an inline
// function of a shared header compiled there could be the copy that the linker keeps for machines without
// AVX-512.
#if defined(WEFT_KERNELS_CPU_BF16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_KERNELS_CPU_BF16_INL_H_
#undef WEFT_KERNELS_CPU_BF16_INL_H_
#else
#define WEFT_KERNELS_CPU_BF16_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {

HWY_INLINE VF HighHalf(VU pairs) { return hn::BitCast(F32(), hn::And(pairs, hn::Set(U32(), 0xffff0000u))); }
HWY_INLINE VF LowHalf(VU pairs) { return hn::BitCast(F32(), hn::ShiftLeft<16>(pairs)); }

// One step of VDPBF16PS in every lane.
HWY_INLINE VF PairDot(VU a, VU b, VF accumulator) {
  return Fma(LowHalf(a), LowHalf(b), Fma(HighHalf(a), HighHalf(b), accumulator));
}

}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
