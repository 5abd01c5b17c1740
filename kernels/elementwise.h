// Row-wise ops between the matrix products. Everything is float32; sums over a row use 16 lanes by index mod
// 16 and then a tree (8, 4, 2, 1), whatever the instruction set.
#pragma once

#include <cstdint>

#include "kernels/parallel.h"
#include "proto/vocab/ids.h"

namespace weft::kernels {

// out[r][i] = x[r][i] · rsqrt(mean(x[r]²) + eps) · weight[i]. May be in place. Strides in elements.
void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width, float* out,
              int64_t out_stride);

// out = (x − mean) · rsqrt(var + eps) · weight + bias, var the biased one, of x − mean.
void layer_norm(const float* x, int64_t x_stride, const float* weight, const float* bias, float eps, int64_t rows,
                int64_t width, float* out, int64_t out_stride);

enum class RopeLayout : uint8_t { kInterleaved, kHalfSplit };
// Rotates x[0 … width) in place by the angles whose cosines and sines are given, [width/2] each (the caller
// keeps tables; scale factor A already multiplied in). kInterleaved: pairs (2j, 2j+1); kHalfSplit: (j, j + width/2).
void rope(float* x, int64_t width, const float* cosine, const float* sine, RopeLayout layout);

// out[i] = silu(gate[i]) · up[i], silu(x) = x / (1 + exp(−x)), exp by exp2 of this library. May be in place.
void swiglu(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int64_t rows, int64_t width,
            float* out, int64_t out_stride);

// a[i] = a[i] + b[i], element by element; the left operand of a canonical tree is a.
void add(float* a, const float* b, int64_t count);
// y[i] = fma(scale, x[i], y[i])
void axpy(float scale, const float* x, float* y, int64_t count);
void scale(float* x, float factor, int64_t count);

// True if every value is finite.
bool all_finite(const float* x, int64_t count);

// 1/(1+2^(−x·log2 e)), by this library's exp2: used by router and tests.
float sigmoid(float x);
// 2^x for |x| ≤ 126, flushed to 0 below; within 2 ulp. One definition, scalar and by lanes the same bits.
float exp2(float x);

}  // namespace weft::kernels
