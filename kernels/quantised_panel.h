// Offsets inside one quantised panel (the layouts of kernels/gemm.h), in bytes. Both kinds are a row of
// records, each with 64 bytes of scales before its codes; a kFp4 panel has its 16 float32 scales in front.
//
// kFp4 is arranged for look-ups of 64 bytes at a time. A byte has two codes, of two k of one output, an
// *upper* one: sign in bit 7, size in bits 0 … 2; and a *lower* one: sign in bit 6, size in bits 3 … 5. Sizes
// are those of E2M1. What a look-up finds, the low and the high bytes of 64 bf16 values, is interleaved
// within each 128 bits to pairs of k. A block's scale is not negative and has five bits of exponent above
// three of fraction: (1 + fraction / 8) · 2^(exponent − 9). Its sign is in the codes' signs; where it is
// zero, all sizes are zero.
#pragma once

#include <cstdint>

#include "kernels/gemm.h"
#include "proto/vocab/check.h"

namespace weft::kernels {

class QuantisedPanel {
 public:
  static constexpr int64_t kScaleBytes = 64;

  QuantisedPanel(PanelFormat format, int64_t k) : fp8_(format == PanelFormat::kFp8), k_(k) {
    CHECK(format != PanelFormat::kDense, "dense panels have no records");
  }
  int64_t record_k() const { return fp8_ ? 128 : 64; }
  // Codes are decoded from multiples of this many k on: what shares a 64-byte load, or a scale.
  int64_t quantum() const { return fp8_ ? 4 : 16; }
  // The record that holds k index `k`.
  int64_t record(int64_t k) const {
    return (fp8_ ? 0 : kScaleBytes) + k / record_k() * (kScaleBytes + record_k() * k_bytes());
  }
  // Where the code of (k, output) lies behind the scales of its kFp8 record.
  static constexpr int64_t fp8_code(int64_t k, int64_t output) {
    constexpr int64_t kPlaces[] = {0, 2, 1, 3};
    return k / 4 * 64 + output * 4 + kPlaces[k % 4];
  }
  // Where the code of (k, output) lies behind the scales of its kFp4 record, and whether it is a lower one.
  // Of 16 k, pairs 0 … 3 are in the first 64 bytes, pairs 4 … 7 in the second; of four pairs the first two
  // are upper.
  struct Fp4Code {
    int64_t byte;
    bool lower;
  };
  static constexpr Fp4Code fp4_code(int64_t k, int64_t output) {
    const int64_t pair = k / 2 % 4;
    return {k / 8 * 64 + output / 4 * 16 + pair % 2 * 8 + output % 4 * 2 + k % 2, pair >= 2};
  }
  int64_t bytes() const {
    if (!fp8_) return record(k_ + record_k() - 1);
    const int64_t codes = (k_ + 3) / 4 * 4 * kPanel;
    return (k_ + record_k() - 1) / record_k() * kScaleBytes + codes;
  }

 private:
  int64_t k_bytes() const { return fp8_ ? kPanel : kPanel / 2; }  // of one k in all 16 outputs

  bool fp8_;
  int64_t k_;
};

}  // namespace weft::kernels
