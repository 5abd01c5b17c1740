// Transposing one vector-length square of 32-bit lanes, level by level: the shuffles that transposition and
// the common tree sums of kernels/cpu/attention_dots.cc share.
#if defined(WEFT_KERNELS_CPU_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_KERNELS_CPU_TRANSPOSE_INL_H_
#undef WEFT_KERNELS_CPU_TRANSPOSE_INL_H_
#else
#define WEFT_KERNELS_CPU_TRANSPOSE_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR
// Swaps the odd blocks of kDistance lanes of x with the even ones of y. Within a square, rows i and
// i + kDistance for every level are its transposition.
template <size_t kDistance>
HWY_INLINE void SwapBlocks(VF& x, VF& y) {
  const F32 d;
  const VF a = x, b = y;
  if constexpr (kDistance == 8) {
    x = hn::ConcatLowerLower(d, b, a);
    y = hn::ConcatUpperUpper(d, b, a);
  } else if constexpr (kDistance == 4) {
    x = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b), a);
    y = hn::OddEvenBlocks(b, hn::SwapAdjacentBlocks(a));
  } else if constexpr (kDistance == 2) {
    const hn::Repartition<uint64_t, F32> d64;
    const auto a64 = hn::BitCast(d64, a), b64 = hn::BitCast(d64, b);
    x = hn::BitCast(d, hn::InterleaveLower(d64, a64, b64));
    y = hn::BitCast(d, hn::InterleaveUpper(d64, a64, b64));
  } else {
    x = hn::OddEven(hn::DupEven(b), a);
    y = hn::OddEven(b, hn::DupOdd(a));
  }
}

template <size_t kDistance>
HWY_INLINE void TransposeLevel(VF (&rows)[kLanes]) {
  if constexpr (kDistance > 0) {
#pragma GCC unroll 16
    for (size_t i = 0; i < kLanes; ++i) {
      if ((i & kDistance) == 0) SwapBlocks<kDistance>(rows[i], rows[i + kDistance]);
    }
    TransposeLevel<kDistance / 2>(rows);
  }
}
#endif

// rows[i] lane j becomes rows[j] lane i.
HWY_INLINE void Transpose(VF (&rows)[kLanes]) {
#if HWY_TARGET != HWY_SCALAR
  TransposeLevel<kLanes / 2>(rows);
#else
  (void)rows;
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
