// Weights that stay quantised: what the codes of a checkpoint mean, and their way into panels
// (kernels/gemm.h).
//
//   Fp8: a weight is E4M3 code · scale; one float32 scale for each block of 128 outputs × 128 k. Blocks at
//   the
//        edges are ragged. Products with a float32 scale round once.
//   Fp4: a weight is E2M1 code · E4M3 scale of its 16 consecutive k · scale of the matrix. E2M1 is a sign and
//        {0, 0.5, 1, 1.5, 2, 3, 4, 6}; two codes share a byte, the even k in its low half. k is a multiple
//        of 16.
//
// Sources are row-major [outputs][k], outputs = groups · group_outputs in order. Plain code, at load; memory
// is the caller's. Codes and scales are taken as they are: fp8_is_finite and fp4_is_finite say whether they
// are numbers.
#pragma once

#include <cstdint>

#include "kernels/gemm.h"

namespace weft::kernels {

inline constexpr int64_t kFp8Block = 128;
inline constexpr int64_t kFp4Block = 16;

// The lower four bits.
float e2m1_to_f32(uint8_t code);

struct Fp8Source {
  const uint8_t* codes = nullptr;  // [outputs][k]
  const float* scales = nullptr;   // [⌈outputs / 128⌉][⌈k / 128⌉]
};
struct Fp4Source {
  const uint8_t* codes = nullptr;   // [outputs][k / 2]
  const uint8_t* scales = nullptr;  // [outputs][k / 16]
  float scale = 1;                  // multiplies
};

// Every weight is finite, also code by code · scale.
bool fp8_is_finite(const Fp8Source& source, int64_t outputs, int64_t k);
bool fp4_is_finite(const Fp4Source& source, int64_t outputs, int64_t k);

// Into the packed form kFp8 or kFp4, packed_bytes() long.
void pack_fp8(int64_t groups, int64_t group_outputs, int64_t k, const Fp8Source& source, void* out);
void pack_fp4(int64_t groups, int64_t group_outputs, int64_t k, const Fp4Source& source, void* out);

// To plain float32 [outputs][k]: one rounding a weight.
void dequantise_fp8(const Fp8Source& source, int64_t outputs, int64_t k, float* out);
void dequantise_fp4(const Fp4Source& source, int64_t outputs, int64_t k, float* out);

}  // namespace weft::kernels
