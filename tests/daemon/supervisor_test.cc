// The supervisor table cell by cell, and the values around it: wanted, delay, deadline, history.
#include "daemon/supervisor.h"

#include <gtest/gtest.h>

#include "proto/vocab/random.h"

namespace weft::daemon {
namespace {

using S = WorkerState;
using E = WorkerEvent;
using A = WorkerAction;

struct Row {
  S state;
  E event;
  S next;
  A action;
};

// Written out by hand: the specification. Every cell once.
constexpr Row kCells[] = {
    {S::kDown, E::kExited, S::kDown, A::kNone},
    {S::kDown, E::kReady, S::kDown, A::kNone},
    {S::kDown, E::kTimeout, S::kStarting, A::kSpawn},
    {S::kDown, E::kWantUp, S::kStarting, A::kSpawn},
    {S::kDown, E::kWantDown, S::kDown, A::kNone},
    {S::kDown, E::kHung, S::kDown, A::kNone},
    {S::kStarting, E::kExited, S::kDown, A::kRetryLater},
    {S::kStarting, E::kReady, S::kReady, A::kSettle},
    {S::kStarting, E::kTimeout, S::kStopping, A::kKill},
    {S::kStarting, E::kWantUp, S::kStarting, A::kNone},
    {S::kStarting, E::kWantDown, S::kDraining, A::kAskToStop},
    {S::kStarting, E::kHung, S::kStopping, A::kKill},
    {S::kReady, E::kExited, S::kDown, A::kRetryLater},
    {S::kReady, E::kReady, S::kReady, A::kNone},
    {S::kReady, E::kTimeout, S::kReady, A::kForgive},
    {S::kReady, E::kWantUp, S::kReady, A::kNone},
    {S::kReady, E::kWantDown, S::kDraining, A::kAskToStop},
    {S::kReady, E::kHung, S::kStopping, A::kKill},
    {S::kDraining, E::kExited, S::kDown, A::kRetryLater},
    {S::kDraining, E::kReady, S::kDraining, A::kNone},
    {S::kDraining, E::kTimeout, S::kStopping, A::kKill},
    {S::kDraining, E::kWantUp, S::kDraining, A::kNone},
    {S::kDraining, E::kWantDown, S::kDraining, A::kNone},
    {S::kDraining, E::kHung, S::kStopping, A::kKill},
    {S::kStopping, E::kExited, S::kDown, A::kRetryLater},
    {S::kStopping, E::kReady, S::kStopping, A::kNone},
    {S::kStopping, E::kTimeout, S::kStopping, A::kKill},
    {S::kStopping, E::kWantUp, S::kStopping, A::kNone},
    {S::kStopping, E::kWantDown, S::kStopping, A::kNone},
    {S::kStopping, E::kHung, S::kStopping, A::kNone},
};

TEST(SupervisorTable, EveryCell) {
  int seen[kWorkerStates][kWorkerEvents] = {};
  for (const Row& row : kCells) {
    ++seen[static_cast<int>(row.state)][static_cast<int>(row.event)];
    const SupervisorCell expected{row.next, row.action};
    EXPECT_EQ(supervise(row.state, row.event), expected)
        << worker_state_name(row.state) << " × event " << static_cast<int>(row.event);
  }
  for (const auto& states : seen) {
    for (const int count : states) EXPECT_EQ(count, 1);
  }
}

SupervisorLimits limits() {
  SupervisorLimits limits;
  limits.first_delay = Duration(100);
  limits.delay_cap = Duration(800);
  limits.quiet_period = Duration(10'000);
  limits.start_deadline = Duration(5'000);
  limits.stop_deadline = Duration(2'000);
  limits.reap_deadline = Duration(3'000);
  return limits;
}

TEST(Supervisor, DelayDoublesToTheCapAndIsForgivenAfterAQuietPeriod) {
  Supervisor worker(limits());
  Time now{0};
  EXPECT_EQ(worker.handle(E::kWantUp, now), A::kSpawn);
  for (const int64_t delay : {100, 200, 400, 800, 800}) {
    now = now + Duration(1);
    EXPECT_EQ(worker.handle(E::kExited, now), A::kRetryLater);
    ASSERT_TRUE(worker.deadline().has_value());
    EXPECT_EQ((*worker.deadline() - now).count(), delay);
    now = *worker.deadline();
    EXPECT_EQ(worker.handle(E::kTimeout, now), A::kSpawn);
    EXPECT_EQ(worker.state(), S::kStarting);
  }
  // An exit before the quiet period is over does not forgive.
  EXPECT_EQ(worker.handle(E::kReady, now), A::kSettle);
  EXPECT_EQ(worker.handle(E::kExited, now), A::kRetryLater);
  EXPECT_EQ(*worker.deadline() - now, Duration(800));
  now = *worker.deadline();
  EXPECT_EQ(worker.handle(E::kTimeout, now), A::kSpawn);
  EXPECT_EQ(worker.handle(E::kReady, now), A::kSettle);
  now = *worker.deadline();
  EXPECT_EQ(worker.handle(E::kTimeout, now), A::kForgive);
  EXPECT_FALSE(worker.deadline().has_value());
  EXPECT_EQ(worker.handle(E::kExited, now), A::kRetryLater);
  EXPECT_EQ(*worker.deadline() - now, Duration(100));
  EXPECT_EQ(worker.spawns(), 7u);
}

// However often it is killed, between two of its steps it is back at once; what cannot do a step waits.
TEST(Supervisor, AWorkerThatHasWorkedIsStartedAtOnce) {
  Supervisor worker(limits());
  Time now{0};
  worker.handle(E::kWantUp, now);
  for (int round = 0; round < 5; ++round) {
    worker.handle(E::kReady, now);
    worker.worked();
    now = now + Duration(1);
    EXPECT_EQ(worker.handle(E::kExited, now), A::kRetryLater);
    EXPECT_EQ(*worker.deadline(), now);
    EXPECT_EQ(worker.handle(E::kTimeout, now), A::kSpawn);
  }
  for (const int64_t delay : {100, 200, 400}) {
    worker.handle(E::kReady, now);
    EXPECT_EQ(worker.handle(E::kExited, now), A::kRetryLater);
    EXPECT_EQ((*worker.deadline() - now).count(), delay);
    now = *worker.deadline();
    EXPECT_EQ(worker.handle(E::kTimeout, now), A::kSpawn);
  }
  worker.handle(E::kReady, now);
  worker.worked();
  EXPECT_EQ(worker.handle(E::kTimeout, *worker.deadline()), A::kForgive);  // which does not make it later
  EXPECT_EQ(worker.handle(E::kExited, now), A::kRetryLater);
  EXPECT_EQ(*worker.deadline(), now);
}

TEST(Supervisor, UnwantedWorkerStaysDown) {
  Supervisor worker(limits());
  worker.handle(E::kWantUp, Time{0});
  worker.handle(E::kReady, Time{1});
  EXPECT_EQ(worker.handle(E::kWantDown, Time{2}), A::kAskToStop);
  EXPECT_EQ(*worker.deadline(), Time{2002});
  EXPECT_EQ(worker.handle(E::kTimeout, Time{2002}), A::kKill);
  EXPECT_EQ(worker.handle(E::kTimeout, *worker.deadline()),
            A::kKill);  // a kill that did not work is repeated
  worker.handle(E::kExited, Time{6000});
  EXPECT_EQ(worker.state(), S::kDown);
  EXPECT_FALSE(worker.deadline().has_value());
}

TEST(Supervisor, WishForUpWhileDrainingIsMetAfterTheExit) {
  Supervisor worker(limits());
  worker.handle(E::kWantUp, Time{0});
  worker.handle(E::kWantDown, Time{1});
  EXPECT_EQ(worker.state(), S::kDraining);
  EXPECT_EQ(worker.handle(E::kWantUp, Time{2}), A::kNone);
  worker.handle(E::kExited, Time{3});
  EXPECT_EQ(worker.handle(E::kTimeout, *worker.deadline()), A::kSpawn);
}

TEST(Supervisor, WantDownCancelsAPendingRestart) {
  Supervisor worker(limits());
  worker.handle(E::kWantUp, Time{0});
  worker.handle(E::kExited, Time{1});
  ASSERT_TRUE(worker.deadline().has_value());
  worker.handle(E::kWantDown, Time{2});
  EXPECT_FALSE(worker.deadline().has_value());
}

TEST(Supervisor, ProgressMovesTheStartDeadlineOnly) {
  Supervisor worker(limits());
  worker.handle(E::kWantUp, Time{0});
  worker.progress(Time{4000});
  EXPECT_EQ(*worker.deadline(), Time{9000});
  worker.handle(E::kReady, Time{4500});
  worker.progress(Time{4600});
  EXPECT_EQ(*worker.deadline(), Time{14'500});
}

TEST(Supervisor, KeepsTheLastSixteenExits) {
  Supervisor worker(limits());
  for (int i = 0; i < 20; ++i) worker.record_exit(Time{i}, "exit " + std::to_string(i));
  ASSERT_EQ(worker.exits().size(), 16u);
  EXPECT_EQ(worker.exits().front().text, "exit 4");
  EXPECT_EQ(worker.exits().back().text, "exit 19");
}

// Random events: a wanted worker that is down always has a deadline, so it always comes back; a worker that
// is not wanted is never spawned by a timeout.
TEST(Supervisor, RandomEventsNeverStrandAWantedWorker) {
  const uint64_t seed = 20240611;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  SplitMix64 random(seed);
  for (int run = 0; run < 200; ++run) {
    Supervisor worker(limits());
    Time now{0};
    bool wanted = false;
    for (int i = 0; i < 200; ++i) {
      now = now + Duration(static_cast<int64_t>(random.below(500)));
      const auto event = static_cast<E>(random.below(kWorkerEvents));
      if (event == E::kTimeout && !worker.deadline()) continue;
      if (event == E::kWantUp || event == E::kWantDown) wanted = event == E::kWantUp;
      const A action = worker.handle(event, now);
      ASSERT_TRUE(action != A::kSpawn || wanted);
      ASSERT_TRUE(worker.state() != S::kDown || !wanted || worker.deadline().has_value());
      if (worker.state() == S::kDown && wanted) {
        ASSERT_LE(*worker.deadline() - now, Duration(800));
      }
    }
  }
}

}  // namespace
}  // namespace weft::daemon
