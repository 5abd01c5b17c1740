// Offsets inside one quantised panel (the layouts of kernels/gemm.h), in bytes. Both kinds are a row of
// records, each with 64 bytes of scales before its codes; a kFp4 panel has its 16 float32 scales in front.
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
