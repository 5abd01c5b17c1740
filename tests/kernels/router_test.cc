// Expert choice against the reference in double, and its ties and edges.
#include "kernels/router.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/reference/router.h"
#include "proto/vocab/random.h"
#include "tests/kernels/each_instruction_set.h"

namespace weft::kernels {
namespace {

struct Result {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};
Result run(const Router& p, const std::vector<float>& logits) {
  Result out;
  out.ids.resize(static_cast<size_t>(p.top_k));
  out.weights.resize(out.ids.size());
  route(p, logits.data(), out.ids.data(), out.weights.data());
  return out;
}

TEST(Router, ChoosesAsTheReference) {
  test::each_instruction_set([&] {
    int clear = 0;
    for (uint64_t seed = 1; seed <= 400; ++seed) {
      SplitMix64 random(seed);
      Router p;
      p.score = random.below(2) == 0 ? RouterScore::kSigmoid : RouterScore::kSoftmax;
      p.groups = int64_t{1} << random.below(4);
      p.experts = p.groups * static_cast<int64_t>(1 + random.below(32));
      p.top_groups = 1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(p.groups)));
      p.top_k = 1 + static_cast<int64_t>(random.below(
                        static_cast<uint64_t>(std::min<int64_t>(8, p.top_groups * p.experts / p.groups))));
      p.normalise = random.below(2) == 0;
      p.scale = random.below(2) == 0 ? 1.0f : 2.5f;
      std::vector<float> logits, bias;
      for (int64_t e = 0; e < p.experts; ++e) {
        logits.push_back(static_cast<float>((random.uniform() - 0.5) * 8));
        bias.push_back(static_cast<float>(random.uniform() - 0.5));
      }
      p.bias = random.below(4) == 0 ? nullptr : bias.data();
      const Result got = run(p, logits);
      const reference::Route want = reference::route(p, logits.data());
      if (want.margin < 1e-5) continue;  // within float32's rounding: either is right
      ++clear;
      ASSERT_EQ(got.ids, want.ids) << "seed " << seed;
      for (size_t i = 0; i < got.ids.size(); ++i) {
        EXPECT_NEAR(got.weights[i], want.weights[i], 32 * 0x1p-24 * want.weights[i]) << "seed " << seed;
      }
    }
    EXPECT_GT(clear, 350);
  });
}

TEST(Router, TiesGoToTheLowerId) {
  Router p{.experts = 8, .groups = 4, .top_groups = 2, .top_k = 3};
  const Result got = run(p, std::vector<float>(8, 0.5f));
  EXPECT_EQ(got.ids, (std::vector<int32_t>{0, 1, 2}));
  for (float w : got.weights) EXPECT_EQ(w, got.weights[0]);
}

TEST(Router, BiasChoosesAndDoesNotWeigh) {
  std::vector<float> bias(4, 0.0f);
  bias[3] = 10.0f;
  Router p{.experts = 4, .top_k = 1, .normalise = false, .bias = bias.data()};
  const Result got = run(p, {5.0f, 0.0f, 0.0f, -1.0f});
  EXPECT_EQ(got.ids[0], 3);
  EXPECT_NEAR(got.weights[0], 1 / (1 + std::exp(1.0)), 1e-6);
}

// A group wins by the sum of its two best, though another holds the single best.
TEST(Router, GroupsAreJudgedByTheirTwoBest) {
  Router p{.experts = 4, .groups = 2, .top_groups = 1, .top_k = 1};
  EXPECT_EQ(run(p, {4.0f, -9.0f, 2.0f, 2.0f}).ids[0], 2);
}

// By the single best where scores are shares of one: here the two best of the other group weigh more.
TEST(Router, SoftmaxGroupsAreJudgedByTheirBest) {
  Router p{.score = RouterScore::kSoftmax, .experts = 4, .groups = 2, .top_groups = 1, .top_k = 1};
  EXPECT_EQ(run(p, {2.5f, -9.0f, 2.0f, 2.0f}).ids[0], 0);
}

// Shares are of all experts, those of excluded groups included.
TEST(Router, SoftmaxWeights) {
  const std::vector<float> logits{std::log(1.0f), std::log(2.0f), std::log(4.0f), std::log(9.0f)};
  Router p{.score = RouterScore::kSoftmax, .experts = 4, .top_k = 2, .normalise = false, .scale = 16};
  EXPECT_EQ(run(p, logits).ids, (std::vector<int32_t>{2, 3}));
  EXPECT_NEAR(run(p, logits).weights[0], 4, 1e-5);
  EXPECT_NEAR(run(p, logits).weights[1], 9, 1e-5);
  p.normalise = true;
  EXPECT_NEAR(run(p, logits).weights[0], 16 * 4 / 13.0, 1e-5);
  p.groups = 2;
  p.top_groups = 1;
  p.normalise = false;
  EXPECT_NEAR(run(p, logits).weights[0], 4, 1e-5);
}

TEST(Router, SoftmaxTiesAndZeros) {
  Router p{.score = RouterScore::kSoftmax, .experts = 6, .groups = 3, .top_groups = 2, .top_k = 3};
  EXPECT_EQ(run(p, std::vector<float>(6, -3.0f)).ids, (std::vector<int32_t>{0, 1, 2}));
  // Far behind, a share is exactly 0: such experts tie, whatever their logits.
  const Result far = run(p, {-500.0f, -400.0f, 0.0f, -300.0f, -200.0f, -100.0f});
  EXPECT_EQ(far.ids, (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(far.weights, (std::vector<float>{0, 0, 1}));
  const float large = std::numeric_limits<float>::max();
  EXPECT_EQ(run(p, {large, large, -large, 0.0f, 0.0f, 0.0f}).weights[0], 0.5f);
}

TEST(Router, NansNeverGiveInvalidIds) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  Router p{.experts = 4, .groups = 2, .top_groups = 2, .top_k = 3};
  EXPECT_EQ(run(p, {nan, 1.0f, nan, 0.0f}).ids, (std::vector<int32_t>{0, 1, 3}));
  EXPECT_EQ(run(p, std::vector<float>(4, nan)).ids, (std::vector<int32_t>{0, 1, 2}));
  p.score = RouterScore::kSoftmax;  // where one NaN is in every share
  for (const float bad : {nan, infinity, -infinity}) {
    EXPECT_EQ(run(p, std::vector<float>(4, bad)).ids, (std::vector<int32_t>{0, 1, 2}));
  }
  EXPECT_EQ(run(p, {nan, 1.0f, 2.0f, 3.0f}).ids, (std::vector<int32_t>{0, 1, 2}));
}

}  // namespace
}  // namespace weft::kernels
