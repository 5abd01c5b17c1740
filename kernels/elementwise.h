// Row-wise ops between the matrix products. Everything is float32; sums over a row use 16 lanes by index mod
// 16 (each walking upwards from +0; squares by fused multiply-add) and then a tree (8, 4, 2, 1: lane i +=
// lane i + 8, …), whatever the instruction set. Means divide by the width; 1/√ is a division and a square
// root, both correctly rounded. Single-threaded: callers spread rows.
#pragma once

#include <cstdint>

#include "kernels/parallel.h"
#include "proto/vocab/ids.h"

namespace weft::kernels {

// out[r][i] = (x[r][i] · 1/√(mean(x[r]²) + eps)) · weight[i]. May be in place. Strides in elements.
void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width,
              float* out, int64_t out_stride);

// out = fma((x − mean) · 1/√(var + eps), weight, bias), var the biased one, of x − mean. May be in place.
void layer_norm(const float* x, int64_t x_stride, const float* weight, const float* bias, float eps,
                int64_t rows, int64_t width, float* out, int64_t out_stride);

enum class RopeLayout : uint8_t { kInterleaved, kHalfSplit };
// Rotates x[0 … width) in place by the angles whose cosines and sines are given, [width/2] each (the caller
// keeps tables; scale factor A already multiplied in). kInterleaved: pairs (2j, 2j+1); kHalfSplit: (j, j +
// width/2). (a, b) becomes (fma(a, c, −(b·s)), fma(b, c, a·s)).
void rope(float* x, int64_t width, const float* cosine, const float* sine, RopeLayout layout);

// out[i] = silu(gate[i]) · up[i], silu(x) = x / (1 + exp(−x)), exp by exp2 of this library. May be in place.
void swiglu(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int64_t rows,
            int64_t width, float* out, int64_t out_stride);

// a[i] = a[i] + b[i], element by element; the left operand of a canonical tree is a.
void add(float* a, const float* b, int64_t count);
// y[i] = fma(scale, x[i], y[i])
void axpy(float scale, const float* x, float* y, int64_t count);
void scale(float* x, float factor, int64_t count);
// a[i] = a[i] · b[i]
void multiply(float* a, const float* b, int64_t count);
// x = H x / √width, H the Hadamard matrix of Sylvester's order, width a power of two: log2(width) rounds of
// sums and differences of elements 1, 2, 4, … apart, then one product. In place.
void hadamard(float* x, int64_t width);

// True if every value is finite. The second: values of either dtype.
bool all_finite(const float* x, int64_t count);
bool all_finite(DType dtype, const void* x, int64_t count);

// 1/(1+2^(−x·log2 e)), by this library's exp2: used by router and tests.
float sigmoid(float x);
void sigmoid(const float* x, float* out, int64_t count);  // may be in place
// 2^x, within 2 ulp; 0 below −126, infinity from 127.5 up, NaN for NaN. One definition, scalar and by lanes
// the same bits (kernels/cpu/exp2-inl.h).
float exp2(float x);
void exp2(const float* x, float* out, int64_t count);  // may be in place

}  // namespace weft::kernels
