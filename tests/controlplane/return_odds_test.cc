// Goal: the odds are the documented formula, move as one step of AdaGrad says, and learn the gaps they see,
// of each kind of chain; a worth is the best plan's. Method: beside naive code; random gaps of known laws.
#include "controlplane/return_odds.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "proto/vocab/random.h"

namespace weft::controlplane {
namespace {

constexpr double kMiddle = 10;
constexpr ReturnOdds::Start kNothing{};

Steps random_steps(SplitMix64& random) {
  Steps steps;
  for (uint8_t& step : steps) step = static_cast<uint8_t>(random.below(kSteps));
  return steps;
}

TEST(ReturnOdds, AgesCoverAllSecondsInOrder) {
  EXPECT_EQ(ReturnOdds::age(0), 0);
  EXPECT_EQ(ReturnOdds::age(1e12), ReturnOdds::kAges - 1);
  for (int age = 0; age < ReturnOdds::kAges; ++age) {
    EXPECT_EQ(ReturnOdds::age(ReturnOdds::begin(age) * (1 + 1e-9)), age);
    EXPECT_LT(ReturnOdds::begin(age), ReturnOdds::begin(age + 1));
  }
}

TEST(ReturnOdds, StartsWithTheLawAndTheFactorsGiven) {
  const auto back = [](double s) { return s <= 0 ? 0 : 0.97 / (1 + std::pow(s / kMiddle, -2)); };
  SplitMix64 random(1);
  const ReturnOdds plain(kNothing, kMiddle), factors(ReturnOdds::kEnded, kMiddle);
  for (int i = 0; i < 200; ++i) {
    const Steps steps = random_steps(random);
    const int age = static_cast<int>(random.below(ReturnOdds::kAges));
    const double before = back(ReturnOdds::begin(age)), after = back(ReturnOdds::begin(age + 1));
    const double chance = (after - before) / (1 - before);
    EXPECT_NEAR(plain.chance(steps, age), chance, 1e-12);
    size_t part = 0;
    for (const double last : {5, 10, 20, 40}) part += ReturnOdds::begin(age) > last ? 1 : 0;
    const auto& start = ReturnOdds::kEnded[part];
    double tenths = 0;
    for (size_t which = 0; which < kKnown; ++which) tenths += start[which * 6 + steps[which]];
    tenths += start[60 + steps[0] * 6u + steps[3]];   // the last gap and the share of long ones
    tenths += start[96 + steps[9] * 6u + steps[0]];   // the gap before and the last one
    tenths += start[132 + steps[7] * 6u + steps[6]];  // service and growth
    const double odds = chance / (1 - chance) * std::exp(tenths / 10);
    EXPECT_NEAR(factors.chance(steps, age), odds / (1 + odds), 1e-12);
  }
}

TEST(ReturnOdds, LearnsByTheStepThatIsDocumented) {
  ReturnOdds odds(kNothing, kMiddle);
  const Steps steps = {0, 1, 2, 3, 4, 5, 0, 1, 2, 3};
  constexpr int kAge = 9;
  double base = std::log(odds.chance(steps, kAge) / (1 - odds.chance(steps, kAge)));
  double factor = 0, base_squares = 0.2, factor_squares = 100;  // all factors move alike
  SplitMix64 random(2);
  for (int i = 0; i < 100; ++i) {
    const bool back = random.below(3) == 0;
    const double gradient = odds.chance(steps, kAge) - (back ? 1 : 0);
    odds.learn(steps, kAge, back);
    base_squares += gradient * gradient;
    factor_squares += gradient * gradient;
    base -= 0.4 * gradient / std::sqrt(base_squares);
    factor -= 0.1 * gradient / std::sqrt(factor_squares);
    ASSERT_NEAR(odds.chance(steps, kAge), 1 / (1 + std::exp(-base - kFactors * factor)), 1e-9);
  }
  const Steps other = {1, 2, 3, 4, 5, 0, 1, 2, 3, 4};
  EXPECT_NEAR(odds.chance(other, kAge), 1 / (1 + std::exp(-base)), 1e-9) << "they share no factor";
}

double naive_worth(const ReturnOdds& odds, const Steps& steps, int age) {
  double left = 1, kept = 0, best = 0;
  for (int i = age; i < ReturnOdds::kAges; ++i) {
    const double after = left * (1 - odds.chance(steps, i));
    kept += (left + after) / 2 * (ReturnOdds::begin(i + 1) - ReturnOdds::begin(i)) * (i == age ? 0.5 : 1);
    left = after;
    best = std::max(best, (1 - left) / (10 + kept));
  }
  return best;
}

TEST(ReturnOdds, TheWorthIsThatOfTheBestTimeToGiveUp) {
  SplitMix64 random(3);
  ReturnOdds odds(ReturnOdds::kBegun, ReturnOdds::kBegunSeconds);
  for (int i = 0; i < 2000; ++i) {
    const Steps steps = random_steps(random);
    const int age = static_cast<int>(random.below(ReturnOdds::kAges));
    odds.learn(steps, age, random.below(4) == 0);
    ASSERT_NEAR(odds.worth(steps, age), naive_worth(odds, steps, age), 1e-9);
  }
}

// A chain comes back after `gap` seconds: every age that it passes.
void see(ReturnOdds& odds, const Steps& steps, double gap) {
  const int last = ReturnOdds::age(gap);
  for (int age = 0; age < last; ++age) odds.learn(steps, age, false);
  odds.learn(steps, last, true);
}

TEST(ReturnOdds, LearnsTheShareThatComesBackInEachAge) {
  ReturnOdds odds(kNothing, kMiddle);
  SplitMix64 random(4);
  constexpr int kGaps = 20'000;
  std::array<double, ReturnOdds::kAges + 1> alive{};
  for (int i = 0; i < kGaps; ++i) {
    const double gap = std::exp(5 * random.uniform());
    see(odds, {}, gap);
    for (int age = 0; age <= ReturnOdds::age(gap); ++age) ++alive[static_cast<size_t>(age)];
  }
  for (int age = 4; age < 24; ++age) {
    const auto at = static_cast<size_t>(age);
    EXPECT_NEAR(odds.chance({}, age), 1 - alive[at + 1] / alive[at], 0.05) << "age " << age;
  }
}

TEST(ReturnOdds, WhatComesBackSoonIsWorthMore) {
  ReturnOdds odds(kNothing, kMiddle);
  const Steps quick{}, slow = {5, 5, 5, 5, 5, 5, 5, 5, 5, 5};
  for (int i = 0; i < 3000; ++i) {
    see(odds, quick, 4.5);
    see(odds, slow, 60.5);
  }
  // One hit for the seconds until then, and the slack.
  EXPECT_NEAR(odds.worth(quick, 0), 1 / (10 + 4.5), 0.01);
  EXPECT_NEAR(odds.worth(slow, 0), 1 / (10 + 60.5), 0.005);
  EXPECT_GT(odds.worth(slow, ReturnOdds::age(50)), 3 * odds.worth(slow, 0)) << "the rest of the way is short";
}

}  // namespace
}  // namespace weft::controlplane
