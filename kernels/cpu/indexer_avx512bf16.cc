// The indexer's tile with VDPBF16PS: the same order as Bf16Step of cpu/index_tile.cc, hence the same bits.
// Intrinsics alone (see cpu/bf16-inl.h).
#include <immintrin.h>

#include "kernels/cpu/index_tile.h"

namespace weft::kernels {
namespace {

// 16 keys a vector, or 8.
struct Wide {
  using V = __m512;
  static constexpr int64_t kLanes = 16;
  static V zero() { return _mm512_setzero_ps(); }
  static V set(float x) { return _mm512_set1_ps(x); }
  static V load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(V v, float* to) { _mm512_storeu_ps(to, v); }
  static V dot(V sum, V a, V b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static V add_weighted(V weight, V x, V sum) {
    // The unmasked form draws a false warning from GCC 12's own header.
    return _mm512_fmadd_ps(weight, _mm512_maskz_max_ps(0xffff, x, zero()), sum);
  }
};

struct Narrow {
  using V = __m256;
  static constexpr int64_t kLanes = 8;
  static V zero() { return _mm256_setzero_ps(); }
  static V set(float x) { return _mm256_set1_ps(x); }
  static V load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(V v, float* to) { _mm256_storeu_ps(to, v); }
  static V dot(V sum, V a, V b) {
    return _mm256_dpbf16_ps(sum, reinterpret_cast<__m256bh>(a), reinterpret_cast<__m256bh>(b));
  }
  static V add_weighted(V weight, V x, V sum) {
    return _mm256_fmadd_ps(weight, _mm256_max_ps(x, zero()), sum);
  }
};

template <class Lanes, int kCount, int kVectors>
void tile_of(const QueryTile& tile, const KeyPanels& keys, float* scores, int64_t score_stride) {
  using V = typename Lanes::V;
  V sums[kCount][kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[i][v] = Lanes::zero();
  }
  const float* query = tile.words;
  const float* key0 = keys.panels[0];
  const float* key1 = keys.panels[kVectors - 1];
  for (int64_t w = 0; w < keys.word_count; ++w) {
    V key[kVectors];
    key[0] = Lanes::load(key0);
    key[kVectors - 1] = Lanes::load(key1);
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const V q = Lanes::set(query[i]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[i][v] = Lanes::dot(sums[i][v], key[v], q);
    }
    query += kTilePairs;
    key0 += Lanes::kLanes;
    key1 += Lanes::kLanes;
  }
  V score[kVectors];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    if (i >= tile.pairs) break;
    float* row = scores + tile.rows[i] * score_stride;
    const bool fresh = ((tile.first_heads >> i) & 1u) != 0;
    const bool ends = i == tile.pairs - 1 || ((tile.first_heads >> (i + 1)) & 1u) != 0;
    const V weight = Lanes::set(tile.weights[i]);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      if (fresh) {
        score[v] = Lanes::zero();
      } else if (i == 0) {
        score[v] = Lanes::load(row + v * Lanes::kLanes);
      }
      score[v] = Lanes::add_weighted(weight, sums[i][v], score[v]);
      if (ends) Lanes::store(score[v], row + v * Lanes::kLanes);
    }
  }
}

template <class Lanes>
void any_tile(const QueryTile& tile, const KeyPanels& keys, float* scores, int64_t score_stride) {
  constexpr int kFewPairs = 4;
  if (tile.pairs <= kFewPairs) {
    keys.count == 2 ? tile_of<Lanes, kFewPairs, 2>(tile, keys, scores, score_stride)
                    : tile_of<Lanes, kFewPairs, 1>(tile, keys, scores, score_stride);
  } else {
    keys.count == 2 ? tile_of<Lanes, kTilePairs, 2>(tile, keys, scores, score_stride)
                    : tile_of<Lanes, kTilePairs, 1>(tile, keys, scores, score_stride);
  }
}

}  // namespace

void score_tile_avx512bf16(const QueryTile& tile, const KeyPanels& keys, float* scores,
                           int64_t score_stride) {
  keys.width == 16 ? any_tile<Wide>(tile, keys, scores, score_stride)
                   : any_tile<Narrow>(tile, keys, scores, score_stride);
}

}  // namespace weft::kernels
