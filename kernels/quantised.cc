#include "kernels/quantised.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "kernels/fp8.h"
#include "kernels/quantised_panel.h"
#include "proto/vocab/check.h"

namespace weft::kernels {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls with each panel of the packed form: its first source row and how many of its 16 outputs exist.
template <typename Pack>
void for_panels(int64_t groups, int64_t group_outputs, Pack pack) {
  const int64_t panels = ceil_div(group_outputs, kPanel);
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t p = 0; p < panels; ++p) {
      pack(g * panels + p, g * group_outputs + p * kPanel, std::min(kPanel, group_outputs - p * kPanel));
    }
  }
}

float fp8_scale(const Fp8Source& source, int64_t output, int64_t k_index, int64_t k) {
  return source.scales[output / kFp8Block * ceil_div(k, kFp8Block) + k_index / kFp8Block];
}

uint8_t fp4_code(const Fp4Source& source, int64_t output, int64_t k_index, int64_t k) {
  const uint8_t pair = source.codes[(output * k + k_index) / 2];
  return k_index % 2 == 0 ? pair & 15u : pair >> 4;
}

// An E4M3 scale without its sign as a kFp4 panel holds it: always normal, one more bit of exponent.
uint8_t unsigned_scale(uint8_t e4m3) {
  uint8_t size = e4m3 & 0x7fu;
  if (size >= 8) return static_cast<uint8_t>(size + (2u << 3));  // bias 9 instead of 7
  if (size == 0) return 0;
  unsigned exponent = 3;  // size · 2⁻⁹ = (size / 8) · 2⁻⁶
  for (; size < 8; size = static_cast<uint8_t>(size * 2)) --exponent;
  return static_cast<uint8_t>((exponent << 3) + size - 8);
}

// A code where it lies in its byte of a kFp4 panel.
uint8_t placed_code(uint8_t e2m1, uint8_t scale, bool lower) {
  const unsigned size = (scale & 0x7fu) == 0 ? 0 : e2m1 & 7u;
  const unsigned sign = ((e2m1 >> 3) ^ (scale >> 7)) & 1u;
  return static_cast<uint8_t>(lower ? sign << 6 | size << 3 : sign << 7 | size);
}

}  // namespace

float e2m1_to_f32(uint8_t code) {
  constexpr float kSizes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const float size = kSizes[code & 7u];
  return (code & 8u) != 0 ? -size : size;
}

bool fp8_is_finite(const Fp8Source& source, int64_t outputs, int64_t k) {
  const int64_t scales = ceil_div(outputs, kFp8Block) * ceil_div(k, kFp8Block);
  return std::all_of(source.scales, source.scales + scales,
                     [](float scale) { return std::isfinite(scale * kE4m3Max); }) &&
         std::none_of(source.codes, source.codes + outputs * k, e4m3_is_nan);
}

bool fp4_is_finite(const Fp4Source& source, int64_t outputs, int64_t k) {
  return std::isfinite(source.scale * 6 * kE4m3Max) &&
         std::none_of(source.scales, source.scales + outputs * (k / kFp4Block), e4m3_is_nan);
}

void pack_fp8(int64_t groups, int64_t group_outputs, int64_t k, const Fp8Source& source, void* out) {
  const QuantisedPanel panel(PanelFormat::kFp8, k);
  for_panels(groups, group_outputs, [&](int64_t index, int64_t row, int64_t outputs) {
    std::byte* to = static_cast<std::byte*>(out) + index * panel.bytes();
    std::memset(to, 0, static_cast<size_t>(panel.bytes()));
    for (int64_t block = 0; block < k; block += kFp8Block) {
      std::byte* record = to + panel.record(block);
      for (int64_t o = 0; o < outputs; ++o) {
        const float scale = fp8_scale(source, row + o, block, k);
        std::memcpy(record + o * 4, &scale, sizeof scale);
        for (int64_t i = block; i < std::min(k, block + kFp8Block); ++i) {
          record[QuantisedPanel::kScaleBytes + QuantisedPanel::fp8_code(i - block, o)] =
              std::byte{source.codes[(row + o) * k + i]};
        }
      }
    }
  });
}

void pack_fp4(int64_t groups, int64_t group_outputs, int64_t k, const Fp4Source& source, void* out) {
  CHECK_EQ(k % kFp4Block, 0);
  const QuantisedPanel panel(PanelFormat::kFp4, k);
  for_panels(groups, group_outputs, [&](int64_t index, int64_t row, int64_t outputs) {
    std::byte* to = static_cast<std::byte*>(out) + index * panel.bytes();
    std::memset(to, 0, static_cast<size_t>(panel.bytes()));
    for (int64_t o = 0; o < outputs; ++o) {
      std::memcpy(to + o * 4, &source.scale, sizeof source.scale);
      for (int64_t block = 0; block < k; block += kFp4Block) {
        std::byte* record = to + panel.record(block);
        const int64_t first = block % panel.record_k();
        const uint8_t scale = source.scales[((row + o) * k + block) / kFp4Block];
        record[first / kFp4Block * kPanel + o] = std::byte{unsigned_scale(scale)};
        for (int64_t i = 0; i < kFp4Block; ++i) {
          const auto [byte, lower] = QuantisedPanel::fp4_code(first + i, o);
          record[QuantisedPanel::kScaleBytes + byte] |=
              std::byte{placed_code(fp4_code(source, row + o, block + i, k), scale, lower)};
        }
      }
    }
  });
}

void dequantise_fp8(const Fp8Source& source, int64_t outputs, int64_t k, float* out) {
  for (int64_t o = 0; o < outputs; ++o) {
    for (int64_t i = 0; i < k; ++i)
      out[o * k + i] = e4m3_to_f32(source.codes[o * k + i]) * fp8_scale(source, o, i, k);
  }
}

void dequantise_fp4(const Fp4Source& source, int64_t outputs, int64_t k, float* out) {
  for (int64_t o = 0; o < outputs; ++o) {
    for (int64_t i = 0; i < k; ++i) {
      out[o * k + i] = e2m1_to_f32(fp4_code(source, o, i, k)) *
                       e4m3_to_f32(source.scales[(o * k + i) / kFp4Block]) * source.scale;
    }
  }
}

}  // namespace weft::kernels
