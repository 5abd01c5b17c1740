// Goal: no id is handed out while a plan in flight may name it, none is lost, the order is fixed.
// Method: exact cases, then random operations beside a naive model.
#include "controlplane/fenced_pool.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "proto/vocab/random.h"

namespace weft::controlplane {
namespace {

using Pool = FencedPool<PageId>;
constexpr StepId kNone{0};

TEST(FencedPool, HandsOutInAFixedOrder) {
  Pool pool(3);
  EXPECT_EQ(pool.take(), PageId{0});
  EXPECT_EQ(pool.take(), PageId{1});
  EXPECT_EQ(pool.take(), PageId{2});
  EXPECT_EQ(pool.take(), std::nullopt);
  pool.give_back(PageId{1}, kNone, kNone);
  pool.give_back(PageId{0}, kNone, kNone);
  EXPECT_EQ(pool.take(), PageId{0});  // freed last, taken first
  EXPECT_EQ(pool.take(), PageId{1});
}

TEST(FencedPool, WaitsForItsFence) {
  Pool pool(1);
  ASSERT_TRUE(pool.take());
  pool.give_back(PageId{0}, StepId{7}, StepId{5});
  EXPECT_EQ(pool.in_flight_count(), 1);
  pool.complete(StepId{6});
  EXPECT_FALSE(pool.take());
  pool.complete(StepId{7});
  EXPECT_TRUE(pool.take());
}

TEST(FencedPoolDeathTest, RefusesToTakeBackTwice) {
  Pool pool(2);
  ASSERT_TRUE(pool.take());
  pool.give_back(PageId{0}, StepId{1}, kNone);
  EXPECT_DEATH(pool.give_back(PageId{0}, StepId{1}, kNone), "given back twice");
  EXPECT_DEATH(pool.give_back(PageId{1}, kNone, kNone), "never taken");
}

TEST(FencedPool, AgreesWithANaiveModel) {
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SplitMix64 random(seed);
    const auto count = static_cast<int64_t>(1 + random.below(20));
    Pool pool(count);
    std::set<PageId> taken;
    std::map<PageId, uint64_t> fenced;
    uint64_t issued = 0, completed = 0;
    for (int i = 0; i < 2000; ++i) {
      switch (random.below(4)) {
        case 0: {
          const auto id = pool.take();
          EXPECT_EQ(id.has_value(), static_cast<int64_t>(taken.size() + fenced.size()) < count);
          if (!id) break;
          EXPECT_TRUE(taken.insert(*id).second);
          EXPECT_FALSE(fenced.contains(*id));
          break;
        }
        case 1: {
          if (taken.empty()) break;
          const PageId id = *std::next(taken.begin(), static_cast<int64_t>(random.below(taken.size())));
          pool.give_back(id, StepId{issued}, StepId{completed});
          taken.erase(id);
          if (issued > completed) fenced[id] = issued;
          break;
        }
        case 2:
          ++issued;
          break;
        case 3: {
          if (completed == issued) break;
          pool.complete(StepId{++completed});
          std::erase_if(fenced, [&](const auto& entry) { return entry.second <= completed; });
          break;
        }
      }
      pool.check_invariants();
      ASSERT_EQ(pool.taken_count(), static_cast<int64_t>(taken.size()));
      ASSERT_EQ(pool.in_flight_count(), static_cast<int64_t>(fenced.size()));
    }
  }
}

}  // namespace
}  // namespace weft::controlplane
