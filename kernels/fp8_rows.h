// Rows of E4M3 values with one scale, and back. The scalars of kernels/fp8.h say what each value becomes.
//
// Vectors, any instruction set, the same bits; any thread with flush-to-zero on. A value that is not finite
// becomes NaN and counts for no scale, so that it shows where it is read and spoils no other. No errors.
#pragma once

#include <cstdint>

namespace weft::kernels {

// out[i] = e4m3(in[i] / scale).
void encode_e4m3(const float* in, int64_t count, float scale, uint8_t* out);
// out[i] = in[i] · scale as bf16, for a scale that is a power of two from 2^−100 to 2^119: exact.
void decode_e4m3(const uint8_t* in, int64_t count, float scale, uint16_t* out);
// The same; only where have_byte_permutes() (kernels/cpu/dispatch.h).
void decode_e4m3_avx512vbmi(const uint8_t* in, int64_t count, float scale, uint16_t* out);

// The largest magnitude of the finite values; 0 where there are none.
float finite_max(const float* in, int64_t count);
// Encodes with the scale of the values' largest, which it returns.
float quantise_e4m3(const float* in, int64_t count, bool power_of_two, uint8_t* out);

}  // namespace weft::kernels
