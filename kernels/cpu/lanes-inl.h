// What every Highway kernel here needs, per target: fused multiply-add everywhere, partial loads and stores,
// and the tree over 16 lanes.
//
// "16 lanes" in the contracts are logical: one AVX-512 vector, two of AVX2, sixteen scalars of the portable
// target. Kernels hold them as an array of vectors, lane i in vector i / Lanes, and no result depends on
// which it is.
#if defined(WEFT_KERNELS_CPU_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_KERNELS_CPU_LANES_INL_H_
#undef WEFT_KERNELS_CPU_LANES_INL_H_
#else
#define WEFT_KERNELS_CPU_LANES_INL_H_
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// At most 16 float lanes (AVX-512 has exactly 16); the integer twins.
using F32 = hn::CappedTag<float, 16>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using VF = hn::Vec<F32>;
using VU = hn::Vec<U32>;
inline constexpr size_t kLanes = hn::MaxLanes(F32());
inline constexpr size_t kVectorsPer16 = 16 / kLanes;

// a · b + c with one rounding. The portable target has no such instruction and Highway's MulAdd would round
// twice.
template <class V>
HWY_INLINE V Fma(V a, V b, V c) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(hn::DFromV<V>(), std::fma(hn::GetLane(a), hn::GetLane(b), hn::GetLane(c)));
#elif HWY_TARGET == HWY_EMU128
  const hn::DFromV<V> d;
  HWY_ALIGN float la[hn::MaxLanes(d)], lb[hn::MaxLanes(d)], lc[hn::MaxLanes(d)];
  hn::Store(a, d, la);
  hn::Store(b, d, lb);
  hn::Store(c, d, lc);
  for (size_t i = 0; i < hn::Lanes(d); ++i) lc[i] = std::fma(la[i], lb[i], lc[i]);
  return hn::Load(d, lc);
#else
  return hn::MulAdd(a, b, c);
#endif
}

// Lanes [0, count) from memory, zeros above; reads nothing beyond. count may be larger than the vector, or ≤
// 0.
template <class D>
HWY_INLINE hn::Vec<D> LoadPart(D d, const hn::TFromD<D>* from, int64_t count) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  if (count >= lanes) return hn::LoadU(d, from);
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  return hn::MaskedLoad(hn::FirstN(d, static_cast<size_t>(count < 0 ? 0 : count)), d, from);
#else
  HWY_ALIGN hn::TFromD<D> buffer[hn::MaxLanes(d)] = {};
  for (int64_t i = 0; i < count; ++i) buffer[i] = from[i];
  return hn::Load(d, buffer);
#endif
}

// Writes lanes [0, count) and nothing else.
template <class D>
HWY_INLINE void StorePart(hn::Vec<D> v, D d, hn::TFromD<D>* to, int64_t count) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  if (count >= lanes) {
    hn::StoreU(v, d, to);
    return;
  }
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  hn::BlendedStore(v, hn::FirstN(d, static_cast<size_t>(count < 0 ? 0 : count)), d, to);
#else
  HWY_ALIGN hn::TFromD<D> buffer[hn::MaxLanes(d)];
  hn::Store(v, d, buffer);
  for (int64_t i = 0; i < count; ++i) to[i] = buffer[i];
#endif
}

// Sum of the 16 logical lanes: lane i += lane i + 8, then + 4, + 2, + 1.
HWY_INLINE float SumLanes16(const VF* lanes) {
  HWY_ALIGN float sums[16];
  for (size_t v = 0; v < kVectorsPer16; ++v) hn::Store(lanes[v], F32(), sums + v * kLanes);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
