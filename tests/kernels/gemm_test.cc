// GEMM: the promised order of additions, bit by bit, and closeness to a product in double.
//
// The scalar walk below is the contract of kernels/gemm.h written down once more; every kernel, shape, slice
// and thread count must give its bits.
#include "kernels/gemm.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/bf16.h"
#include "kernels/reference/gemm.h"
#include "proto/vocab/random.h"
#include "tests/kernels/each_instruction_set.h"
#include "tests/support/thread_parallel.h"

namespace weft::kernels {
namespace {

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};

// A matrix [groups · group_outputs][k] and inputs [rows][k]; for bf16 the float values are already rounded.
struct Problem {
  DType dtype;
  int64_t groups, group_outputs, k, rows;
  std::vector<float> w, x;
  std::vector<uint16_t> x_bf16;
  std::unique_ptr<void, FreeDeleter> packed;

  Problem(DType dtype, int64_t groups, int64_t group_outputs, int64_t k, int64_t rows, uint64_t seed)
      : dtype(dtype), groups(groups), group_outputs(group_outputs), k(k), rows(rows) {
    SplitMix64 random(seed);
    w = values(groups * group_outputs * k, random);
    x = values(rows * k, random);
    for (float v : x) x_bf16.push_back(f32_to_bf16(v));
    const size_t bytes = packed_bytes(dtype, groups, group_outputs, k);
    EXPECT_EQ(bytes % 64, 0u);
    packed.reset(std::aligned_alloc(64, bytes));
    std::memset(packed.get(), 0xff, bytes);  // NaN wherever packing forgets a padding
    const PackSource source{.data = w.data(), .group_stride = group_outputs * k, .output_stride = k};
    pack_matrix(dtype, groups, group_outputs, k, source, packed.get(), 0, groups);
  }

  std::vector<float> values(int64_t count, SplitMix64& random) const {
    std::vector<float> out(static_cast<size_t>(count));
    for (float& v : out) {
      // Mixed magnitudes and signs, so that another order of additions shows.
      v = static_cast<float>((random.uniform() - 0.5) *
                             std::ldexp(1.0, static_cast<int>(random.below(12)) - 6));
      if (dtype == DType::kBF16) v = bf16_to_f32(f32_to_bf16(v));
    }
    return out;
  }

  PackedMatrix matrix() const { return {dtype, groups, group_outputs, k, packed.get()}; }
  Gemm whole() const {
    Gemm p;
    p.weights = matrix();
    p.group_end = groups;
    p.rows = rows;
    p.x_stride = k;
    p.x = x_at(0, 0);
    return p;
  }
  const void* x_at(int64_t row, int64_t column) const {
    const int64_t i = row * k + column;
    return dtype == DType::kF32 ? static_cast<const void*>(x.data() + i) : x_bf16.data() + i;
  }

  // The order of additions, one scalar at a time.
  float walk(int64_t row, int64_t output, int64_t k_begin, int64_t k_end) const {
    const float* a = x.data() + row * k;
    const float* b = w.data() + output * k;
    float sum = 0;
    if (dtype == DType::kF32) {
      for (int64_t i = k_begin; i < k_end; ++i) sum = std::fma(a[i], b[i], sum);
    } else {
      for (int64_t i = k_begin; i < k_end; i += 2) {
        const bool odd = i + 1 < k_end;
        sum = std::fma(odd ? a[i + 1] : 0.0f, odd ? b[i + 1] : 0.0f, sum);
        sum = std::fma(a[i], b[i], sum);
      }
    }
    return sum;
  }
};

uint32_t bits(float v) { return std::bit_cast<uint32_t>(v); }

constexpr float kUntouched = -12345.0f;

// Runs `p` into a fresh y wider than needed and checks every element, and that nothing else was written.
void expect_walk(const Problem& problem, Gemm p, Parallel& parallel, const std::string& what) {
  const int64_t output_end = p.output_end < 0 ? problem.group_outputs : p.output_end;
  const int64_t k_end = p.k_end < 0 ? problem.k : p.k_end;
  const int64_t width = output_end - p.output_begin;
  const int64_t columns = (p.group_end - p.group_begin) * width;
  const int64_t row_begin =
      (static_cast<const char*>(p.x) - static_cast<const char*>(problem.x_at(0, p.k_begin))) /
      static_cast<int64_t>(dtype_bytes(problem.dtype)) / problem.k;
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
      const float want = problem.walk(row_begin + row, output, p.k_begin, k_end);
      ASSERT_EQ(bits(got), bits(want))
          << what << ": row " << row << " column " << c << ": " << got << " against " << want;
    }
  }
}

class GemmTest : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, GemmTest, ::testing::Values(DType::kF32, DType::kBF16),
                         [](const auto& info) { return dtype_name(info.param); });

TEST_P(GemmTest, IsTheScalarWalkForOddShapes) {
  test::each_instruction_set([&] {
    uint64_t seed = 1;
    for (int64_t outputs : {1, 15, 16, 17, 40, 64, 83, 130}) {
      for (int64_t k : {1, 2, 3, 7, 64, 191}) {
        for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 11, 13}) {
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

// Long k crosses blocks, whose accumulators wait in y.
TEST_P(GemmTest, IsTheScalarWalkAcrossBlocksOfK) {
  test::each_instruction_set([&] {
    for (int64_t k : {1024, 2047, 4099}) {
      for (int64_t rows : {1, 7, 20}) {
        const Problem problem(GetParam(), 1, 88, k, rows, static_cast<uint64_t>(k + rows));
        expect_walk(problem, problem.whole(), serial(),
                    "k " + std::to_string(k) + " rows " + std::to_string(rows));
        if (HasFatalFailure()) return;
      }
    }
  });
}

TEST_P(GemmTest, RowsDoNotKnowHowManyTheyAre) {
  test::each_instruction_set([&] {
    const Problem problem(GetParam(), 1, 100, 300, 512, 5);
    Gemm p = problem.whole();
    std::vector<float> all(512 * 100);
    p.y = all.data();
    p.y_stride = 100;
    gemm(p, serial());
    for (int64_t rows : {1, 2, 7, 64, 65, 512}) {
      for (int64_t first : {int64_t{0}, (512 - rows) / 2, 512 - rows}) {
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

// Products that run as one job: each is what it is alone, whatever their number, sizes and the threads.
TEST_P(GemmTest, ManyAtOnceAreEachAlone) {
  test::each_instruction_set([&] {
    SplitMix64 random(23);
    for (int turn = 0; turn < 40; ++turn) {
      const uint64_t seed = random.next();
      SplitMix64 draw(seed);
      const auto between = [&](int64_t low, int64_t high) {
        return low + static_cast<int64_t>(draw.below(static_cast<uint64_t>(high - low + 1)));
      };
      std::vector<Problem> problems;
      for (int64_t i = between(0, 9); i >= 0; --i) {
        problems.emplace_back(GetParam(), 1, between(1, 300), between(1, 200), between(0, 30), draw.next());
      }
      std::vector<Gemm> products;
      std::vector<std::vector<float>> alone, together;
      for (const Problem& problem : problems) {
        Gemm p = problem.whole();
        p.y_stride = problem.group_outputs + 3;
        alone.emplace_back(static_cast<size_t>(p.rows * p.y_stride), kUntouched);
        together.push_back(alone.back());
        p.y = alone.back().data();
        gemm(p, serial());
        p.y = together.back().data();
        products.push_back(p);
      }
      test::ThreadParallel threads(static_cast<int>(between(1, 5)));
      gemm(products, threads);
      for (size_t i = 0; i < products.size(); ++i) {
        // Finite numbers, and none is −0: equal values are equal bits.
        ASSERT_EQ(together[i], alone[i]) << "product " << i << " of seed " << seed;
      }
    }
  });
}

TEST_P(GemmTest, SlicesOfGroupsOutputsAndKAreViews) {
  test::each_instruction_set([&] {
    SplitMix64 random(11);
    for (int turn = 0; turn < 200; ++turn) {
      const uint64_t seed = random.next();
      SplitMix64 draw(seed);
      const auto between = [&](int64_t low, int64_t high) {
        return low + static_cast<int64_t>(draw.below(static_cast<uint64_t>(high - low + 1)));
      };
      const Problem problem(GetParam(), between(1, 5), between(1, 70), between(1, 90), between(1, 20), seed);
      Gemm p = problem.whole();
      p.group_begin = between(0, problem.groups);
      p.group_end = between(p.group_begin, problem.groups);
      p.output_begin = between(0, (problem.group_outputs - 1) / 16) * 16;
      p.output_end = between(p.output_begin, problem.group_outputs);
      p.k_begin = between(0, problem.k / 2) * 2;
      p.k_end = between(p.k_begin, problem.k);
      if (GetParam() == DType::kBF16 && p.k_end != problem.k) p.k_end -= p.k_end % 2;
      p.x = problem.x_at(0, p.k_begin);
      test::ThreadParallel parallel(static_cast<int>(between(1, 3)));
      expect_walk(problem, p, parallel, "seed " + std::to_string(seed));
      if (HasFatalFailure()) return;
    }
  });
}

// Large enough that the work is really cut into tasks, by panels and by rows.
TEST_P(GemmTest, ThreadsChangeNoBit) {
  for (const auto& [outputs, rows] : {std::pair<int64_t, int64_t>{1000, 3}, {40, 600}, {700, 70}}) {
    const Problem problem(GetParam(), 1, outputs, 515, rows, 21);
    for (int threads : {1, 2, 3, 8}) {
      test::ThreadParallel parallel(threads);
      expect_walk(problem, problem.whole(), parallel, std::to_string(threads) + " threads");
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(GemmTest, IsNearTheProductInDouble) {
  test::each_instruction_set([&] {
    const Problem problem(GetParam(), 1, 200, 777, 33, 31);
    std::vector<float> y(33 * 200);
    Gemm p = problem.whole();
    p.y = y.data();
    p.y_stride = 200;
    gemm(p, serial());
    std::vector<double> want(y.size()), magnitude(y.size());
    reference::gemm(problem.x.data(), problem.w.data(), 33, 200, 777, 0, 777, want.data(), magnitude.data());
    double worst = 0;
    size_t worst_at = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      const double share = std::fabs(y[i] - want[i]) / (777 * 0x1p-24 * magnitude[i]);
      if (share > worst) {
        worst = share;
        worst_at = i;
      }
    }
    EXPECT_LE(worst, 1.0) << "row " << worst_at / 200 << " output " << worst_at % 200 << ": " << y[worst_at]
                          << " against " << want[worst_at];
    EXPECT_GT(worst, 0.0) << "float32 cannot be exact here: is the reference the kernel?";
  });
}

// The instruction flushes whatever the thread's mode; the fused multiply-adds do so because the mode is set.
TEST_P(GemmTest, FlushesDenormals) {
  test::each_instruction_set([&] {
    Problem problem(GetParam(), 1, 16, 2, 1, 1);
    const float tiny = 0x1p-70f;
    std::fill(problem.w.begin(), problem.w.end(), tiny);
    const PackSource source{.data = problem.w.data(), .output_stride = 2};
    pack_matrix(GetParam(), 1, 16, 2, source, problem.packed.get(), 0, 1);
    problem.x = {tiny, tiny};
    problem.x_bf16 = {f32_to_bf16(tiny), f32_to_bf16(tiny)};
    float y[16];
    Gemm p = problem.whole();
    p.x = problem.x_at(0, 0);
    p.y = y;
    p.y_stride = 16;
    gemm(p, serial());
    for (float v : y) EXPECT_EQ(bits(v), 0u) << v;
  });
}

TEST(Pack, ReadsAnyStridesAndEitherType) {
  // Groups of 3 outputs out of a transposed source: element (g, o, k) at g·3 + o + k·9.
  constexpr int64_t kGroups = 3, kOutputs = 3, kK = 5;
  std::vector<float> source(9 * kK);
  std::vector<uint16_t> source_bf16;
  SplitMix64 random(3);
  for (float& v : source) v = bf16_to_f32(f32_to_bf16(static_cast<float>(random.uniform() - 0.5)));
  for (float v : source) source_bf16.push_back(f32_to_bf16(v));
  for (DType from : {DType::kF32, DType::kBF16}) {
    for (DType to : {DType::kF32, DType::kBF16}) {
      const size_t bytes = packed_bytes(to, kGroups, kOutputs, kK);
      std::unique_ptr<void, FreeDeleter> packed(std::aligned_alloc(64, bytes));
      std::memset(packed.get(), 0xff, bytes);
      const PackSource from_source{
          .dtype = from,
          .data = from == DType::kF32 ? static_cast<const void*>(source.data()) : source_bf16.data(),
          .group_stride = 3,
          .output_stride = 1,
          .k_stride = 9};
      for (int64_t g = 0; g < kGroups; ++g) {  // group by group, as ranks pack their own
        pack_matrix(to, kGroups, kOutputs, kK, from_source, packed.get(), g, g + 1);
      }
      const int64_t k_padded = to == DType::kF32 ? kK : kK + 1;
      for (int64_t g = 0; g < kGroups; ++g) {
        for (int64_t k = 0; k < k_padded; ++k) {
          for (int64_t o = 0; o < 16; ++o) {
            const float want = k < kK && o < kOutputs ? source[static_cast<size_t>(g * 3 + o + k * 9)] : 0.0f;
            const float got = to == DType::kF32
                                  ? static_cast<const float*>(packed.get())[(g * k_padded + k) * 16 + o]
                                  : bf16_to_f32(static_cast<const uint16_t*>(
                                        packed.get())[g * k_padded * 16 + (k / 2 * 16 + o) * 2 + k % 2]);
            ASSERT_EQ(bits(got), bits(want)) << "g " << g << " k " << k << " o " << o;
          }
        }
      }
    }
  }
}

TEST(Convert, IsTheScalarRoundingForEveryLength) {
  test::each_instruction_set([&] {
    SplitMix64 random(17);
    std::vector<float> in(1000);
    for (float& v : in)
      v = std::bit_cast<float>(static_cast<uint32_t>(random.next()));  // NaN, denormals and all
    in[3] = std::bit_cast<float>(0x7f800001u);
    in[4] = std::bit_cast<float>(0x7f7fffffu);
    for (int64_t count : {0, 1, 7, 16, 33, 1000}) {
      std::vector<uint16_t> out(static_cast<size_t>(count) + 1, 0xabcd);
      convert(in.data(), count, DType::kBF16, out.data());
      for (size_t i = 0; i < static_cast<size_t>(count); ++i) ASSERT_EQ(out[i], f32_to_bf16(in[i])) << in[i];
      EXPECT_EQ(out.back(), 0xabcd);
      std::vector<float> back(static_cast<size_t>(count));
      convert_to_f32(out.data(), DType::kBF16, count, back.data());
      for (size_t i = 0; i < back.size(); ++i) ASSERT_EQ(bits(back[i]), bits(bf16_to_f32(out[i])));
    }
    std::vector<float> same(in.size());
    convert(in.data(), 1000, DType::kF32, same.data());
    EXPECT_EQ(std::memcmp(same.data(), in.data(), 4000), 0);
  });
}

TEST(GemmDeathTest, RefusesWhatTheLayoutCannotGive) {
  const Problem problem(DType::kBF16, 1, 40, 8, 1, 1);
  float y[40];
  Gemm p = problem.whole();
  p.y = y;
  p.y_stride = 40;
  Gemm odd = p;
  odd.k_end = 3;
  EXPECT_DEATH(gemm(odd, serial()), "splits a pair");
  Gemm unaligned = p;
  unaligned.output_begin = 8;
  EXPECT_DEATH(gemm(unaligned, serial()), "outputs 8");
  Gemm outside = p;
  outside.group_end = 2;
  EXPECT_DEATH(gemm(outside, serial()), "groups 0");
}

}  // namespace
}  // namespace weft::kernels
