// Which ranks hang: heartbeats that stop, and a step in which nobody moves.
#include "daemon/watchdog.h"

#include <gtest/gtest.h>

namespace weft::daemon {
namespace {

constexpr Duration kSecond = std::chrono::seconds(1);
constexpr Duration kBeat = 5 * kSecond;

class WatchdogTest : public testing::Test {
 protected:
  // Looks every half second for `span`; heartbeats of `beating` move. The first ranks found hung, if any.
  RankMask run(Duration span, RankMask beating, std::optional<Duration> allowance = {}) {
    for (const Time end = now_ + span; now_ < end;) {
      now_ = now_ + Watchdog::kLookInterval;
      for (int rank = 0; rank < 4; ++rank) {
        if (holds(beating, rank)) ++ranks_[static_cast<size_t>(rank)].heartbeat;
      }
      if (const RankMask hung = watchdog_.look(now_, ranks_, 0b1111, allowance)) return hung;
    }
    return 0;
  }
  Watchdog watchdog_{4, kBeat};
  std::array<RankProgress, 4> ranks_{};
  Time now_{1};
};

TEST_F(WatchdogTest, AStoppedHeartbeatIsFoundAfterItsDeadline) {
  EXPECT_EQ(run(60 * kSecond, 0b1111), 0u);
  EXPECT_EQ(run(kBeat - kSecond, 0b1011), 0u);
  EXPECT_EQ(run(2 * kSecond, 0b1011), 0b0100u);
}

TEST_F(WatchdogTest, ANewProcessStartsItsSilenceAnew) {
  EXPECT_EQ(run(kBeat - kSecond, 0b1110), 0u);
  watchdog_.forget(0);
  EXPECT_EQ(run(kBeat - kSecond, 0b1110), 0u);
  EXPECT_EQ(run(2 * kSecond, 0b1110), 0b0001u);
}

TEST_F(WatchdogTest, ARankThatIsNotWatchedIsNotBlamed) {
  for (int i = 0; i < 100; ++i) {
    now_ = now_ + kSecond;
    EXPECT_EQ(watchdog_.look(now_, ranks_, 0, {}), 0u);
  }
}

TEST_F(WatchdogTest, AStoppedDaemonBlamesNobody) {
  EXPECT_EQ(run(2 * kSecond, 0b1111), 0u);
  now_ = now_ + 3600 * kSecond;  // the daemon slept, and so perhaps did they
  EXPECT_EQ(watchdog_.look(now_, ranks_, 0b1111, kBeat), 0u);
}

TEST_F(WatchdogTest, NobodyMovesBlamesWhomTheOthersWaitFor) {
  ranks_[0].waiting_for = 0b0100;
  ranks_[1].waiting_for = 0b0101;
  ranks_[3].waiting_for = 0b0100;
  EXPECT_EQ(run(8 * kSecond, 0b1111, 10 * kSecond), 0u);
  EXPECT_EQ(run(4 * kSecond, 0b1111, 10 * kSecond), 0b0100u);
}

TEST_F(WatchdogTest, NobodyMovesAndNobodyIsWaitedForBlamesAll) {
  EXPECT_EQ(run(20 * kSecond, 0b1111, 10 * kSecond), 0b1111u);
}

TEST_F(WatchdogTest, AWaitRingBlamesAll) {
  for (size_t rank = 0; rank < 4; ++rank) ranks_[rank].waiting_for = mask_of(static_cast<int>(rank + 1) % 4);
  EXPECT_EQ(run(20 * kSecond, 0b1111, 10 * kSecond), 0b1111u);
}

TEST_F(WatchdogTest, OneRankThatMovesIsEnough) {
  for (int i = 0; i < 30; ++i) {
    ++ranks_[3].layer;
    EXPECT_EQ(run(2 * kSecond, 0b1111, 5 * kSecond), 0u);
  }
}

TEST_F(WatchdogTest, AnIdleFleetMayStandStill) { EXPECT_EQ(run(3600 * kSecond, 0b1111), 0u); }

TEST(StepAllowance, GrowsWithTheWork) {
  controlplane::Plan plan;
  EXPECT_EQ(step_allowance(plan, 30 * kSecond), 30 * kSecond);
  controlplane::Span span;
  span.start = 1000;
  span.rows = 24;
  plan.spans.push_back(span);
  const Duration expected =
      30 * kSecond + std::chrono::milliseconds(5 * 24) + std::chrono::microseconds(24 * 1024);
  EXPECT_EQ(step_allowance(plan, 30 * kSecond), expected);
  // A worker does not give up on another before the watchdog does.
  EXPECT_GT(longest_wait(expected), expected);
  EXPECT_GE(longest_wait(kSecond / 10), 30 * kSecond);
}

}  // namespace
}  // namespace weft::daemon
