#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/index_tile.cc"
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/cpu/bf16-inl.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/index_tile.h"
#include "kernels/cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {
namespace {

// Accumulators: pairs × 2 vectors. AVX-512 has 32 registers, the others 16.
constexpr int kPairs = HWY_TARGET == HWY_AVX3 ? 12 : 6;
constexpr int kFewPairs = HWY_TARGET == HWY_AVX3 ? 4 : 2;  // decode: one row of few heads

struct F32Step {
  template <class D>
  static HWY_INLINE hn::Vec<D> Run(D, hn::Vec<D> query, hn::Vec<D> key, hn::Vec<D> sum) {
    return Fma(query, key, sum);
  }
};

struct Bf16Step {
  template <class D>
  static HWY_INLINE hn::Vec<D> Run(D d, hn::Vec<D> query, hn::Vec<D> key, hn::Vec<D> sum) {
    const hn::RebindToUnsigned<D> du;
    const auto q = hn::BitCast(du, query), k = hn::BitCast(du, key);
    const auto high = hn::Set(du, 0xffff0000u);
    sum = Fma(hn::BitCast(d, hn::And(q, high)), hn::BitCast(d, hn::And(k, high)), sum);
    return Fma(hn::BitCast(d, hn::ShiftLeft<16>(q)), hn::BitCast(d, hn::ShiftLeft<16>(k)), sum);
  }
};

// Pairs [begin, begin + kCount) against kVectors vectors of keys, which lie `key_stride` words a step apart.
template <class Step, int kCount, int kVectors, class D>
HWY_INLINE void Tile(D d, const QueryTile& tile, int begin, const float* const* keys, int64_t key_stride,
                     int64_t word_count, float* scores, int64_t score_stride) {
  using V = hn::Vec<D>;
  V sums[kCount][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[i][v] = hn::Zero(d);
  }
  const float* query = tile.words + begin;
  const float* key0 = keys[0];
  const float* key1 = keys[kVectors - 1];
  for (int64_t w = 0; w < word_count; ++w) {
    V key[kVectors];
    key[0] = hn::LoadU(d, key0);
    key[kVectors - 1] = hn::LoadU(d, key1);
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const V q = hn::Set(d, query[i]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[i][v] = Step::Run(d, q, key[v], sums[i][v]);
    }
    query += kTilePairs;
    key0 += key_stride;
    key1 += key_stride;
  }
  V score[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    const int pair = begin + i;
    if (pair >= tile.pairs) break;
    float* row = scores + tile.rows[pair] * score_stride;
    const bool fresh = ((tile.first_heads >> pair) & 1u) != 0;
    const bool ends =
        i == kCount - 1 || pair == tile.pairs - 1 || ((tile.first_heads >> (pair + 1)) & 1u) != 0;
    const V weight = hn::Set(d, tile.weights[pair]);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const int64_t column = v * static_cast<int64_t>(hn::Lanes(d));
      if (fresh) {
        score[v] = hn::Zero(d);
      } else if (i == 0) {
        score[v] = hn::LoadU(d, row + column);
      }
      score[v] = Fma(weight, hn::Max(sums[i][v], hn::Zero(d)), score[v]);
      if (ends) hn::StoreU(score[v], d, row + column);
    }
  }
}

template <class Step, int kVectors, class D>
HWY_INLINE void AllPairs(D d, const QueryTile& tile, const float* const* keys, const KeyPanels& panels,
                         float* scores, int64_t score_stride) {
  if (tile.pairs <= kFewPairs) {
    Tile<Step, kFewPairs, kVectors>(d, tile, 0, keys, panels.width, panels.word_count, scores, score_stride);
    return;
  }
  for (int begin = 0; begin < tile.pairs; begin += kPairs) {
    Tile<Step, kPairs, kVectors>(d, tile, begin, keys, panels.width, panels.word_count, scores, score_stride);
  }
}

template <class Step, class D>
HWY_INLINE void AllVectors(D d, const QueryTile& tile, const KeyPanels& panels, float* scores,
                           int64_t score_stride) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t per_panel = panels.width / lanes;
  const int64_t vectors = panels.count * per_panel;
  const auto address = [&](int64_t v) { return panels.panels[v / per_panel] + v % per_panel * lanes; };
  for (int64_t v = 0; v < vectors; v += 2) {
    float* to = scores + v * lanes;
    if (v + 1 < vectors) {
      const float* const keys[2] = {address(v), address(v + 1)};
      AllPairs<Step, 2>(d, tile, keys, panels, to, score_stride);
    } else {
      const float* const keys[1] = {address(v)};
      AllPairs<Step, 1>(d, tile, keys, panels, to, score_stride);
    }
  }
}

template <class Step>
HWY_INLINE void Score(const QueryTile& tile, const KeyPanels& panels, float* scores, int64_t score_stride) {
  if (panels.width == 16) return AllVectors<Step>(F32(), tile, panels, scores, score_stride);
  AllVectors<Step>(hn::CappedTag<float, 8>(), tile, panels, scores, score_stride);
}

void ScoreF32(const QueryTile& tile, const KeyPanels& panels, float* scores, int64_t score_stride) {
  Score<F32Step>(tile, panels, scores, score_stride);
}
void ScoreBf16(const QueryTile& tile, const KeyPanels& panels, float* scores, int64_t score_stride) {
  Score<Bf16Step>(tile, panels, scores, score_stride);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(ScoreF32);
HWY_EXPORT(ScoreBf16);

ScoreTile score_tile(DType dtype) {
  if (dtype == DType::kF32) return &HWY_DYNAMIC_DISPATCH(ScoreF32);
  return have_bf16_dot() ? score_tile_avx512bf16 : &HWY_DYNAMIC_DISPATCH(ScoreBf16);
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
