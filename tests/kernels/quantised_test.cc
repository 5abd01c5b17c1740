// GEMM over quantised weights: the promised order of additions, bit by bit, whatever the shape, slice, row
// count, thread count and instruction set; every code; closeness to a product in double.
//
// The scalar walk below is the contract of kernels/gemm.h written down once more, from the codes as a
// checkpoint has them.
#include "kernels/quantised.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/bf16.h"
#include "kernels/fp8.h"
#include "kernels/reference/gemm.h"
#include "proto/vocab/random.h"
#include "tests/kernels/each_instruction_set.h"
#include "tests/support/thread_parallel.h"

namespace weft::kernels {
namespace {

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};

int64_t blocks_of(int64_t count) { return (count + 127) / 128; }

struct Kind {
  PanelFormat format;
  DType dtype;
};

// A quantised matrix [groups · group_outputs][k] and inputs [rows][k], rounded to the dtype.
struct Problem {
  Kind kind;
  int64_t groups, group_outputs, k, rows;
  std::vector<uint8_t> codes, small_scales;
  std::vector<float> scales, x;  // kFp8: of the blocks; kFp4: one
  std::vector<uint16_t> x_bf16;
  std::unique_ptr<void, FreeDeleter> packed;

  Problem(Kind kind, int64_t groups, int64_t group_outputs, int64_t k, int64_t rows, uint64_t seed)
      : kind(kind), groups(groups), group_outputs(group_outputs), k(k), rows(rows) {
    SplitMix64 random(seed);
    const auto e4m3 = [&](uint64_t among) {
      const auto code = static_cast<uint8_t>(random.below(among));
      return e4m3_is_nan(code) ? uint8_t{1} : code;
    };
    const int64_t outputs = groups * group_outputs;
    const bool fp8 = kind.format == PanelFormat::kFp8;
    codes.resize(static_cast<size_t>(fp8 ? outputs * k : outputs * k / 2));
    for (uint8_t& code : codes) code = fp8 ? e4m3(256) : static_cast<uint8_t>(random.below(256));
    scales.resize(static_cast<size_t>(fp8 ? blocks_of(outputs) * blocks_of(k) : 1));
    for (float& scale : scales) scale = static_cast<float>(random.uniform() + 0.5) * 0.01f;
    if (!fp8) {
      small_scales.resize(static_cast<size_t>(outputs * k / 16));
      for (uint8_t& scale : small_scales) scale = e4m3(128);
    }
    x.resize(static_cast<size_t>(rows * k));
    for (float& v : x) {
      v = static_cast<float>((random.uniform() - 0.5) *
                             std::ldexp(1.0, static_cast<int>(random.below(12)) - 6));
      if (kind.dtype == DType::kBF16) v = bf16_to_f32(f32_to_bf16(v));
      x_bf16.push_back(f32_to_bf16(v));
    }
    const size_t bytes = packed_bytes(kind.dtype, groups, group_outputs, k, kind.format);
    EXPECT_EQ(bytes % 64, 0u);
    packed.reset(std::aligned_alloc(64, bytes));
    std::memset(packed.get(), 0xff, bytes);  // NaN wherever packing forgets a padding
    fp8 ? pack_fp8(groups, group_outputs, k, fp8_source(), packed.get())
        : pack_fp4(groups, group_outputs, k, fp4_source(), packed.get());
  }

  Fp8Source fp8_source() const { return {codes.data(), scales.data()}; }
  Fp4Source fp4_source() const { return {codes.data(), small_scales.data(), scales[0]}; }

  // The weight that a walk multiplies with.
  float walked(int64_t output, int64_t i) const {
    if (kind.format == PanelFormat::kFp8) return e4m3_to_f32(codes[static_cast<size_t>(output * k + i)]);
    const uint8_t pair = codes[static_cast<size_t>((output * k + i) / 2)];
    return e2m1_to_f32(i % 2 == 0 ? pair & 15 : pair >> 4) *
           e4m3_to_f32(small_scales[static_cast<size_t>((output * k + i) / 16)]);
  }

  float walk(int64_t row, int64_t output, int64_t begin, int64_t end) const {
    const float* a = x.data() + row * k;
    float sum = 0;
    if (kind.dtype == DType::kF32) {
      for (int64_t i = begin; i < end; ++i) sum = std::fma(a[i], walked(output, i), sum);
      return sum;
    }
    for (int64_t i = begin; i < end; i += 2) {
      const bool odd = i + 1 < end;
      sum = std::fma(odd ? a[i + 1] : 0.0f, odd ? walked(output, i + 1) : 0.0f, sum);
      sum = std::fma(a[i], walked(output, i), sum);
    }
    return sum;
  }

  float expected(int64_t row, int64_t output, int64_t begin, int64_t end) const {
    if (kind.format == PanelFormat::kFp4) {
      return begin == end ? 0.0f : std::fma(scales[0], walk(row, output, begin, end), 0.0f);
    }
    float sum = 0;
    for (int64_t at = begin, next = 0; at < end; at = next) {
      next = std::min(end, (at / 128 + 1) * 128);
      const float scale = scales[static_cast<size_t>(output / 128 * blocks_of(k) + at / 128)];
      sum = std::fma(scale, walk(row, output, at, next), sum);
    }
    return sum;
  }

  Gemm whole() const {
    Gemm p;
    p.weights = {kind.dtype, groups, group_outputs, k, packed.get(), kind.format};
    p.group_end = groups;
    p.rows = rows;
    p.x_stride = k;
    p.x = x_at(0, 0);
    return p;
  }
  const void* x_at(int64_t row, int64_t column) const {
    const int64_t i = row * k + column;
    return kind.dtype == DType::kF32 ? static_cast<const void*>(x.data() + i) : x_bf16.data() + i;
  }
};

uint32_t bits(float v) { return std::bit_cast<uint32_t>(v); }

constexpr float kUntouched = -12345.0f;

// Runs `p` (rows from the problem's first) into a fresh y wider than needed; checks all of it.
void expect_walk(const Problem& problem, Gemm p, Parallel& parallel, const std::string& what) {
  const int64_t output_end = p.output_end < 0 ? problem.group_outputs : p.output_end;
  const int64_t k_end = p.k_end < 0 ? problem.k : p.k_end;
  const int64_t width = output_end - p.output_begin;
  const int64_t columns = (p.group_end - p.group_begin) * width;
  std::vector<float> y(static_cast<size_t>(p.rows * (columns + 5) + 5), kUntouched);
  p.y = y.data();
  p.y_stride = columns + 5;
  gemm(p, parallel);
  for (int64_t row = 0; row < p.rows; ++row) {
    for (int64_t c = 0; c < columns + 5; ++c) {
      const float got = y[static_cast<size_t>(row * p.y_stride + c)];
      if (c >= columns) {
        ASSERT_EQ(got, kUntouched) << what << ": wrote past the row at " << row << ", " << c;
        continue;
      }
      const int64_t output = (p.group_begin + c / width) * problem.group_outputs + p.output_begin + c % width;
      const float want = problem.expected(row, output, p.k_begin, k_end);
      ASSERT_EQ(bits(got), bits(want))
          << what << ": row " << row << " column " << c << ": " << got << " against " << want;
    }
  }
}

class QuantisedGemm : public ::testing::TestWithParam<Kind> {
 protected:
  bool fp4() const { return GetParam().format == PanelFormat::kFp4; }
};
INSTANTIATE_TEST_SUITE_P(Kinds, QuantisedGemm,
                         ::testing::Values(Kind{PanelFormat::kFp8, DType::kF32},
                                           Kind{PanelFormat::kFp8, DType::kBF16},
                                           Kind{PanelFormat::kFp4, DType::kF32},
                                           Kind{PanelFormat::kFp4, DType::kBF16}),
                         [](const auto& info) {
                           return std::string(info.param.format == PanelFormat::kFp8 ? "fp8_" : "fp4_") +
                                  dtype_name(info.param.dtype);
                         });

TEST_P(QuantisedGemm, IsTheScalarWalkForOddShapes) {
  test::each_instruction_set([&] {
    uint64_t seed = 1;
    for (const int64_t outputs : {1, 16, 17, 40, 83, 130}) {
      for (const int64_t units : {1, 2, 3, 7, 9, 21, 40}) {
        for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 13}) {
          // Codes of four bits come sixteen at a time; those of eight in any number.
          const int64_t k = fp4() ? units * 16 : units * 15 + static_cast<int64_t>(seed % 3);
          const Problem problem(GetParam(), 1, outputs, k, rows, ++seed);
          expect_walk(problem, problem.whole(), serial(),
                      "outputs " + std::to_string(outputs) + " k " + std::to_string(k) + " rows " +
                          std::to_string(rows) + " seed " + std::to_string(seed));
          if (HasFatalFailure()) return;
        }
      }
    }
  });
}

// Long k crosses the pieces that are decoded at a time.
TEST_P(QuantisedGemm, IsTheScalarWalkAcrossPiecesOfK) {
  test::each_instruction_set([&] {
    for (const int64_t k : {512, 1040, 2064}) {
      for (const int64_t rows : {1, 20}) {
        const Problem problem(GetParam(), 1, 88, fp4() ? k : k - 9, rows, static_cast<uint64_t>(k + rows));
        expect_walk(problem, problem.whole(), serial(), std::to_string(k) + " " + std::to_string(rows));
        if (HasFatalFailure()) return;
      }
    }
  });
}

TEST_P(QuantisedGemm, SlicesOfGroupsOutputsAndKAreViews) {
  test::each_instruction_set([&] {
    SplitMix64 random(11);
    for (int turn = 0; turn < 120; ++turn) {
      const uint64_t seed = random.next();
      SplitMix64 draw(seed);
      const auto between = [&](int64_t low, int64_t high) {
        return low + static_cast<int64_t>(draw.below(static_cast<uint64_t>(high - low + 1)));
      };
      const int64_t longest =
          turn % 4 == 0 ? 1100 : 300;  // sometimes beyond the pieces that are decoded at a time
      const int64_t k = fp4() ? between(1, longest / 16) * 16 : between(1, longest);
      const Problem problem(GetParam(), between(1, 5), between(1, 70), k, between(1, 20), seed);
      Gemm p = problem.whole();
      p.group_begin = between(0, problem.groups);
      p.group_end = between(p.group_begin, problem.groups);
      p.output_begin = between(0, (problem.group_outputs - 1) / 16) * 16;
      p.output_end = between(p.output_begin, problem.group_outputs);
      p.k_begin = between(0, problem.k / 2) * 2;
      p.k_end = between(p.k_begin, problem.k);
      if (GetParam().dtype == DType::kBF16 && p.k_end != problem.k) p.k_end -= p.k_end % 2;
      p.x = problem.x_at(0, p.k_begin);
      test::ThreadParallel parallel(static_cast<int>(between(1, 3)));
      expect_walk(problem, p, parallel, "seed " + std::to_string(seed));
      if (HasFatalFailure()) return;
    }
  });
}

TEST_P(QuantisedGemm, RowsDoNotKnowHowManyTheyAre) {
  test::each_instruction_set([&] {
    const Problem problem(GetParam(), 1, 100, 304, 512, 5);
    Gemm p = problem.whole();
    std::vector<float> all(512 * 100);
    p.y = all.data();
    p.y_stride = 100;
    gemm(p, serial());
    for (const int64_t rows : {1, 2, 7, 64, 65}) {
      for (const int64_t first : {int64_t{0}, (512 - rows) / 2, 512 - rows}) {
        std::vector<float> some(static_cast<size_t>(rows * 100));
        p.rows = rows;
        p.x = problem.x_at(first, 0);
        p.y = some.data();
        gemm(p, serial());
        ASSERT_EQ(std::memcmp(some.data(), all.data() + first * 100, some.size() * sizeof(float)), 0)
            << rows << " rows from " << first;
      }
    }
  });
}

TEST_P(QuantisedGemm, ThreadsChangeNoBit) {
  for (const auto& [outputs, rows] : {std::pair<int64_t, int64_t>{1000, 3}, {40, 300}, {400, 70}}) {
    const Problem problem(GetParam(), 1, outputs, 528, rows, 21);
    for (const int threads : {1, 2, 8}) {
      test::ThreadParallel parallel(threads);
      expect_walk(problem, problem.whole(), parallel, std::to_string(threads) + " threads");
      if (HasFatalFailure()) return;
    }
  }
}

// Codes and scales dequantised one by one, then multiplied in double.
TEST_P(QuantisedGemm, IsNearTheProductInDouble) {
  test::each_instruction_set([&] {
    constexpr int64_t kRows = 33, kOutputs = 200, kK = 784;
    const Problem problem(GetParam(), 2, kOutputs / 2, kK, kRows, 31);
    std::vector<float> w(kOutputs * kK);
    fp4() ? dequantise_fp4(problem.fp4_source(), kOutputs, kK, w.data())
          : dequantise_fp8(problem.fp8_source(), kOutputs, kK, w.data());
    std::vector<float> y(kRows * kOutputs);
    Gemm p = problem.whole();
    p.y = y.data();
    p.y_stride = kOutputs;
    gemm(p, serial());
    std::vector<double> want(y.size()), magnitude(y.size());
    reference::gemm(problem.x.data(), w.data(), kRows, kOutputs, kK, 0, kK, want.data(), magnitude.data());
    double worst = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      worst = std::max(worst, std::fabs(y[i] - want[i]) / (kK * 0x1p-24 * magnitude[i]));
    }
    EXPECT_LE(worst, 1.0);
    EXPECT_GT(worst, 0.0) << "float32 cannot be exact here: is the reference the kernel?";
  });
}

// Each code alone, in each place of a 16-wide panel, times a one.
TEST_P(QuantisedGemm, EveryCodeIsExact) {
  test::each_instruction_set([&] {
    constexpr int64_t kK = 256;
    Problem problem(GetParam(), 1, 16, kK, kK, 3);
    for (int64_t o = 0; o < 16; ++o) {
      for (int64_t i = 0; i < kK; ++i) {
        auto code = static_cast<uint8_t>(i + 16 * o);
        if (fp4()) {
          problem.codes[static_cast<size_t>((o * kK + i) / 2)] = code;
          // Every scale that is a number, over the outputs.
          auto scale = static_cast<uint8_t>(i / 16 * 16 + o);
          problem.small_scales[static_cast<size_t>((o * kK + i) / 16)] = e4m3_is_nan(scale) ? 0 : scale;
        } else {
          problem.codes[static_cast<size_t>(o * kK + i)] = e4m3_is_nan(code) ? 0 : code;
        }
      }
    }
    std::fill(problem.scales.begin(), problem.scales.end(), 1.0f);
    fp4() ? pack_fp4(1, 16, kK, problem.fp4_source(), problem.packed.get())
          : pack_fp8(1, 16, kK, problem.fp8_source(), problem.packed.get());
    for (int64_t row = 0; row < kK; ++row) {
      for (int64_t i = 0; i < kK; ++i) {
        problem.x[static_cast<size_t>(row * kK + i)] = row == i ? 1.0f : 0.0f;
        problem.x_bf16[static_cast<size_t>(row * kK + i)] = row == i ? 0x3f80 : 0;
      }
    }
    std::vector<float> y(kK * 16);
    Gemm p = problem.whole();
    p.y = y.data();
    p.y_stride = 16;
    gemm(p, serial());
    for (int64_t i = 0; i < kK; ++i) {
      for (int64_t o = 0; o < 16; ++o) {
        EXPECT_EQ(y[static_cast<size_t>(i * 16 + o)], problem.walked(o, i)) << "k " << i << " output " << o;
      }
    }
  });
}

// By the definition: sign · (1 + fraction / 8) · 2^(exponent − 7), or fraction / 8 · 2⁻⁶.
TEST(E4m3, EveryCode) {
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, fraction = code & 7;
    const float got = e4m3_to_f32(static_cast<uint8_t>(code));
    if (exponent == 15 && fraction == 7) {
      EXPECT_TRUE(std::isnan(got));
      EXPECT_TRUE(e4m3_is_nan(static_cast<uint8_t>(code)));
      continue;
    }
    EXPECT_FALSE(e4m3_is_nan(static_cast<uint8_t>(code)));
    const double size =
        exponent == 0 ? std::ldexp(fraction / 8.0, -6) : std::ldexp(1 + fraction / 8.0, exponent - 7);
    EXPECT_EQ(bits(got), bits(static_cast<float>(code < 128 ? size : -size))) << code;
    EXPECT_EQ(bits(bf16_to_f32(f32_to_bf16(got))), bits(got)) << code;
  }
  EXPECT_EQ(e4m3_to_f32(0x7e), kE4m3Max);
  EXPECT_EQ(e4m3_to_f32(0x38), 1.0f);
}

TEST(Quantised, SizesOfPanels) {
  // 16 outputs × 128 codes and 16 scales; a ragged block is padded to four k.
  EXPECT_EQ(packed_bytes(DType::kBF16, 1, 16, 128, PanelFormat::kFp8), 2048u + 64);
  EXPECT_EQ(packed_bytes(DType::kF32, 3, 17, 129, PanelFormat::kFp8), 6u * (2048 + 64 + 64 + 64));
  // 64 bytes of scales of the matrix, then for each 64 k: 64 bytes of scales, 512 of codes.
  EXPECT_EQ(packed_bytes(DType::kBF16, 1, 16, 64, PanelFormat::kFp4), 64u + 576);
  EXPECT_EQ(packed_bytes(DType::kF32, 2, 40, 80, PanelFormat::kFp4), 6u * (64 + 2 * 576));
}

TEST(Quantised, WhatIsNotANumberIsSeen) {
  Problem fp8({PanelFormat::kFp8, DType::kF32}, 1, 130, 140, 1, 1);
  const auto fp8_good = [&] { return fp8_is_finite(fp8.fp8_source(), 130, 140); };
  EXPECT_TRUE(fp8_good());
  for (const float bad : {NAN, INFINITY, -INFINITY, std::numeric_limits<float>::max()}) {
    for (float& scale : fp8.scales) {
      const float good = std::exchange(scale, bad);
      EXPECT_FALSE(fp8_good());
      scale = good;
    }
  }
  for (const uint8_t bad : {0x7f, 0xff}) {
    const uint8_t good = std::exchange(fp8.codes.back(), bad);
    EXPECT_FALSE(fp8_good());
    fp8.codes.back() = good;
  }
  EXPECT_TRUE(fp8_good());

  Problem fp4({PanelFormat::kFp4, DType::kF32}, 1, 3, 48, 1, 1);
  const auto fp4_good = [&] { return fp4_is_finite(fp4.fp4_source(), 3, 48); };
  EXPECT_TRUE(fp4_good());
  fp4.small_scales.back() = 0xff;
  EXPECT_FALSE(fp4_good());
  fp4.small_scales.back() = 0;
  fp4.scales[0] = NAN;
  EXPECT_FALSE(fp4_good());
}

}  // namespace
}  // namespace weft::kernels
