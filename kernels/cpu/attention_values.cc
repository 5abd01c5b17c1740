#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_values.cc"
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/attention.h"
#include "kernels/bf16.h"
#include "kernels/cpu/attention_values.h"
#include "kernels/cpu/bf16-inl.h"
#include "kernels/cpu/exp2-inl.h"
#include "kernels/cpu/lanes-inl.h"

#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {
namespace {

constexpr float kExponentMax = 0x1p20f;
constexpr int64_t kPackQueries = 32;

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

// o of kQueries queries at dimensions [at, at + kVectors vectors), over all entries; with kSum also l.
template <int kQueries, int kVectors, bool kSum, class D>
HWY_INLINE void ValueTile(D d, const GroupValues& group, int64_t query, const float* const* rows,
                          int64_t row_offset, int64_t at) {
  using V = hn::Vec<D>;
  constexpr int64_t kWidth = static_cast<int64_t>(hn::MaxLanes(d));
  float* const* partials = group.partials + query;
  const float* weights = group.weights + query * kGroupEntries;
  V sums[kQueries][kVectors];
  V totals[kQueries];
#pragma GCC unroll 4
  for (int q = 0; q < kQueries; ++q) {
    const V factor = hn::Set(d, group.factors[query + q]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[q][v] = hn::Mul(hn::LoadU(d, partials[q] + at + v * kWidth), factor);
    }
    if (kSum) totals[q] = hn::Mul(hn::Set(d, partials[q][group.value_width]), factor);
  }
  for (int64_t u = 0; u < group.entry_count; ++u) {
    const float* row = rows[u] + row_offset;
    V value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) value[v] = hn::LoadU(d, row + v * kWidth);
#pragma GCC unroll 4
    for (int q = 0; q < kQueries; ++q) {
      const V weight = hn::Set(d, weights[q * kGroupEntries + u]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[q][v] = Fma(weight, value[v], sums[q][v]);
      if (kSum) totals[q] = hn::Add(totals[q], weight);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[q][v], d, partials[q] + at + v * kWidth);
    if (kSum) partials[q][group.value_width] = hn::GetLane(totals[q]);
  }
}

template <int kVectors, bool kSum, class D>
HWY_INLINE void AllQueries(D d, const GroupValues& group, const float* const* rows, int64_t row_offset,
                           int64_t at) {
  int64_t query = 0;
  for (; query + 4 <= group.queries; query += 4)
    ValueTile<4, kVectors, kSum>(d, group, query, rows, row_offset, at);
  for (; query + 2 <= group.queries; query += 2)
    ValueTile<2, kVectors, kSum>(d, group, query, rows, row_offset, at);
  if (query < group.queries) ValueTile<1, kVectors, kSum>(d, group, query, rows, row_offset, at);
}

// Adds dimensions [at, at + kVectors vectors). Values are widened once for all queries; float32 ones are
// copied if there are many: side by side they stay in the L1 cache, where entries a power of two apart push
// each other out.
template <int kVectors, class D>
HWY_INLINE void AddSlice(D d, const GroupValues& group, int64_t at) {
  constexpr int64_t kWidth = kVectors * static_cast<int64_t>(hn::MaxLanes(d));
  const float* rows[kGroupEntries];
  alignas(64) float values[kGroupEntries * kWidth];
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> du16;
  int64_t offset = group.value_offset + at;
  const bool packed = group.dtype == DType::kBF16 || group.queries >= kPackQueries;
  for (int64_t u = 0; u < group.entry_count; ++u) {
    rows[u] = packed ? values + u * kWidth : static_cast<const float*>(group.entries[u]);
    if (!packed) continue;
    float* to = values + u * kWidth;
    for (int64_t i = 0; i < kWidth; i += static_cast<int64_t>(hn::MaxLanes(d))) {
      if (group.dtype == DType::kF32) {
        hn::Store(hn::LoadU(d, static_cast<const float*>(group.entries[u]) + offset + i), d, to + i);
      } else {
        const uint16_t* from = static_cast<const uint16_t*>(group.entries[u]) + offset + i;
        hn::Store(hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(du16, from)))), d, to + i);
      }
    }
  }
  if (packed) offset = 0;
  if (at == 0) {
    AllQueries<kVectors, true>(d, group, rows, offset, at);
  } else {
    AllQueries<kVectors, false>(d, group, rows, offset, at);
  }
}

void AddValues(const GroupValues& group) {
  // 4 queries × 4 vectors of AVX-512 with 4 values, 1 weight and 4 sums of weights: 29 of 32 registers; AVX2
  // has 16.
  constexpr int kVectors = HWY_TARGET == HWY_AVX3 ? 4 : 2;
  constexpr int64_t kLanes64 = static_cast<int64_t>(kLanes);
  int64_t at = 0;
  for (; at + kVectors * kLanes64 <= group.value_width; at += kVectors * kLanes64)
    AddSlice<kVectors>(F32(), group, at);
  for (; at + kLanes64 <= group.value_width; at += kLanes64) AddSlice<1>(F32(), group, at);
  for (; at < group.value_width; ++at) AddSlice<1>(hn::CappedTag<float, 1>(), group, at);
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

int32_t m_of(const float* partial, int64_t value_width) {
  int32_t m;
  std::memcpy(&m, partial + value_width + 1, 4);
  return m;
}

}  // namespace

float group_weights(float* scores, int64_t count, int32_t& m) {
  return HWY_DYNAMIC_DISPATCH(GroupWeights)(scores, count, m);
}

void add_values(const GroupValues& group) { HWY_DYNAMIC_DISPATCH(AddValues)(group); }

void merge_partial(float* a, const float* b, int64_t value_width) {
  const int32_t ma = m_of(a, value_width), mb = m_of(b, value_width);
  if (mb == kEmptyPartial) return;
  if (ma == kEmptyPartial) {
    std::memcpy(a, b, static_cast<size_t>(partial_words(value_width)) * 4);
    return;
  }
  const int32_t m = ma > mb ? ma : mb;
  const auto power = HWY_DYNAMIC_DISPATCH(Power);
  HWY_DYNAMIC_DISPATCH(AddScaled)
  (a, power(int64_t{ma} - m), b, power(int64_t{mb} - m), value_width + 1);  // o, then l
  std::memcpy(a + value_width + 1, &m, 4);
}

void merge_partials(float* partials, int64_t count, int64_t stride_words, int64_t value_width) {
  if ((count & (count - 1)) != 0) {
    for (int64_t i = 1; i < count; ++i) merge_partial(partials, partials + i * stride_words, value_width);
    return;
  }
  for (int64_t half = count / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) {
      merge_partial(partials + i * stride_words, partials + (i + half) * stride_words, value_width);
    }
  }
}

void finish_partial(const float* partial, int64_t value_width, float* out) {
  if (m_of(partial, value_width) == kEmptyPartial) {
    std::memset(out, 0, static_cast<size_t>(value_width) * 4);
    return;
  }
  HWY_DYNAMIC_DISPATCH(Divide)(partial, partial[value_width], value_width, out);
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
