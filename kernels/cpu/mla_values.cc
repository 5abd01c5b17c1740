#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/mla_values.cc"
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/bf16.h"
#include "kernels/cpu/bf16-inl.h"
#include "kernels/cpu/exp2-inl.h"
#include "kernels/cpu/lanes-inl.h"
#include "kernels/cpu/mla_values.h"
#include "kernels/mla_attention.h"

#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {
namespace {

constexpr float kExponentMax = 0x1p20f;

HWY_INLINE VF ClampExponent(VF t) {
  return hn::Min(hn::Max(t, hn::Set(F32(), -kExponentMax)), hn::Set(F32(), kExponentMax));
}

// 2^difference for a difference of two m: exact, 0 below −126.
float Power(int64_t difference) {
  const hn::CappedTag<int32_t, 1> di;
  return hn::GetLane(PowerOfTwo(hn::Set(di, static_cast<int32_t>(difference))));
}

float GroupWeights(float* scores, int64_t count, int32_t& m) {
  const F32 d;
  const int64_t lanes = static_cast<int64_t>(kLanes);
  // Whole vectors: the last score repeated changes no maximum, and its weights are not read.
  const int64_t padded = (count + lanes - 1) / lanes * lanes;
  for (int64_t i = count; i < padded; ++i) scores[i] = scores[count - 1];

  VF largest = hn::Set(d, -kExponentMax);
  for (int64_t i = 0; i < padded; i += lanes) {
    largest = hn::Max(largest, hn::Round(ClampExponent(hn::LoadU(d, scores + i))));
  }
  const auto top = static_cast<int32_t>(hn::GetLane(hn::MaxOfLanes(d, largest)));
  const int32_t before = m;
  if (top > m) m = top;  // kEmptyPartial is below every n

  const VF reference = hn::Set(d, static_cast<float>(m));
  for (int64_t i = 0; i < padded; i += lanes) {
    const VF t = hn::LoadU(d, scores + i);
    const VF clamped = ClampExponent(t);
    const VF n = hn::Round(clamped);
    const VF power = PowerOfTwo(hn::NearestInt(hn::Sub(n, reference)));
    const VF p = hn::Mul(Exp2Fraction(hn::Sub(clamped, n)), power);
    hn::StoreU(hn::IfThenElse(hn::Eq(t, t), p, t), d, scores + i);  // NaN stays NaN
  }
  return before == kEmptyPartial ? 1.0f : Power(int64_t{before} - m);
}

// o of kHeads heads at dimensions [at, at + kVectors vectors), over all entries; with kSum also l.
template <int kHeads, int kVectors, bool kSum, class D>
HWY_INLINE void ValueTile(D d, const GroupValues& group, int64_t head, const float* const* rows,
                          int64_t row_offset, int64_t at) {
  using V = hn::Vec<D>;
  constexpr int64_t kWidth = static_cast<int64_t>(hn::MaxLanes(d));
  const int64_t stride = partial_words(group.latent);
  float* out = group.partials + head * stride;
  const float* weights = group.weights + head * kGroupEntries;
  V sums[kHeads][kVectors];
  V totals[kHeads];
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
    const V factor = hn::Set(d, group.factors[head + h]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[h][v] = hn::Mul(hn::LoadU(d, out + h * stride + at + v * kWidth), factor);
    }
    if (kSum) totals[h] = hn::Mul(hn::Set(d, out[h * stride + group.latent]), factor);
  }
  for (int64_t u = 0; u < group.entry_count; ++u) {
    const float* row = rows[u] + row_offset;
    V value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) value[v] = hn::LoadU(d, row + v * kWidth);
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      const V weight = hn::Set(d, weights[h * kGroupEntries + u]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[h][v] = Fma(weight, value[v], sums[h][v]);
      if (kSum) totals[h] = hn::Add(totals[h], weight);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[h][v], d, out + h * stride + at + v * kWidth);
    if (kSum) out[h * stride + group.latent] = hn::GetLane(totals[h]);
  }
}

template <int kVectors, bool kSum, class D>
HWY_INLINE void AllHeads(D d, const GroupValues& group, const float* const* rows, int64_t row_offset,
                         int64_t at) {
  int64_t head = 0;
  for (; head + 4 <= group.heads; head += 4)
    ValueTile<4, kVectors, kSum>(d, group, head, rows, row_offset, at);
  for (; head + 2 <= group.heads; head += 2)
    ValueTile<2, kVectors, kSum>(d, group, head, rows, row_offset, at);
  if (head < group.heads) ValueTile<1, kVectors, kSum>(d, group, head, rows, row_offset, at);
}

// Adds dimensions [at, at + kVectors vectors). bf16 values are widened once for all heads.
template <int kVectors, class D>
HWY_INLINE void AddSlice(D d, const GroupValues& group, int64_t at) {
  constexpr int64_t kWidth = kVectors * static_cast<int64_t>(hn::MaxLanes(d));
  const float* rows[kGroupEntries];
  alignas(64) float widened[kGroupEntries * kWidth];
  int64_t offset = at;
  if (group.dtype == DType::kF32) {
    for (int64_t u = 0; u < group.entry_count; ++u) rows[u] = static_cast<const float*>(group.entries[u]);
  } else {
    const hn::RebindToUnsigned<D> du;
    const hn::Rebind<uint16_t, D> du16;
    for (int64_t u = 0; u < group.entry_count; ++u) {
      const uint16_t* from = static_cast<const uint16_t*>(group.entries[u]) + at;
      rows[u] = widened + u * kWidth;
      for (int64_t i = 0; i < kWidth; i += static_cast<int64_t>(hn::MaxLanes(d))) {
        const auto bits = hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(du16, from + i)));
        hn::Store(hn::BitCast(d, bits), d, widened + u * kWidth + i);
      }
    }
    offset = 0;
  }
  if (at == 0) {
    AllHeads<kVectors, true>(d, group, rows, offset, at);
  } else {
    AllHeads<kVectors, false>(d, group, rows, offset, at);
  }
}

void AddValues(const GroupValues& group) {
  // 4 heads × 4 vectors of AVX-512 with 4 values, 1 weight and 4 sums of weights: 29 of 32 registers; AVX2
  // has 16.
  constexpr int kVectors = HWY_TARGET == HWY_AVX3 ? 4 : 2;
  constexpr int64_t kLanes64 = static_cast<int64_t>(kLanes);
  int64_t at = 0;
  for (; at + kVectors * kLanes64 <= group.latent; at += kVectors * kLanes64)
    AddSlice<kVectors>(F32(), group, at);
  for (; at + kLanes64 <= group.latent; at += kLanes64) AddSlice<1>(F32(), group, at);
  for (; at < group.latent; ++at) AddSlice<1>(hn::CappedTag<float, 1>(), group, at);
}

// a · fa + b · fb, three roundings at most; one factor is 1.
void AddScaled(float* a, float fa, const float* b, float fb, int64_t count) {
  const F32 d;
  for (int64_t i = 0; i < count; i += static_cast<int64_t>(kLanes)) {
    const VF x = hn::Mul(LoadPart(d, a + i, count - i), hn::Set(d, fa));
    const VF y = hn::Mul(LoadPart(d, b + i, count - i), hn::Set(d, fb));
    StorePart(hn::Add(x, y), d, a + i, count - i);
  }
}

void Divide(const float* from, float by, int64_t count, float* out) {
  const F32 d;
  for (int64_t i = 0; i < count; i += static_cast<int64_t>(kLanes)) {
    StorePart(hn::Div(LoadPart(d, from + i, count - i), hn::Set(d, by)), d, out + i, count - i);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(GroupWeights);
HWY_EXPORT(AddValues);
HWY_EXPORT(AddScaled);
HWY_EXPORT(Divide);
HWY_EXPORT(Power);

namespace {

int32_t m_of(const float* partial, int64_t latent) {
  int32_t m;
  std::memcpy(&m, partial + latent + 1, 4);
  return m;
}

}  // namespace

float group_weights(float* scores, int64_t count, int32_t& m) {
  return HWY_DYNAMIC_DISPATCH(GroupWeights)(scores, count, m);
}

void add_values(const GroupValues& group) { HWY_DYNAMIC_DISPATCH(AddValues)(group); }

void merge_partial(float* a, const float* b, int64_t latent) {
  const int32_t ma = m_of(a, latent), mb = m_of(b, latent);
  if (mb == kEmptyPartial) return;
  if (ma == kEmptyPartial) {
    std::memcpy(a, b, static_cast<size_t>(partial_words(latent)) * 4);
    return;
  }
  const int32_t m = ma > mb ? ma : mb;
  const auto power = HWY_DYNAMIC_DISPATCH(Power);
  HWY_DYNAMIC_DISPATCH(AddScaled)
  (a, power(int64_t{ma} - m), b, power(int64_t{mb} - m), latent + 1);  // o, then l
  std::memcpy(a + latent + 1, &m, 4);
}

void merge_partials(float* partials, int64_t count, int64_t stride_words, int64_t latent) {
  if ((count & (count - 1)) != 0) {
    for (int64_t i = 1; i < count; ++i) merge_partial(partials, partials + i * stride_words, latent);
    return;
  }
  for (int64_t half = count / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) {
      merge_partial(partials + i * stride_words, partials + (i + half) * stride_words, latent);
    }
  }
}

void finish_partial(const float* partial, int64_t latent, float* out) {
  if (m_of(partial, latent) == kEmptyPartial) {
    std::memset(out, 0, static_cast<size_t>(latent) * 4);
    return;
  }
  HWY_DYNAMIC_DISPATCH(Divide)(partial, partial[latent], latent, out);
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
