// Row-wise ops: the promised order once more as scalars, bit by bit, and closeness to double.
#include "kernels/elementwise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/gemm.h"
#include "kernels/reference/elementwise.h"
#include "proto/vocab/random.h"
#include "tests/kernels/each_instruction_set.h"

namespace weft::kernels {
namespace {

uint32_t bits(float v) { return std::bit_cast<uint32_t>(v); }

std::vector<float> values(int64_t count, uint64_t seed, double scale = 2.0) {
  SplitMix64 random(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& v : out) v = static_cast<float>((random.uniform() - 0.5) * scale);
  return out;
}

void expect_bits(const std::vector<float>& got, const std::vector<float>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(bits(got[i]), bits(want[i])) << what << " at " << i << ": " << got[i] << " against " << want[i];
  }
}

// Worst |got − want| / tolerance, tolerance = `roundings` · 2^−24 · (|want| + size).
void expect_near(const std::vector<float>& got, const std::vector<double>& want, double roundings,
                 double size, const std::string& what) {
  double worst = 0;
  size_t worst_at = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double share = std::fabs(got[i] - want[i]) / (roundings * 0x1p-24 * (std::fabs(want[i]) + size));
    if (!(share <= worst)) {
      worst = share;
      worst_at = i;
    }
  }
  EXPECT_LE(worst, 1.0) << what << " at " << worst_at << ": " << got[worst_at] << " against "
                        << want[worst_at];
}

// 16 lanes by index mod 16, then the tree 8, 4, 2, 1.
template <typename Term>
float lanes16(const std::vector<float>& x, const Term& add) {
  float lane[16] = {};
  for (size_t i = 0; i < x.size(); ++i) lane[i % 16] = add(x[i], lane[i % 16]);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  }
  return lane[0];
}
float plus(float v, float sum) { return sum + v; }
float plus_square(float v, float sum) { return std::fma(v, v, sum); }

std::vector<float> scalar_rms_norm(const std::vector<float>& x, const std::vector<float>& weight, float eps) {
  const float root = 1.0f / std::sqrt(lanes16(x, plus_square) / static_cast<float>(x.size()) + eps);
  std::vector<float> out;
  for (size_t i = 0; i < x.size(); ++i) out.push_back(x[i] * root * weight[i]);
  return out;
}

std::vector<float> scalar_layer_norm(const std::vector<float>& x, const std::vector<float>& weight,
                                     const std::vector<float>& bias, float eps) {
  const float count = static_cast<float>(x.size());
  const float mean = lanes16(x, plus) / count;
  std::vector<float> out;
  for (float v : x) out.push_back(v - mean);
  const float root = 1.0f / std::sqrt(lanes16(out, plus_square) / count + eps);
  for (size_t i = 0; i < x.size(); ++i) out[i] = std::fma(out[i] * root, weight[i], bias[i]);
  return out;
}

const std::vector<int64_t> kWidths = {1, 2, 3, 7, 15, 16, 17, 31, 32, 40, 128, 191, 512, 1000};

TEST(RmsNorm, HasItsOrderAndIsNearDouble) {
  test::each_instruction_set([&] {
    for (int64_t width : kWidths) {
      const auto x = values(width, static_cast<uint64_t>(width)), weight = values(width, 77);
      std::vector<float> out(x.size());
      rms_norm(x.data(), width, weight.data(), 1e-6f, 1, width, out.data(), width);
      expect_bits(out, scalar_rms_norm(x, weight, 1e-6f), "width " + std::to_string(width));
      expect_near(out, reference::rms_norm(x, weight, static_cast<double>(1e-6f)),
                  8.0 + static_cast<double>(width) / 16, 0, "width " + std::to_string(width));
      std::vector<float> in_place = x;
      rms_norm(in_place.data(), width, weight.data(), 1e-6f, 1, width, in_place.data(), width);
      expect_bits(in_place, out, "in place");
    }
  });
}

TEST(LayerNorm, HasItsOrderAndIsNearDouble) {
  test::each_instruction_set([&] {
    for (int64_t width : kWidths) {
      const auto x = values(width, static_cast<uint64_t>(width)), weight = values(width, 78),
                 bias = values(width, 79);
      std::vector<float> out(x.size());
      layer_norm(x.data(), width, weight.data(), bias.data(), 1e-6f, 1, width, out.data(), width);
      expect_bits(out, scalar_layer_norm(x, weight, bias, 1e-6f), "width " + std::to_string(width));
      // One or two values may lie arbitrarily near their mean: double only where the variance is not tiny.
      if (width > 2) {
        expect_near(out, reference::layer_norm(x, weight, bias, static_cast<double>(1e-6f)),
                    8.0 + static_cast<double>(width) / 16, 4, "width " + std::to_string(width));
      }
      std::vector<float> in_place = x;
      layer_norm(in_place.data(), width, weight.data(), bias.data(), 1e-6f, 1, width, in_place.data(), width);
      expect_bits(in_place, out, "in place");
    }
  });
}

TEST(Norms, RowsAreApartAndStridesAreLeftAlone) {
  test::each_instruction_set([&] {
    constexpr int64_t kRows = 3, kWidth = 21, kIn = 25, kOut = 30;
    const auto x = values(kRows * kIn, 5), weight = values(kWidth, 6), bias = values(kWidth, 7);
    std::vector<float> rms(kRows * kOut, 9.0f), layer(kRows * kOut, 9.0f);
    rms_norm(x.data(), kIn, weight.data(), 1e-5f, kRows, kWidth, rms.data(), kOut);
    layer_norm(x.data(), kIn, weight.data(), bias.data(), 1e-5f, kRows, kWidth, layer.data(), kOut);
    for (int64_t r = 0; r < kRows; ++r) {
      const std::vector<float> row(x.begin() + r * kIn, x.begin() + r * kIn + kWidth);
      std::vector<float> want = scalar_rms_norm(row, weight, 1e-5f),
                         layer_want = scalar_layer_norm(row, weight, bias, 1e-5f);
      want.resize(kOut, 9.0f);
      layer_want.resize(kOut, 9.0f);
      expect_bits({rms.begin() + r * kOut, rms.begin() + (r + 1) * kOut}, want, "rms row");
      expect_bits({layer.begin() + r * kOut, layer.begin() + (r + 1) * kOut}, layer_want, "layer row");
    }
  });
}

TEST(Rope, BothLayoutsHaveTheirOrderAndAreNearDouble) {
  test::each_instruction_set([&] {
    for (int64_t width : {2, 6, 8, 32, 34, 64, 70, 128}) {
      const auto x = values(width, static_cast<uint64_t>(width));
      std::vector<double> angles;
      std::vector<float> cosine, sine;
      for (int64_t j = 0; j < width / 2; ++j) {
        angles.push_back(0.37 * static_cast<double>(j) + 0.1);
        cosine.push_back(static_cast<float>(std::cos(angles.back())));
        sine.push_back(static_cast<float>(std::sin(angles.back())));
      }
      for (RopeLayout layout : {RopeLayout::kInterleaved, RopeLayout::kHalfSplit}) {
        const bool interleaved = layout == RopeLayout::kInterleaved;
        std::vector<float> got = x, want = x;
        rope(got.data(), width, cosine.data(), sine.data(), layout);
        for (size_t j = 0; j < cosine.size(); ++j) {
          const size_t a = interleaved ? 2 * j : j, b = interleaved ? 2 * j + 1 : j + cosine.size();
          want[a] = std::fma(x[a], cosine[j], -(x[b] * sine[j]));
          want[b] = std::fma(x[b], cosine[j], x[a] * sine[j]);
        }
        expect_bits(got, want, "width " + std::to_string(width));
        expect_near(got, reference::rope(x, angles, interleaved), 4, 2, "width " + std::to_string(width));
      }
    }
  });
}

TEST(Swiglu, HasItsOrderAndIsNearDouble) {
  test::each_instruction_set([&] {
    for (int64_t width : kWidths) {
      auto gate = values(width, 3, 40.0);
      const auto up = values(width, 4);
      gate[0] = -200.0f;  // exp(200) is infinite: silu is −0
      std::vector<float> out(gate.size(), 5.0f), want;
      swiglu(gate.data(), width, up.data(), width, 1, width, out.data(), width);
      for (size_t i = 0; i < gate.size(); ++i) {
        want.push_back(gate[i] / (1.0f + exp2(gate[i] * -0x1.715476p+0f)) * up[i]);
      }
      expect_bits(out, want, "width " + std::to_string(width));
      // e^−g through a rounded g · log2 e: the argument's error (40 · 1.44 · 2^−24) is relative in the
      // result.
      expect_near(out, reference::swiglu(gate, up), 8 + 20 * 1.5, 1e-6, "width " + std::to_string(width));
      std::vector<float> in_place = gate;
      swiglu(in_place.data(), width, up.data(), width, 1, width, in_place.data(), width);
      expect_bits(in_place, out, "in place");
    }
  });
}

TEST(Swiglu, StridesOfTwoHalvesOfOneRow) {
  test::each_instruction_set([&] {
    const auto both = values(2 * 40, 8);  // rows of gate ‖ up, 20 each
    std::vector<float> out(2 * 20), want(20);
    swiglu(both.data(), 40, both.data() + 20, 40, 2, 20, out.data(), 20);
    swiglu(both.data() + 40, 20, both.data() + 60, 20, 1, 20, want.data(), 20);
    expect_bits({out.begin() + 20, out.end()}, want, "second row");
  });
}

TEST(AddAxpyScale, AreElementByElement) {
  test::each_instruction_set([&] {
    for (int64_t width : kWidths) {
      const auto x = values(width, 1), y = values(width, 2);
      std::vector<float> sum = y, fused = y, scaled = x, want_sum, want_fused, want_scaled;
      sum.push_back(4.0f);
      add(sum.data(), x.data(), width);
      EXPECT_EQ(sum.back(), 4.0f);
      sum.pop_back();
      axpy(0.3f, x.data(), fused.data(), width);
      scale(scaled.data(), 0.7f, width);
      for (size_t i = 0; i < x.size(); ++i) {
        want_sum.push_back(y[i] + x[i]);
        want_fused.push_back(std::fma(0.3f, x[i], y[i]));
        want_scaled.push_back(x[i] * 0.7f);
      }
      expect_bits(sum, want_sum, "add");
      expect_bits(fused, want_fused, "axpy");
      expect_bits(scaled, want_scaled, "scale");
    }
  });
}

TEST(AllFinite, FindsOneBadValueAnywhere) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  test::each_instruction_set([&] {
    std::vector<float> row = values(37, 1);
    row[5] = std::numeric_limits<float>::max();
    row[6] = std::numeric_limits<float>::denorm_min();
    EXPECT_TRUE(all_finite(row.data(), 37));
    EXPECT_TRUE(all_finite(row.data(), 0));
    for (size_t i = 0; i < row.size(); ++i) {
      for (float bad : {inf, -inf, nan, -nan}) {
        std::vector<float> broken = row;
        broken[i] = bad;
        EXPECT_FALSE(all_finite(broken.data(), 37)) << bad << " at " << i;
        EXPECT_TRUE(all_finite(broken.data(), static_cast<int64_t>(i)));
      }
    }
  });
}

TEST(AllFinite, OfEitherDType) {
  test::each_instruction_set([&] {
    const std::vector<float> row = values(71, 2);
    EXPECT_TRUE(all_finite(DType::kF32, row.data(), 71));
    std::vector<uint16_t> halves(row.size());
    convert(row.data(), 71, DType::kBF16, halves.data());
    halves[3] = 0x7f7f;  // the largest finite value
    halves[4] = 0xff7f;
    EXPECT_TRUE(all_finite(DType::kBF16, halves.data(), 71));
    for (size_t i = 0; i < halves.size(); ++i) {
      for (const uint16_t bad : {0x7f80, 0xff80, 0x7fc0, 0xff81}) {  // ±infinity, NaN
        std::vector<uint16_t> broken = halves;
        broken[i] = bad;
        EXPECT_FALSE(all_finite(DType::kBF16, broken.data(), 71)) << bad << " at " << i;
        EXPECT_TRUE(all_finite(DType::kBF16, broken.data(), static_cast<int64_t>(i)));
      }
    }
    std::vector<float> broken = row;
    broken[70] = std::numeric_limits<float>::infinity();
    EXPECT_FALSE(all_finite(DType::kF32, broken.data(), 71));
  });
}

TEST(Sigmoid, ScalarAndRowAgreeAndAreNearDouble) {
  test::each_instruction_set([&] {
    auto x = values(333, 9, 60.0);
    x[0] = -500.0f;
    x[1] = 500.0f;
    std::vector<float> row(x.size());
    sigmoid(x.data(), row.data(), 333);
    std::vector<double> want;
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_EQ(bits(row[i]), bits(sigmoid(x[i]))) << x[i];
      want.push_back(1 / (1 + std::exp(-static_cast<double>(x[i]))));
    }
    EXPECT_EQ(row[0], 0.0f);
    EXPECT_EQ(row[1], 1.0f);
    expect_near(row, want, 8 + 30 * 1.5, 0x1p-126, "sigmoid");
  });
}

TEST(Hadamard, EqualsTheMatrixAndIsItsOwnInverse) {
  test::each_instruction_set([] {
    SplitMix64 random(8);
    for (int64_t width : {1, 2, 4, 8, 16, 32, 64, 128, 256}) {
      std::vector<float> x, in;
      for (int64_t i = 0; i < width; ++i) in.push_back(static_cast<float>(random.uniform() * 2 - 1));
      x = in;
      hadamard(x.data(), width);
      for (int64_t row = 0; row < width; ++row) {
        double sum = 0;
        for (int64_t column = 0; column < width; ++column) {
          const bool negative = std::popcount(static_cast<uint64_t>(row & column)) % 2 != 0;
          sum += negative ? -static_cast<double>(in[static_cast<size_t>(column)])
                          : static_cast<double>(in[static_cast<size_t>(column)]);
        }
        EXPECT_NEAR(x[static_cast<size_t>(row)], sum / std::sqrt(static_cast<double>(width)), 1e-5) << width;
      }
      hadamard(x.data(), width);
      for (int64_t i = 0; i < width; ++i) {
        EXPECT_NEAR(x[static_cast<size_t>(i)], in[static_cast<size_t>(i)], 1e-5) << width;
      }
    }
  });
}

TEST(Hadamard, HasTheSameBitsOnEveryInstructionSet) {
  std::vector<uint32_t> first;
  test::each_instruction_set([&] {
    SplitMix64 random(9);
    std::vector<float> x;
    for (int i = 0; i < 128; ++i) x.push_back(static_cast<float>(random.uniform() * 2 - 1));
    hadamard(x.data(), 128);
    std::vector<uint32_t> bits;
    for (float value : x) bits.push_back(std::bit_cast<uint32_t>(value));
    if (first.empty()) first = bits;
    EXPECT_EQ(bits, first);
  });
}

}  // namespace
}  // namespace weft::kernels
