// Quantised panels to dense ones, for the instruction set in use. Decoding is exact: every version gives the
// same bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "proto/vocab/ids.h"

namespace weft::kernels {

enum class PanelFormat : uint8_t;

// Codes of k [begin, end) of one record (counted from its start; begin a multiple of the format's quantum,
// end one or the end of the codes) → the steps of a dense panel.
using DecodeRecord = void (*)(const std::byte* record, int64_t begin, int64_t end, void* out);
DecodeRecord decode_record(PanelFormat format, DType dtype);

// With AVX-512 VBMI, for bf16: only where have_byte_permutes().
void decode_fp8_avx512vbmi(const std::byte* record, int64_t begin, int64_t end, void* out);
void decode_fp4_avx512vbmi(const std::byte* record, int64_t begin, int64_t end, void* out);

// A few rows over some quantised panels, from k_begin to k_end, without a buffer between: the codes are read
// once and used at once. The same walk as everywhere.
inline constexpr int kStreamRows = 6;
inline constexpr int kStreamPanels = 4;
struct QuantisedStream {
  int rows = 0;                    // 1 … kStreamRows
  int panels = 0;                  // 1 … kStreamPanels; beyond two rows at most two
  int64_t k_begin = 0, k_end = 0;  // in the panel; k_begin a multiple of the quantum, k_end of 2 (kFp8), 16
  const std::byte* w[kStreamPanels] = {};  // start of each panel
  const char* x = nullptr;                 // bf16; row r starts x_stride_bytes · r further
  int64_t x_stride_bytes = 0;
  float* y[kStreamPanels] = {};
  int columns[kStreamPanels] = {};
  int64_t y_stride = 0;
};
// Only where have_bf16_dot() and have_byte_permutes().
void stream_fp8_avx512vbmi(const QuantisedStream& stream);
void stream_fp4_avx512vbmi(const QuantisedStream& stream);

}  // namespace weft::kernels
