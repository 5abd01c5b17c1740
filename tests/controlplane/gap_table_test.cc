// Goal: a gap table knows when chains of its kind come back, also from those that have not yet, and prices it
// right. Method: random gaps beside a naive estimate from the list of all chains; simple distributions with
// known answers.
#include "controlplane/gap_table.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "proto/vocab/random.h"

namespace weft::controlplane {
namespace {

constexpr double kCentre = 10;
Time at(double seconds) { return Time{std::llround(seconds * 1e9)}; }

TEST(GapTable, BucketsCoverAllAgesInOrder) {
  EXPECT_EQ(GapTable::bucket(0), 0);
  EXPECT_EQ(GapTable::bucket(1e12), GapTable::kBuckets - 1);
  for (int b = 0; b < GapTable::kBuckets; ++b) {
    EXPECT_EQ(GapTable::bucket(GapTable::begin(b) * (1 + 1e-9)), b);
    EXPECT_LT(GapTable::begin(b), GapTable::begin(b + 1));
  }
}

struct Chain {
  double seconds;
  bool back;
};

// The same estimate from the list: the chance to come back in a bucket, of those that were watched in it.
double naive_worth(const std::vector<Chain>& chains, int age, double price) {
  const auto imagined = [](double s) { return s <= 0 ? 0 : 0.97 / (1 + std::pow(s / kCentre, -2)); };
  double left = 1, back = 0, kept = 0, best = -1;
  for (int b = age; b < GapTable::kBuckets; ++b) {
    const double low = GapTable::begin(b), high = GapTable::begin(b + 1);
    double returned = 10 * (imagined(high) - imagined(low)), watched = 10 * (1 - imagined(low));
    for (const Chain& chain : chains) {
      const int in = GapTable::bucket(chain.seconds);
      if (in > b || (in == b && chain.back)) watched += 1;
      if (in == b && !chain.back) watched += 0.5;
      if (in == b && chain.back) returned += 1;
    }
    const double after = left * (1 - std::min(1.0, returned / watched));
    back += left - after;
    kept += (left + after) / 2 * (high - low) * (b == age ? 0.5 : 1);
    left = after;
    best = std::max(best, back - price * kept);
  }
  return best;
}

TEST(GapTable, AgreesWithANaiveEstimate) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SplitMix64 random(seed);
    GapTable table(kCentre);
    const double now = 5000, price = 0.001 + 0.1 * random.uniform();
    std::vector<Chain> chains;
    for (uint64_t i = 0; i < 1 + random.below(200); ++i) {
      const double seconds = std::exp(8 * random.uniform());
      const uint64_t fate = random.below(3);
      table.opened(at(now - seconds));
      if (fate == 0) table.returned(at(now - seconds), at(now));
      if (fate == 1) table.lost(at(now - seconds), at(now));
      chains.push_back({seconds, fate == 0});
    }
    table.refresh(at(now), price);
    for (int age = 0; age < GapTable::kBuckets; ++age) {
      EXPECT_NEAR(table.worth(age), naive_worth(chains, age, price), 1e-6) << "age " << age;
    }
  }
}

TEST(GapTable, WhatComesBackSoonIsWorthMoreAndWhatIsOverdueNothing) {
  GapTable quick(kCentre), slow(kCentre);
  for (int i = 0; i < 500; ++i) {
    for (auto [table, gap] : {std::pair(&quick, 4.5), std::pair(&slow, 60.5)}) {
      table->opened(at(1000));
      table->returned(at(1000), at(1000 + gap));
    }
  }
  constexpr double kPrice = 1 / 50.0;
  quick.refresh(at(2000), kPrice);
  slow.refresh(at(2000), kPrice);
  EXPECT_NEAR(quick.worth(0), 1 - 4.5 * kPrice, 0.05);
  EXPECT_LT(slow.worth(0), 0.05) << "it would take more room than it saves";
  EXPECT_GT(slow.worth(GapTable::bucket(50)), 0.6) << "the rest of the way pays";
  EXPECT_LT(quick.worth(GapTable::bucket(50)), 0.2) << "it has not come back when it always did";
}

}  // namespace
}  // namespace weft::controlplane
