// The inner tile of the indexer: the scores of up to 12 (row, head) pairs against up to two panels of keys.
//
// A panel is [words][panel_width] 32-bit words (kernels/indexer.h): one float32 element, or a pair of bf16. A
// dot product is one accumulator walking words upwards, lanes over keys; then score = fma(weight, max(0,
// dot), score), heads ascending. Every instruction set has its own tile shape; none changes a bit of a score,
// since no lane of a result ever meets another. Stateless, any thread with flush-to-zero on. No errors.
//
// Registers of AVX-512: 12 × 2 accumulators, 2 key vectors, 1 broadcast query word. Per word 14 loads feed 24
// multiply-adds, so two loads and two multiply-adds a cycle leave the loads idle half the time.
#pragma once

#include <cstdint>

#include "proto/vocab/ids.h"

namespace weft::kernels {

inline constexpr int kTilePairs = 12;

// Consecutive (row, head) pairs, heads fastest.
struct QueryTile {
  const float* words = nullptr;  // [word_count][kTilePairs]: query words side by side, zeros above `pairs`
  int pairs = 0;
  uint32_t first_heads = 0;  // bit i: pair i is its row's head 0, so its score starts at +0
  float weights[kTilePairs] = {};
  int32_t rows[kTilePairs] = {};  // row of the score matrix
  int64_t last_position = 0;      // largest position that any of its rows sees
};

struct KeyPanels {
  const float* panels[2] = {};
  int count = 0;           // 1 or 2
  int64_t width = 0;       // 8 or 16 keys each
  int64_t word_count = 0;  // key width in words
};

// scores[row][0 … count · width) of the tile's rows: written where the tile holds head 0, else continued.
using ScoreTile = void (*)(const QueryTile& tile, const KeyPanels& keys, float* scores, int64_t score_stride);
ScoreTile score_tile(DType dtype);

// With VDPBF16PS; only where have_bf16_dot().
void score_tile_avx512bf16(const QueryTile& tile, const KeyPanels& keys, float* scores, int64_t score_stride);

}  // namespace weft::kernels
