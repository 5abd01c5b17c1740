// bfloat16 scalars: the upper half of a float32. Rounding is to nearest even, by integer arithmetic: the same
// bits in every thread mode, denormals kept. A NaN stays a (quiet) NaN.
#pragma once

#include <bit>
#include <cstdint>

namespace weft::kernels {

constexpr float bf16_to_f32(uint16_t value) { return std::bit_cast<float>(uint32_t{value} << 16); }

constexpr uint16_t f32_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace weft::kernels
