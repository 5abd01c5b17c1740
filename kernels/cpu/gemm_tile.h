// The register tile of the GEMM: what the blocking (gemm.cc) asks of an instruction set.
//
// A *step* is 4 bytes of x and 64 bytes of a panel: one k of float32, or a pair of k of bf16. All tiles walk
// their steps upwards, one accumulator per output, so the blocking alone never changes a bit.
#pragma once

#include <cstdint>

namespace weft::kernels {

inline constexpr int kTileRows = 6;
inline constexpr int kTilePanels = 8;
inline constexpr int64_t kFetchEvery = 16;  // steps between two rounds of prefetching

struct GemmTile {
  int rows = 0;    // 1 … kTileRows
  int panels = 0;  // 1 … max_panels[rows]
  int64_t steps = 0;
  const uint32_t* x = nullptr;  // row r starts x_stride_bytes · r further; need not be aligned
  int64_t x_stride_bytes = 0;
  const uint32_t* w[kTilePanels] = {};  // first step of each panel, 64-byte aligned
  float* y[kTilePanels] = {};           // row 0 of each panel's outputs
  int columns[kTilePanels] = {};        // outputs of the panel to write, 1 … 16
  int64_t y_stride = 0;                 // elements
  bool carry = false;                   // the accumulators start from y; else from +0
  // Where given, [16] of each panel: y = fma(scales, accumulator, add ? y : +0) in the end, else y =
  // accumulator. With block_steps the walk is cut, after first_steps and then after every block_steps: each
  // block's accumulators start from +0 and are added with scales of their own, scale_stride floats further.
  const float* scales[kTilePanels] = {};
  bool add = false;
  int64_t first_steps = 0, block_steps = 0;
  int64_t scale_stride = 0;
  // Memory wanted soon, towards L2 while this tile computes: steps [0, fetch_steps) from fetch[panel] on, at
  // most fetch_per_round of them every kFetchEvery steps.
  const uint32_t* fetch[kTilePanels] = {};
  int64_t fetch_steps = 0;
  int64_t fetch_per_round = 0;
};

struct TileKernel {
  void (*run)(const GemmTile&) = nullptr;
  int max_panels[kTileRows + 1] = {};  // by rows: as many as keep the accumulators in registers
};

// For the instruction set in use.
TileKernel f32_tile();
TileKernel bf16_tile();
// VDPBF16PS; only where have_bf16_dot().
TileKernel bf16_tile_avx512bf16();

}  // namespace weft::kernels
