#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_columns.cc"
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/cpu/attention_columns.h"
#include "kernels/cpu/bf16-inl.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/lanes-inl.h"
#include "kernels/cpu/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {
namespace {

struct F32Step {
  static HWY_INLINE VF Run(VF q, VF e, VF sum) { return Fma(q, e, sum); }
};
struct Bf16Step {
  static HWY_INLINE VF Run(VF q, VF e, VF sum) {
    return PairDot(hn::BitCast(U32(), q), hn::BitCast(U32(), e), sum);
  }
};

// A word of a query. Pairs of bf16 may start at any two bytes.
HWY_INLINE float Word(const void* at) {
  float word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

void TransposeWords(const void* const* entries, int64_t entry_count, int64_t words, float* columns) {
  const F32 d;
  constexpr int64_t lanes = static_cast<int64_t>(kLanes);
  const int64_t padded = (entry_count + kColumnStep - 1) / kColumnStep * kColumnStep;
  for (int64_t u = 0; u < padded; u += lanes) {
    const float* rows[kLanes];
    for (int64_t i = 0; i < lanes; ++i) {
      rows[i] = static_cast<const float*>(entries[HWY_MIN(u + i, entry_count - 1)]);
    }
    for (int64_t w = 0; w < words; w += lanes) {
      VF square[kLanes];
#pragma GCC unroll 16
      for (size_t i = 0; i < kLanes; ++i) square[i] = hn::LoadU(d, rows[i] + w);
      Transpose(square);
      float* to = columns + (u / kColumnStep * words + w) * kColumnStep + u % kColumnStep;
#pragma GCC unroll 16
      for (size_t i = 0; i < kLanes; ++i)
        hn::StoreU(square[i], d, to + static_cast<int64_t>(i) * kColumnStep);
    }
  }
}

// kQueries queries × kVectors vectors of entries.
template <class Step, int kQueries, int kVectors>
struct Tile {
  VF sums[kQueries][kVectors];

  HWY_INLINE void Add(const Tile& right) {
#pragma GCC unroll 4
    for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[q][v] = hn::Add(sums[q][v], right.sums[q][v]);
    }
  }

  // The sum of lanes kLane, kLane + kStride, … < 16, by the tree.
  template <int kLane, int kStride>
  static HWY_INLINE Tile Sum(const float* const (&queries)[kQueries], const float* columns, int64_t words) {
    Tile left;
    if constexpr (kStride < 16) {
      left = Sum<kLane, 2 * kStride>(queries, columns, words);
      left.Add(Sum<kLane + kStride, 2 * kStride>(queries, columns, words));
    } else {
#pragma GCC unroll 4
      for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) left.sums[q][v] = hn::Zero(F32());
      }
      for (int64_t w = 0; w < words; w += 16) left.template Walk<kLane>(queries, columns, w);
    }
    return left;
  }

  template <int kLane>
  HWY_INLINE void Walk(const float* const (&queries)[kQueries], const float* columns, int64_t w) {
    const F32 d;
    const float* from = columns + (w + kLane) * kColumnStep;
    VF entries[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) entries[v] = hn::LoadU(d, from + v * static_cast<int64_t>(kLanes));
#pragma GCC unroll 4
    for (int q = 0; q < kQueries; ++q) {
      const VF word = hn::Set(d, Word(queries[q] + w + kLane));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[q][v] = Step::Run(word, entries[v], sums[q][v]);
    }
  }
};

// AVX2 has 16 registers.
constexpr int kQueriesMax = HWY_TARGET == HWY_AVX2 ? 2 : 4;

template <class Step, int kQueries>
HWY_INLINE void Rows(const DotColumns& p, int64_t query, int64_t step) {
  constexpr int kVectors = kLanes == 1 ? 1 : 2;
  constexpr int64_t width = kVectors * static_cast<int64_t>(kLanes);
  const F32 d;
  const VF scale = hn::Set(d, p.scale);
  const float* queries[kQueries];
  for (int q = 0; q < kQueries; ++q) queries[q] = p.queries[query + q].words;
  for (int64_t u = step; u < step + kColumnStep; u += width) {
    const float* columns = p.columns + step * p.words + (u - step);
    const auto tile = Tile<Step, kQueries, kVectors>::template Sum<0, 1>(queries, columns, p.words);
#pragma GCC unroll 4
    for (int q = 0; q < kQueries; ++q) {
      float* out = p.out + (query + q) * kGroupEntries + u;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        hn::StoreU(hn::Mul(tile.sums[q][v], scale), d, out + v * static_cast<int64_t>(kLanes));
      }
    }
  }
}

template <class Step>
HWY_INLINE void Dots(const DotColumns& p) {
  for (int64_t step = 0; step < p.entry_count; step += kColumnStep) {
    int64_t query = 0;
    for (; query + kQueriesMax <= p.query_count; query += kQueriesMax)
      Rows<Step, kQueriesMax>(p, query, step);
    for (; query < p.query_count; ++query) Rows<Step, 1>(p, query, step);
  }
}

void ColumnsF32(const DotColumns& p) { Dots<F32Step>(p); }
void ColumnsBf16(const DotColumns& p) { Dots<Bf16Step>(p); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(TransposeWords);
HWY_EXPORT(ColumnsF32);
HWY_EXPORT(ColumnsBf16);

void transpose_words(const void* const* entries, int64_t entry_count, int64_t words, float* columns) {
  HWY_DYNAMIC_DISPATCH(TransposeWords)(entries, entry_count, words, columns);
}

ColumnDots column_dots(DType dtype) {
  if (dtype == DType::kF32) return &HWY_DYNAMIC_DISPATCH(ColumnsF32);
  return have_bf16_dot() ? column_dots_avx512bf16 : &HWY_DYNAMIC_DISPATCH(ColumnsBf16);
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
