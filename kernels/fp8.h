// E4M3 ("fn": no infinities) scalars: sign, four bits of exponent with bias 7, three of fraction. Subnormals
// are multiples of 2⁻⁹; the largest value is 448; 0x7f and 0xff are NaN. Every value is exact in bf16 and in
// float32, and normal there, so flush-to-zero never touches one.
#pragma once

#include <bit>
#include <cstdint>

namespace weft::kernels {

inline constexpr float kE4m3Max = 448.0f;

constexpr bool e4m3_is_nan(uint8_t value) { return (value & 0x7fu) == 0x7fu; }

constexpr float e4m3_to_f32(uint8_t value) {
  const uint32_t sign = (value & 0x80u) << 24;
  const uint32_t magnitude = value & 0x7fu;
  if (magnitude < 8) {
    const float size = static_cast<float>(magnitude) * 0x1p-9f;
    return sign != 0 ? -size : size;
  }
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

}  // namespace weft::kernels
