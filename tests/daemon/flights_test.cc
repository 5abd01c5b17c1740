// Goal: which results count, what is repeated and what is given up. Method: the rules alone, by hand.
#include "daemon/flights.h"

#include <gtest/gtest.h>

#include <variant>

namespace weft::daemon {
namespace {

using TestFlights = Flights<int, std::monostate>;

struct Running {
  TestFlights flights;
  Running() { flights.epoch_begins(); }
  void add(uint64_t step) { flights.add(StepId{step}, 0b11, 0); }
  void report(uint64_t step, int rank, std::vector<TestFlights::Sample> samples = {}) {
    flights.take(*flights.find(StepId{step}), rank, {}, std::move(samples));
  }
  // Plans that are abandoned.
  size_t lose(Loss loss) {
    flights.stop();
    flights.epoch_lost(loss);
    return flights.epoch_begins();
  }
};

TEST(Flights, APlanIsDoneWhenAllOfItsRanksHaveReportedAndInOrder) {
  Running running;
  running.add(1);
  running.add(2);
  running.report(2, 0);
  running.report(2, 1);
  running.report(1, 1);
  EXPECT_FALSE(running.flights.take_done());
  running.report(1, 0);
  EXPECT_EQ(running.flights.take_done()->step, StepId{1});
  EXPECT_EQ(running.flights.take_done()->step, StepId{2});
  EXPECT_TRUE(running.flights.empty());
  EXPECT_EQ(running.flights.find(StepId{1}), nullptr);
}

TEST(Flights, ARepeatIsReportedByAllAgainAndDrawsTheSame) {
  Running running;
  running.add(1);
  const auto sample = [](uint32_t token) { return TestFlights::Sample{RequestId{7}, 3, token, false}; };
  running.report(1, 0, {sample(5)});
  EXPECT_EQ(running.lose(Loss::kFailed), 0u);
  running.report(1, 1);
  EXPECT_FALSE(running.flights.take_done()) << "rank 0 may still write";
  TestFlights::Flight& flight = *running.flights.find(StepId{1});
  EXPECT_TRUE(running.flights.take(flight, 0, {}, {sample(5)}).empty());
  EXPECT_EQ(running.flights.take(flight, 0, {}, {sample(6)}).size(), 1u);
}

TEST(Flights, TwoFailuresOfTheFirstPlanAbandonAllAndOthersCountNothing) {
  Running running;
  running.add(1);
  running.add(2);
  EXPECT_EQ(running.lose(Loss::kFailed), 0u);
  running.report(1, 0);
  running.report(1, 1);
  EXPECT_TRUE(running.flights.take_done());
  EXPECT_EQ(running.lose(Loss::kFailed), 0u) << "plan 2 was behind the first loss, and is first in this one";
  running.add(3);
  EXPECT_EQ(running.lose(Loss::kFailed), 2u);
  EXPECT_TRUE(running.flights.empty());
}

TEST(Flights, KillsFromOutsideAreNoFaultOfThePlanForLong) {
  Running running;
  running.add(1);
  EXPECT_EQ(running.lose(Loss::kFailed), 0u);
  for (int kill = 1; kill < kKilledEpochsMax; ++kill) EXPECT_EQ(running.lose(Loss::kKilled), 0u) << kill;
  EXPECT_EQ(running.lose(Loss::kKilled), 1u);
  running.add(2);
  EXPECT_EQ(running.lose(Loss::kKilled), 0u);
  EXPECT_EQ(running.lose(Loss::kFailed), 0u);
  EXPECT_EQ(running.lose(Loss::kFailed), 1u);
}

}  // namespace
}  // namespace weft::daemon
