#include "kernels/cuda/rms_norm.h"

#include <cuda_runtime.h>

#include "proto/vocab/check.h"

namespace weft::kernels::cuda {
namespace {

constexpr int kLanes = 16;
constexpr int kRowsPerBlock = 8;

// Thread (lane, row): lane l walks the columns ≡ l mod 16 upwards, so each thread reads and writes columns
// that are its own alone, which is why the op may be in place. Two rows share a warp, and never wait for each
// other.
__global__ void rms_norm_kernel(const float* x, int64_t x_stride, const float* weight, float eps,
                                int64_t rows, int64_t width, float* out, int64_t out_stride) {
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (row >= rows) return;  // all 16 lanes of the row together
  const unsigned row_lanes = 0xffffu << (threadIdx.y % 2 * kLanes);
  x += row * x_stride;
  out += row * out_stride;

  float sum = 0.0f;
  for (int64_t i = lane; i < width; i += kLanes) sum = __fmaf_rn(x[i], x[i], sum);
  // Lane i += lane i + half. Lanes at and above `half` get a value that no lane below ever reads again.
  for (int half = kLanes / 2; half > 0; half /= 2) {
    sum = __fadd_rn(sum, __shfl_down_sync(row_lanes, sum, half, kLanes));
  }
  const float squares = __shfl_sync(row_lanes, sum, 0, kLanes);
  const float mean = __fdiv_rn(squares, static_cast<float>(width));
  const float root = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
  for (int64_t i = lane; i < width; i += kLanes) out[i] = __fmul_rn(__fmul_rn(x[i], root), weight[i]);
}

}  // namespace

void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width,
              float* out, int64_t out_stride, CUstream_st* stream) {
  CHECK_GT(width, 0);
  CHECK_GE(rows, 0);
  if (x == out) CHECK_EQ(x_stride, out_stride);
  if (rows == 0) return;
  const int64_t blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  CHECK_LE(blocks, int64_t{0x7fffffff});
  rms_norm_kernel<<<static_cast<unsigned>(blocks), dim3(kLanes, kRowsPerBlock), 0, stream>>>(
      x, x_stride, weight, eps, rows, width, out, out_stride);
  const cudaError_t code = cudaGetLastError();
  CHECK(code == cudaSuccess, "rms_norm: ", cudaGetErrorString(code));
}

}  // namespace weft::kernels::cuda
