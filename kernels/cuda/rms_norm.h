// rms_norm of kernels/elementwise.h on a CUDA device, in the same order: the same bits for finite results. (A
// NaN stays a NaN, but with another payload.)
//
// Queues work on `stream` (a cudaStream_t; null is the default one) of the calling thread's current device
// and returns at once; all pointers are device memory of it. A launch that the device refuses is fatal, like
// every failed CHECK: a worker whose device is lost is replaced, not repaired.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace weft::kernels::cuda {

// out[r][i] = (x[r][i] · 1/√(mean(x[r]²) + eps)) · weight[i]. In place only with equal strides. Strides in
// elements.
void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width,
              float* out, int64_t out_stride, CUstream_st* stream);

}  // namespace weft::kernels::cuda
