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

// To nearest, ties to even; beyond ±448 to ±448. Infinities and NaN become NaN.
constexpr uint8_t f32_to_e4m3(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  constexpr auto kMax = std::bit_cast<uint32_t>(kE4m3Max);
  if (magnitude > kMax) magnitude = kMax;
  if (magnitude < std::bit_cast<uint32_t>(0x1p-6f)) {
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;  // its last bit is worth 2⁻⁹
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0x1p14f)));
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - (120u << 3)));
}

// Cached values that share a scale, and the least that their largest counts as.
inline constexpr int64_t kFp8Group = 128;
inline constexpr float kFp8LargestMin = 1e-4f;

// The scale of values that reach ±largest: value / scale is at most 448. As a power of two the smallest such
// (the published "ue8m0" form, kept as float32), else largest / 448.
constexpr float fp8_scale(float largest, bool power_of_two) {
  if (!(largest > kFp8LargestMin)) largest = kFp8LargestMin;
  if (!power_of_two) return largest / kE4m3Max;
  const auto bits = std::bit_cast<uint32_t>(largest);
  constexpr uint32_t kFraction = 0x7fffffu, kThreeQuarters = 0x600000u;  // 448 = 1.75 · 2⁸
  return std::bit_cast<float>(((bits >> 23) - 8 + ((bits & kFraction) > kThreeQuarters ? 1 : 0)) << 23);
}

}  // namespace weft::kernels
