// y = x · Wᵀ with one fixed order of additions, for one row or thousands.
//
// y[row, out] is one float32 accumulator that walks k upwards with fused multiply-adds (bf16: in pairs, as
// VDPBF16PS does), from k_begin to k_end. It is a function of x[row], W[out] and the k range only: never of
// the row count, tile, slice or thread count. Lanes run over outputs.
//
// Packed form: outputs come in groups (one per head where a matrix is sliced by head, else one), each padded
// with zero outputs to whole panels of 16. Panel layout, float32: [panel][k][16]; bf16: [panel][k/2][16][2]
// (k padded to even with zeros). A range of k is therefore contiguous inside a panel. Slices of groups and of
// k are views.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/parallel.h"
#include "proto/vocab/ids.h"

namespace weft::kernels {

inline constexpr int64_t kPanel = 16;

struct PackedMatrix {
  DType dtype = DType::kF32;
  int64_t groups = 1;
  int64_t group_outputs = 0;  // per group, before padding
  int64_t k = 0;
  const void* data = nullptr;
};

// Bytes of the packed form; a multiple of 64.
size_t packed_bytes(DType dtype, int64_t groups, int64_t group_outputs, int64_t k);

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
void gemm(const Gemm& p, Parallel& parallel);

// To the dtype of weights or cache and back: float32 is copied, bf16 is rounded to nearest even.
void convert(const float* in, int64_t count, DType dtype, void* out);
void convert_to_f32(const void* in, DType dtype, int64_t count, float* out);

}  // namespace weft::kernels
