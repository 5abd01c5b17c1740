// y = x · Wᵀ with one fixed order of additions, for one row or thousands.
//
// y[row, out] is one float32 accumulator that walks k upwards with fused multiply-adds (bf16: in pairs, as
// VDPBF16PS does), from k_begin to k_end. It is a function of x[row], W[out] and the k range only: never of
// the row count, tile, slice or thread count. Lanes run over outputs.
//
// Weights may be quantised; x never is. Codes are decoded exactly into the type of x, and
//   kFp8:  y = Σ over blocks of 128 k, upwards from +0: y = fma(scale[block, out], walk over the block, y).
//   Blocks
//          begin at multiples of 128 and are cut where the k range is.
//   kFp4:  y = scale[out] · walk, over weights e2m1 · e4m3 (one e4m3 for each 16 k): such products are exact
//   in bf16.
// where "walk" is the accumulator above. See kernels/quantised.h for what the codes are and how they are
// packed.
//
// Packed form: outputs come in groups (one per head where a matrix is sliced by head, else one), each padded
// with zero outputs to whole panels of 16. Panel layout, float32: [panel][k][16]; bf16: [panel][k/2][16][2]
// (k padded to even with zeros). A range of k is therefore contiguous inside a panel. Slices of groups and of
// k are views. Quantised panels do not depend on the type of x:
//   kFp8: [panel][⌈k/128⌉] of {scale f32 [16], codes u8 [k/4][16][k 0, 2, 1, 3]}, k padded to a multiple of 4
//         with zeros: two pairs of bf16 come out of 32 bits without a shuffle;
//   kFp4: [panel] of {scale f32 [16], [⌈k/64⌉] of {block scales u8 [4][16], codes u8 [4][2][64]}}, zeros
//         behind. For each 16 k a scale of each output, and twice 64 bytes of codes; what they are and which
//         is where: kernels/quantised_panel.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/parallel.h"
#include "proto/vocab/ids.h"

namespace weft::kernels {

inline constexpr int64_t kPanel = 16;

enum class PanelFormat : uint8_t { kDense, kFp8, kFp4 };

struct PackedMatrix {
  DType dtype = DType::kF32;  // of x; of the weights, too, where they are dense
  int64_t groups = 1;
  int64_t group_outputs = 0;  // per group, before padding
  int64_t k = 0;
  const void* data = nullptr;
  PanelFormat format = PanelFormat::kDense;
};

// Bytes of the packed form; a multiple of 64.
size_t packed_bytes(DType dtype, int64_t groups, int64_t group_outputs, int64_t k,
                    PanelFormat format = PanelFormat::kDense);

// Element (group g, output o, k index i) of the source is data[g · group_stride + o · output_stride +
// i · k_stride]; strides in elements. Source and packed dtypes may differ: f32 → bf16 rounds to nearest even.
struct PackSource {
  DType dtype = DType::kF32;
  const void* data = nullptr;
  int64_t group_stride = 0;
  int64_t output_stride = 0;
  int64_t k_stride = 1;
};
// Packs groups [group_begin, group_end) into `out` (the start of the whole packed matrix).
void pack_matrix(DType dtype, int64_t groups, int64_t group_outputs, int64_t k, const PackSource& source,
                 void* out, int64_t group_begin, int64_t group_end);

struct Gemm {
  PackedMatrix weights;
  // Output range: groups [group_begin, group_end), and within each group outputs [output_begin, output_end);
  // output_begin is a multiple of 16. output_end = −1: all.
  int64_t group_begin = 0, group_end = 1;
  int64_t output_begin = 0, output_end = -1;
  int64_t k_begin = 0, k_end = -1;  // even for bf16 (or the matrix's end); −1: all
  int64_t rows = 0;
  const void* x = nullptr;  // [rows][x_stride], weights.dtype; element 0 of a row is k = k_begin
  int64_t x_stride = 0;     // elements
  // [rows][y_stride]; output o of group g is column (g − group_begin) · (output_end − output_begin) + o −
  // output_begin
  float* y = nullptr;
  int64_t y_stride = 0;  // elements
};
// Products that do not depend on each other, spread over the threads as one job: a step with few rows has
// many small ones.
void gemm(std::span<const Gemm> products, Parallel& parallel);
inline void gemm(const Gemm& p, Parallel& parallel) { gemm(std::span(&p, 1), parallel); }

// To the dtype of weights or cache and back: float32 is copied, bf16 is rounded to nearest even.
void convert(const float* in, int64_t count, DType dtype, void* out);
void convert_to_f32(const void* in, DType dtype, int64_t count, float* out);

}  // namespace weft::kernels
