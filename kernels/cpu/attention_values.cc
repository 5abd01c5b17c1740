#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_values.cc"
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/attention.h"
#include "kernels/cpu/attention_values.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/exp2-inl.h"
#include "kernels/cpu/lanes-inl.h"

#include <algorithm>
#include <cstring>
#include <vector>

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

// p rounded to nearest even as bf16; NaN stays NaN.
HWY_INLINE auto RoundToBf16(VF p) {
  const U32 du;
  const auto bits = hn::BitCast(du, p);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7fff)), odd);
  const auto nan = hn::Set(du, 0x7fc00000u);
  const auto kept = hn::IfThenElse(hn::RebindMask(du, hn::Eq(p, p)), rounded, nan);
  return hn::DemoteTo(hn::Rebind<uint16_t, U32>(), hn::BitCast(I32(), hn::ShiftRight<16>(kept)));
}

float GroupWeights(DType dtype, float* scores, int64_t count, int32_t& m) {
  const F32 d;
  const int64_t lanes = static_cast<int64_t>(kLanes);
  auto* halves = reinterpret_cast<uint16_t*>(scores);
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
    const VF weight = hn::IfThenElse(hn::Eq(t, t), p, t);  // NaN stays NaN
    if (dtype == DType::kF32) {
      hn::StoreU(weight, d, scores + i);
    } else {
      hn::StoreU(RoundToBf16(weight), hn::Rebind<uint16_t, F32>(), halves + i);  // behind what is read
    }
  }
  if (dtype == DType::kBF16 && count % 2 != 0) halves[count] = 0;
  return before == kEmptyPartial ? 1.0f : Power(int64_t{before} - m);
}

// One entry a step.
struct EntryStep {
  template <class D>
  static HWY_INLINE hn::Vec<D> Run(D, hn::Vec<D> weight, hn::Vec<D> value, hn::Vec<D> sum) {
    return Fma(weight, value, sum);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> One(D d) {
    return hn::Set(d, 1.0f);
  }
};

// Two entries a step, in bf16: what VDPBF16PS does.
struct PairStep {
  template <class D>
  static HWY_INLINE hn::Vec<D> Run(D d, hn::Vec<D> weight, hn::Vec<D> value, hn::Vec<D> sum) {
    const hn::RebindToUnsigned<D> du;
    const auto w = hn::BitCast(du, weight), x = hn::BitCast(du, value);
    const auto high = hn::Set(du, 0xffff0000u);
    sum = Fma(hn::BitCast(d, hn::And(w, high)), hn::BitCast(d, hn::And(x, high)), sum);
    return Fma(hn::BitCast(d, hn::ShiftLeft<16>(w)), hn::BitCast(d, hn::ShiftLeft<16>(x)), sum);
  }
  template <class D>
  static HWY_INLINE hn::Vec<D> One(D d) {
    return hn::BitCast(d, hn::Set(hn::RebindToUnsigned<D>(), 0x3f803f80u));
  }
};

// A word of weights: a float, or a pair of bf16 that is no float to load into a register of floats by name.
template <class D>
HWY_INLINE hn::Vec<D> Broadcast(D d, const float* word) {
  uint32_t bits;
  std::memcpy(&bits, word, sizeof bits);
  return hn::BitCast(d, hn::Set(hn::RebindToUnsigned<D>(), bits));
}

// o of kQueries queries at dimensions [at, at + kVectors vectors), over `steps` rows of values; with kSum
// also l, which is added like a value that is 1 everywhere.
template <class Step, int kQueries, int kVectors, bool kSum, class D>
HWY_INLINE void ValueTile(D d, const GroupValues& group, int64_t query, const float* const* rows,
                          int64_t steps, int64_t row_offset, int64_t at) {
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
  for (int64_t u = 0; u < steps; ++u) {
    const float* row = rows[u] + row_offset;
    V value[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) value[v] = hn::LoadU(d, row + v * kWidth);
#pragma GCC unroll 4
    for (int q = 0; q < kQueries; ++q) {
      const V weight = Broadcast(d, weights + q * kGroupEntries + u);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[q][v] = Step::Run(d, weight, value[v], sums[q][v]);
      if (kSum) totals[q] = Step::Run(d, weight, Step::One(d), totals[q]);
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[q][v], d, partials[q] + at + v * kWidth);
    if (kSum) partials[q][group.value_width] = hn::GetLane(totals[q]);
  }
}

template <class Step, int kVectors, bool kSum, class D>
HWY_INLINE void AllQueries(D d, const GroupValues& group, const float* const* rows, int64_t steps,
                           int64_t row_offset, int64_t at) {
  int64_t query = 0;
  for (; query + 4 <= group.queries; query += 4)
    ValueTile<Step, 4, kVectors, kSum>(d, group, query, rows, steps, row_offset, at);
  for (; query + 2 <= group.queries; query += 2)
    ValueTile<Step, 2, kVectors, kSum>(d, group, query, rows, steps, row_offset, at);
  if (query < group.queries) ValueTile<Step, 1, kVectors, kSum>(d, group, query, rows, steps, row_offset, at);
}

template <class Step, int kVectors, class D>
HWY_INLINE void AllRows(D d, const GroupValues& group, const float* const* rows, int64_t steps,
                        int64_t row_offset, int64_t at) {
  if (at == 0) {
    AllQueries<Step, kVectors, true>(d, group, rows, steps, row_offset, at);
  } else {
    AllQueries<Step, kVectors, false>(d, group, rows, steps, row_offset, at);
  }
}

// Adds dimensions [at, at + kVectors vectors) of float32 values. They are copied if there are many queries:
// side by side they stay in the L1 cache, where entries a power of two apart push each other out.
template <int kVectors, class D>
HWY_INLINE void AddEntries(D d, const GroupValues& group, int64_t at) {
  constexpr int64_t kWidth = kVectors * static_cast<int64_t>(hn::MaxLanes(d));
  const float* rows[kGroupEntries];
  alignas(64) float values[kGroupEntries * kWidth];
  const int64_t offset = group.value_offset + at;
  const bool packed = group.queries >= kPackQueries;
  for (int64_t u = 0; u < group.entry_count; ++u) {
    const auto* from = static_cast<const float*>(group.entries[u]);
    rows[u] = packed ? values + u * kWidth : from;
    if (!packed) continue;
    for (int64_t i = 0; i < kWidth; i += static_cast<int64_t>(hn::MaxLanes(d))) {
      hn::Store(hn::LoadU(d, from + offset + i), d, values + u * kWidth + i);
    }
  }
  AllRows<EntryStep, kVectors>(d, group, rows, group.entry_count, packed ? 0 : offset, at);
}

// The same of bf16 values, two entries side by side in every lane. `native`: the slice with VDPBF16PS, or
// null.
template <int kVectors, class D>
HWY_INLINE void AddPairs(D d, const GroupValues& group, int64_t at, void (*native)(const PairSlice&)) {
  constexpr int64_t kWidth = kVectors * static_cast<int64_t>(hn::MaxLanes(d));
  const hn::RebindToUnsigned<D> du;
  const hn::Rebind<uint16_t, D> du16;
  const float* rows[kGroupEntries / 2];
  alignas(64) float values[kGroupEntries / 2 * kWidth];
  const int64_t offset = group.value_offset + at;
  const int64_t pairs = (group.entry_count + 1) / 2;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const auto* even = static_cast<const uint16_t*>(group.entries[2 * pair]) + offset;
    const bool alone = 2 * pair + 1 == group.entry_count;
    const auto* odd = alone ? even : static_cast<const uint16_t*>(group.entries[2 * pair + 1]) + offset;
    float* to = values + pair * kWidth;
    rows[pair] = to;
    for (int64_t i = 0; i < kWidth; i += static_cast<int64_t>(hn::MaxLanes(d))) {
      const auto low = hn::PromoteTo(du, hn::LoadU(du16, even + i));
      const auto high = hn::PromoteTo(du, hn::LoadU(du16, odd + i));
      const auto word = alone ? low : hn::Or(low, hn::ShiftLeft<16>(high));
      hn::Store(hn::BitCast(d, word), d, to + i);
    }
  }
  if (native != nullptr) return native({&group, values, pairs, at});
  AllRows<PairStep, kVectors>(d, group, rows, pairs, 0, at);
}

template <int kVectors, class D>
HWY_INLINE void AddSlice(D d, const GroupValues& group, int64_t at, void (*native)(const PairSlice&)) {
  if (group.dtype == DType::kF32) return AddEntries<kVectors>(d, group, at);
  AddPairs<kVectors>(d, group, at, native);
}

void AddValues(const GroupValues& group) {
  // 4 queries × 4 vectors of AVX-512 with 4 values, 1 weight and 4 sums of weights: 29 of 32 registers; AVX2
  // has 16.
  constexpr bool kAvx512 = HWY_TARGET == HWY_AVX3;
  constexpr int kVectors = kAvx512 ? 4 : 2;
  constexpr int64_t kLanes64 = static_cast<int64_t>(kLanes);
  const bool native = kAvx512 && have_bf16_dot();
  int64_t at = 0;
  for (; at + kVectors * kLanes64 <= group.value_width; at += kVectors * kLanes64)
    AddSlice<kVectors>(F32(), group, at, native ? add_pairs_64_avx512bf16 : nullptr);
  for (; at + kLanes64 <= group.value_width; at += kLanes64)
    AddSlice<1>(F32(), group, at, native ? add_pairs_16_avx512bf16 : nullptr);
  for (; at < group.value_width; ++at) AddSlice<1>(hn::CappedTag<float, 1>(), group, at, nullptr);
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

// A vector of the merge of kCount partials, `stride` apart from `first` on, in the tree of merge_partials():
// its last merge is of neighbours, so a subtree is every second one. factors[stride + first]: of that merge.
template <int kCount, class V, class Load>
HWY_INLINE V MergedTree(int first, int stride, const MergeFactor* factors, const Load& load) {
  if constexpr (kCount == 1) {
    return load(first);
  } else {
    const F32 d;
    const V a = MergedTree<kCount / 2, V>(first, 2 * stride, factors, load);
    const V b = MergedTree<kCount / 2, V>(first + stride, 2 * stride, factors, load);
    const MergeFactor& factor = factors[stride + first];
    return hn::Add(hn::Mul(a, hn::Set(d, factor.a)), hn::Mul(b, hn::Set(d, factor.b)));
  }
}

template <int kCount>
void FinishTree(const float* const* partials, const MergeFactor* factors, int64_t width, float* out) {
  const F32 d;
  const auto value = [&](int64_t at, int64_t count) {
    return MergedTree<kCount, VF>(0, 1, factors, [&](int i) { return LoadPart(d, partials[i] + at, count); });
  };
  const VF l = hn::Set(d, hn::GetLane(value(width, 1)));
  for (int64_t at = 0; at < width; at += static_cast<int64_t>(kLanes))
    StorePart(hn::Div(value(at, width - at), l), d, out + at, width - at);
}

void FinishPartials(const float* const* partials, int64_t count, const MergeFactor* factors, int64_t width,
                    float* out) {
  if (count == 2) return FinishTree<2>(partials, factors, width, out);
  if (count == 4) return FinishTree<4>(partials, factors, width, out);
  FinishTree<8>(partials, factors, width, out);
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
HWY_EXPORT(FinishPartials);
HWY_EXPORT(Power);

namespace {

int32_t m_of(const float* partial, int64_t value_width) {
  int32_t m;
  std::memcpy(&m, partial + value_width + 1, 4);
  return m;
}

}  // namespace

float group_weights(DType dtype, float* scores, int64_t count, int32_t& m) {
  return HWY_DYNAMIC_DISPATCH(GroupWeights)(dtype, scores, count, m);
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

namespace {

// Of any number of partials, empty ones among them.
void finish_copies(std::span<const float* const> partials, int64_t value_width, float* out) {
  const auto words = static_cast<size_t>(partial_words(value_width));
  thread_local std::vector<float> copies;
  copies.resize(partials.size() * words);
  for (size_t i = 0; i < partials.size(); ++i)
    std::memcpy(copies.data() + i * words, partials[i], words * sizeof(float));
  merge_partials(copies.data(), std::ssize(partials), static_cast<int64_t>(words), value_width);
  finish_partial(copies.data(), value_width, out);
}

}  // namespace

void finish_partials(std::span<const float* const> partials, int64_t value_width, float* out) {
  constexpr size_t kMost = 8;
  const size_t count = partials.size();
  int32_t m[kMost];
  bool fast = count == 2 || count == 4 || count == kMost;
  for (size_t i = 0; fast && i < count; ++i) {
    m[i] = m_of(partials[i], value_width);
    fast = m[i] != kEmptyPartial;
  }
  if (!fast) return finish_copies(partials, value_width, out);
  MergeFactor factors[kMost];
  const auto power = HWY_DYNAMIC_DISPATCH(Power);
  for (size_t half = count / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) {
      const int32_t most = std::max(m[i], m[i + half]);
      factors[half + i] = {power(int64_t{m[i]} - most), power(int64_t{m[i + half]} - most)};
      m[i] = most;
    }
  }
  HWY_DYNAMIC_DISPATCH(FinishPartials)
  (partials.data(), static_cast<int64_t>(count), factors, value_width, out);
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
