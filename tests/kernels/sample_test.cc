// Sampling: the order and cuts against a distribution in double, and the draws against their frequencies.
#include "kernels/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/reference/sample.h"
#include "proto/vocab/random.h"
#include "tests/kernels/each_instruction_set.h"

namespace weft::kernels {
namespace {

std::vector<float> random_logits(int64_t vocabulary, uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<float> out(static_cast<size_t>(vocabulary));
  for (float& v : out) v = static_cast<float>((random.uniform() - 0.5) * 12);
  return out;
}

TEST(Sample, GreedyTakesTheFirstLargest) {
  test::each_instruction_set([&] {
    for (int64_t vocabulary : {1, 2, 15, 16, 17, 100, 1000}) {
      for (int64_t at = 0; at < vocabulary; at += std::max<int64_t>(1, vocabulary / 7)) {
        std::vector<float> logits = random_logits(vocabulary, 1);
        logits[static_cast<size_t>(at)] = 50.0f;
        logits.back() = 50.0f;
        EXPECT_EQ(sample({}, logits.data(), vocabulary, 0), static_cast<uint32_t>(at));
      }
    }
    const std::vector<float> zeros = {-1.0f, -0.0f, 0.0f};
    EXPECT_EQ(sample({}, zeros.data(), 3, 0), 1u);
  });
}

// The token is where the reference's running sum passes the same uniform number, unless that is within
// rounding.
TEST(Sample, DrawsFromTheReferenceDistribution) {
  test::each_instruction_set([&] {
    int clear = 0, total = 0;
    for (uint64_t seed = 1; seed <= 300; ++seed) {
      SplitMix64 random(seed);
      const int64_t vocabulary = 1 + static_cast<int64_t>(random.below(2000));
      const std::vector<float> logits = random_logits(vocabulary, seed);
      Sampler p;
      p.temperature = static_cast<float>(0.2 + random.uniform() * 2);
      p.top_k = random.below(2) == 0 ? 0 : static_cast<uint32_t>(1 + random.below(100));
      p.top_p = random.below(2) == 0 ? 1.0f : static_cast<float>(0.05 + 0.9 * random.uniform());
      p.seed = random.next();
      const std::vector<double> probability = reference::distribution(p, logits.data(), vocabulary);
      for (uint64_t position = 0; position < 10; ++position) {
        const auto words = philox4x32({static_cast<uint32_t>(position), 0, 0, 0},
                                      {static_cast<uint32_t>(p.seed), static_cast<uint32_t>(p.seed >> 32)});
        const double uniform = static_cast<double>(((uint64_t{words[0]} << 32) | words[1]) >> 11) * 0x1p-53;
        const uint32_t got = sample(p, logits.data(), vocabulary, position);
        double before = 0;
        for (size_t i = 0; i < got; ++i) before += probability[i];
        ASSERT_GT(probability[got], 0.0) << "seed " << seed << ": drew a token that was cut";
        ++total;
        constexpr double kRounding = 1e-5;
        ASSERT_GE(uniform, before - kRounding) << "seed " << seed << " position " << position;
        ASSERT_LE(uniform, before + probability[got] + kRounding)
            << "seed " << seed << " position " << position;
        clear += uniform > before + kRounding && uniform < before + probability[got] - kRounding;
      }
    }
    EXPECT_GT(clear, total * 9 / 10) << "too few draws were decided beyond rounding";
  });
}

// Ties straddling the cut: the lower ids stay.
TEST(Sample, CutsBreakTiesToTheLowerId) {
  const std::vector<float> logits = {0.0f, 1.0f, 1.0f, 1.0f, 0.0f};
  for (uint64_t position = 0; position < 200; ++position) {
    const uint32_t by_count = sample({.temperature = 1, .top_k = 2, .seed = 9}, logits.data(), 5, position);
    EXPECT_TRUE(by_count == 1 || by_count == 2) << by_count;
    const uint32_t by_probability =
        sample({.temperature = 1, .top_p = 0.4f, .seed = 9}, logits.data(), 5, position);
    EXPECT_TRUE(by_probability == 1 || by_probability == 2) << by_probability;
  }
}

TEST(Sample, FrequenciesFollowTheProbabilities) {
  const std::vector<float> logits = {0.0f, 1.0f, -1.0f, 2.0f, 0.5f};
  const Sampler p{.temperature = 0.8f, .seed = 0x1234567890abcdef};
  const std::vector<double> probability = reference::distribution(p, logits.data(), 5);
  constexpr int kDraws = 40000;
  std::vector<int> seen(5);
  for (uint64_t position = 0; position < kDraws; ++position) ++seen[sample(p, logits.data(), 5, position)];
  for (size_t i = 0; i < 5; ++i) {
    const double deviation = std::sqrt(kDraws * probability[i] * (1 - probability[i]));
    EXPECT_NEAR(seen[i], kDraws * probability[i], 5 * deviation) << "token " << i;
  }
}

TEST(Sample, DependsOnSeedAndPositionAndExtremesAreGreedy) {
  const std::vector<float> logits = random_logits(500, 3);
  const auto draws = [&](const Sampler& p) {
    std::vector<uint32_t> out;
    for (uint64_t position = 0; position < 64; ++position)
      out.push_back(sample(p, logits.data(), 500, position));
    return out;
  };
  EXPECT_EQ(draws({.temperature = 1, .seed = 1}), draws({.temperature = 1, .seed = 1}));
  EXPECT_NE(draws({.temperature = 1, .seed = 1}), draws({.temperature = 1, .seed = 2}));
  EXPECT_NE(draws({.temperature = 1, .seed = 1}), draws({.temperature = 1, .seed = uint64_t{1} << 40}));
  EXPECT_NE(sample({.temperature = 2}, logits.data(), 500, 0),
            sample({.temperature = 2}, logits.data(), 500, 1));
  const auto best = static_cast<uint32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  const std::vector<uint32_t> greedy(64, best);
  EXPECT_EQ(draws({.temperature = 1e-45f}), greedy);
  EXPECT_EQ(draws({.temperature = 1e-30f}), greedy);
  EXPECT_EQ(draws({.temperature = 1, .top_k = 1}), greedy);
  EXPECT_EQ(draws({.temperature = 1, .top_p = 0}), greedy);
  EXPECT_EQ(draws({.temperature = 1, .top_p = 1e-6f}), greedy);
}

}  // namespace
}  // namespace weft::kernels
