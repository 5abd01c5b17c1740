#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention_dots.cc"
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/cpu/attention_dots.h"
#include "kernels/cpu/bf16-inl.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/lanes-inl.h"
#include "kernels/cpu/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {
namespace {

// Products of one tile: as many as a vector has lanes, so that their sums fill one. (The portable target has
// one lane.)
constexpr int kResults = kLanes == 1 ? 4 : static_cast<int>(kLanes);

struct F32Step {
  static HWY_INLINE VF Run(VF q, VF e, VF sum) { return Fma(q, e, sum); }
};
struct Bf16Step {
  static HWY_INLINE VF Run(VF q, VF e, VF sum) {
    return PairDot(hn::BitCast(U32(), q), hn::BitCast(U32(), e), sum);
  }
};

#if HWY_TARGET != HWY_SCALAR
// One level of the trees of two products at once: x's lanes i + i + distance, and y's, in one vector.
template <size_t kDistance>
HWY_INLINE VF AddLevel(VF x, VF y) {
  SwapBlocks<kDistance>(x, y);
  return hn::Add(x, y);
}
#endif

// to[i] = the lanes of sums[i], added by the tree.
HWY_INLINE void AddTrees(VF (&sums)[kResults], float scale, float* to) {
  const F32 d;
#if HWY_TARGET == HWY_SCALAR
  for (int i = 0; i < kResults; ++i) hn::Store(hn::Mul(sums[i], hn::Set(d, scale)), d, to + i);
#else
  if constexpr (kResults == 16) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) sums[i] = AddLevel<8>(sums[i], sums[i + 8]);
  }
  if constexpr (kResults >= 8) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[i] = AddLevel<4>(sums[i], sums[i + 4]);
  }
  sums[0] = AddLevel<2>(sums[0], sums[2]);
  sums[1] = AddLevel<2>(sums[1], sums[3]);
  hn::StoreU(hn::Mul(AddLevel<1>(sums[0], sums[1]), hn::Set(d, scale)), d, to);
#endif
}

// Lanes [offset, offset + kLanes) of the 16 logical ones, of every product of the tile.
template <class Step, int kQueries>
HWY_INLINE void Walk(const WordRow* queries, const WordRow* const* entries, int64_t words, size_t offset,
                     VF (&sums)[kResults]) {
  constexpr int kEntries = kResults / kQueries;
  const F32 d;
  const float* q[kQueries];
  const float* e[kEntries];
#pragma GCC unroll 16
  for (int h = 0; h < kQueries; ++h) q[h] = queries[h].words + offset;
#pragma GCC unroll 16
  for (int u = 0; u < kEntries; ++u) e[u] = entries[u]->words + offset;
#pragma GCC unroll 16
  for (int i = 0; i < kResults; ++i) sums[i] = hn::Zero(d);
  const auto step = [&](int64_t at) HWY_ATTR {
    VF left[kQueries];
#pragma GCC unroll 16
    for (int h = 0; h < kQueries; ++h) left[h] = hn::LoadU(d, q[h] + at);
#pragma GCC unroll 16
    for (int u = 0; u < kEntries; ++u) {
      const VF entry = hn::LoadU(d, e[u] + at);
#pragma GCC unroll 16
      for (int h = 0; h < kQueries; ++h) {
        sums[h * kEntries + u] = Step::Run(left[h], entry, sums[h * kEntries + u]);
      }
    }
  };
  for (int64_t w = 0; w < words; w += 16) step(w);
  if (queries[0].tail == nullptr) return;
#pragma GCC unroll 16
  for (int h = 0; h < kQueries; ++h) q[h] = queries[h].tail + offset;
#pragma GCC unroll 16
  for (int u = 0; u < kEntries; ++u) e[u] = entries[u]->tail + offset;
  step(0);
}

template <class Step, int kQueries>
void Strip(const DotStrip& strip, int64_t query) {
  constexpr int kEntries = kResults / kQueries;
  for (int64_t first = 0; first < strip.entry_count; first += kEntries) {
    const WordRow* entries[kEntries];  // beyond the strip: the last one again, and not stored
    const int64_t count = HWY_MIN(int64_t{kEntries}, strip.entry_count - first);
    for (int64_t u = 0; u < kEntries; ++u) entries[u] = &strip.entries[first + HWY_MIN(u, count - 1)];
    VF part[kVectorsPer16][kResults];
    for (size_t v = 0; v < kVectorsPer16; ++v) {
      Walk<Step, kQueries>(strip.queries + query, entries, strip.words, v * kLanes, part[v]);
    }
    // Vector v holds lanes v · kLanes …: the levels of the tree above one vector.
    for (size_t half = kVectorsPer16 / 2; half > 0; half /= 2) {
      for (size_t v = 0; v < half; ++v) {
        for (int i = 0; i < kResults; ++i) part[v][i] = hn::Add(part[v][i], part[v + half][i]);
      }
    }
    HWY_ALIGN float t[kResults];
    AddTrees(part[0], strip.scale, t);
    for (int64_t h = 0; h < kQueries; ++h) {
      float* out = strip.out + (query + h) * strip.out_stride + first;
      if (count == kEntries) {
        __builtin_memcpy(out, t + h * kEntries, sizeof(float) * kEntries);
        continue;
      }
      for (int64_t u = 0; u < count; ++u) out[u] = t[h * kEntries + u];
    }
  }
}

template <class Step>
HWY_INLINE void Dots(const DotStrip& strip) {
  int64_t query = 0;
  if (strip.query_count == 4) {
    Strip<Step, 4>(strip, 0);
    return;
  }
  if (strip.query_count >= 2) {
    Strip<Step, 2>(strip, 0);
    query = 2;
  }
  if (query < strip.query_count) Strip<Step, 1>(strip, query);
}

void DotsF32(const DotStrip& strip) { Dots<F32Step>(strip); }
void DotsBf16(const DotStrip& strip) { Dots<Bf16Step>(strip); }

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(DotsF32);
HWY_EXPORT(DotsBf16);

StripDots strip_dots(DType dtype) {
  if (dtype == DType::kF32) return &HWY_DYNAMIC_DISPATCH(DotsF32);
  return have_bf16_dot() ? strip_dots_avx512bf16 : &HWY_DYNAMIC_DISPATCH(DotsBf16);
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
