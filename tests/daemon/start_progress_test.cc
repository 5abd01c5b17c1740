// Progress never goes back, whatever ranks report and in whatever order, and is whole only at the end.
#include "daemon/start_progress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "proto/vocab/random.h"

namespace weft::daemon {
namespace {

double fraction(const TensorCount& count) {
  return count.total == 0 ? 0 : static_cast<double>(count.done) / static_cast<double>(count.total);
}

TEST(StartProgress, ARankThatIsDoneBeforeTheOthersBeginIsItsPartOnly) {
  StartProgress progress;
  std::vector<TensorCount> ranks(4);
  progress.update(ranks);
  EXPECT_EQ(progress.shown().total, 0u);
  ranks[2] = {100, 100};
  progress.update(ranks);
  EXPECT_EQ(progress.shown().done, 100u);
  EXPECT_EQ(progress.shown().total, 400u);
}

TEST(StartProgress, AWorkerThatBeginsAgainTakesNothingBack) {
  StartProgress progress;
  std::vector<TensorCount> ranks = {{50, 100}, {70, 100}};
  progress.update(ranks);
  ranks[1] = {};
  progress.update(ranks);
  EXPECT_EQ(progress.shown().done, 120u);
  progress.begin_again();
  progress.update(ranks);
  EXPECT_EQ(progress.shown().done, 50u);
}

TEST(StartProgress, RandomReportsGrow) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    SplitMix64 random(seed);
    std::vector<uint64_t> totals;
    for (uint64_t i = 0, n = 1 + random.below(8); i < n; ++i) totals.push_back(1 + random.below(50));
    std::vector<TensorCount> ranks(totals.size());
    StartProgress progress;
    double before = 0;
    const auto whole = [&] {
      for (size_t i = 0; i < ranks.size(); ++i) {
        if (ranks[i].done < totals[i]) return false;
      }
      return true;
    };
    while (!whole()) {
      const size_t rank = random.below(ranks.size());
      if (random.below(60) == 0) {
        ranks[rank] = {};  // died
      } else {
        ranks[rank].total = totals[rank];
        ranks[rank].done = std::min(totals[rank], ranks[rank].done + 1 + random.below(5));
      }
      progress.update(ranks);
      EXPECT_GE(fraction(progress.shown()), before);
      before = fraction(progress.shown());
      if (!whole()) {
        EXPECT_LT(before, 1);
      }
    }
    EXPECT_EQ(before, 1);
  }
}

}  // namespace
}  // namespace weft::daemon
