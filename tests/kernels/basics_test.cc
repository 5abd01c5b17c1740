// What every kernel stands on: the instruction-set switch, exp2, bf16 scalars, serial().
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/bf16.h"
#include "kernels/elementwise.h"
#include "kernels/features.h"
#include "kernels/parallel.h"
#include "tests/kernels/each_instruction_set.h"

namespace weft::kernels {
namespace {

TEST(Features, SwitchesAndRefusesUnknownNames) {
  const std::string best = instruction_set();
  EXPECT_FALSE(use_instruction_set("z80"));
  EXPECT_EQ(instruction_set(), best);
  ASSERT_TRUE(use_instruction_set("portable"));
  EXPECT_STREQ(instruction_set(), "portable");
  ASSERT_TRUE(use_instruction_set(best.c_str()));
  EXPECT_EQ(instruction_set(), best);
}

TEST(Serial, RunsEachTaskOnceInOrderWithFlushToZero) {
  std::vector<int64_t> seen;
  volatile float tiny = 1e-30f;
  serial().run(5, [&](int64_t task, int thread) {
    EXPECT_EQ(thread, 0);
    EXPECT_EQ(tiny * tiny, 0.0f);
    seen.push_back(task);
  });
  EXPECT_EQ(seen, (std::vector<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(serial().thread_count(), 1);
}

// Bit patterns with a stride that is odd and small enough to visit every exponent and 65,536 mantissas of
// each.
template <typename Body>
void for_floats(float low, float high, uint32_t stride, const Body& body) {
  for (uint64_t bits = 0; bits <= 0xffffffffu; bits += stride) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (x >= low && x <= high) body(x);
  }
}

double ulps(float got, double want) {
  const int exponent = std::max(std::ilogb(want), -126);
  return std::abs(static_cast<double>(got) - want) / std::ldexp(1.0, exponent - 23);
}

TEST(Exp2, IsWithinTwoUlpAndTheSameBitsByLanes) {
  std::vector<float> inputs;
  for_floats(-126.0f, 126.0f, 127, [&](float x) { inputs.push_back(x); });
  ASSERT_GT(inputs.size(), 1'000'000u);
  std::vector<float> first;
  test::each_instruction_set([&] {
    std::vector<float> got(inputs.size());
    exp2(inputs.data(), got.data(), static_cast<int64_t>(inputs.size()));
    double worst = 0;
    float worst_at = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const double error = ulps(got[i], std::exp2(static_cast<double>(inputs[i])));
      if (error > worst) {
        worst = error;
        worst_at = inputs[i];
      }
    }
    EXPECT_LE(worst, 2.0) << "at " << worst_at;
    RecordProperty("worst_ulp", std::to_string(worst));
    for (size_t i = 0; i < inputs.size(); i += 1009) {
      ASSERT_EQ(std::bit_cast<uint32_t>(exp2(inputs[i])), std::bit_cast<uint32_t>(got[i])) << inputs[i];
    }
    if (first.empty()) first = got;
    EXPECT_TRUE(std::equal(got.begin(), got.end(), first.begin(), [](float a, float b) {
      return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
    })) << "another instruction set gave other bits";
  });
}

TEST(Exp2, HasItsEdges) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  test::each_instruction_set([&] {
    for (int n = -126; n <= 127; ++n) EXPECT_EQ(exp2(static_cast<float>(n)), std::ldexp(1.0f, n)) << n;
    for (float x : {-126.00001f, -126.4f, -127.0f, -1e6f, -3e38f, -inf}) EXPECT_EQ(exp2(x), 0.0f) << x;
    for (float x : {127.75f, 128.0f, 1e6f, inf}) EXPECT_EQ(exp2(x), inf) << x;
    EXPECT_TRUE(std::isnan(exp2(nan)));
    std::vector<float> row = {nan, 0.0f, -inf, inf, 1.0f};
    exp2(row.data(), row.data(), 5);
    EXPECT_TRUE(std::isnan(row[0]));
    EXPECT_EQ(row[1], 1.0f);
    EXPECT_EQ(row[2], 0.0f);
    EXPECT_EQ(row[3], inf);
    EXPECT_EQ(row[4], 2.0f);
  });
}

TEST(Bf16, RoundsToNearestEvenForEveryUpperHalf) {
  for (uint32_t half = 0; half <= 0xffffu; ++half) {
    const float exact = bf16_to_f32(static_cast<uint16_t>(half));
    if (std::isnan(exact)) {
      EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(exact))));
      continue;
    }
    EXPECT_EQ(f32_to_bf16(exact), half);
    if (std::isinf(exact)) continue;
    const uint32_t bits = half << 16;
    EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(bits | 0x7fffu)), half);
    EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(bits | 0x8001u)), half + 1);
    EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(bits | 0x8000u)), half + (half & 1u));
  }
}

}  // namespace
}  // namespace weft::kernels
