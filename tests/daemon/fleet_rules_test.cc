// Goal: the rules between ranks, each by the exact calls that it makes, in order.
// Method: a shell that writes down what it is told; processes are what the test says of them.
#include "daemon/fleet_rules.h"

#include <gtest/gtest.h>

namespace weft::daemon {
namespace {

using Calls = std::vector<std::string>;
using P = WorkerPhase;
using S = WorkerState;

constexpr Duration kAllowance = std::chrono::milliseconds(2500);

SupervisorLimits limits() {
  SupervisorLimits limits;
  limits.first_delay = Duration(100);
  limits.delay_cap = Duration(800);
  limits.quiet_period = Duration(1'000'000);
  limits.start_deadline = Duration(5'000);
  limits.stop_deadline = Duration(2'000);
  limits.reap_deadline = Duration(3'000);
  return limits;
}

class FleetRulesTest : public ::testing::Test, protected FleetShell {
 protected:
  // ---- FleetShell
  void carry_out(int rank, WorkerState, WorkerEvent event, WorkerAction action) override {
    const std::string name = " " + std::to_string(rank);
    switch (action) {
      case WorkerAction::kNone:
      case WorkerAction::kSettle:
      case WorkerAction::kForgive:
        return;
      case WorkerAction::kSpawn:
        if (std::exchange(spawn_fails, false)) {
          calls_.push_back("spawn fails" + name);
          return rules.spawn_failed(rank, "no process", now);
        }
        calls_.push_back("spawn" + name);
        return rules.spawned(rank, born);
      case WorkerAction::kRetryLater:
        return calls_.push_back("down" + name);
      case WorkerAction::kAskToStop:
        return calls_.push_back("ask to stop" + name);
      case WorkerAction::kKill:
        return calls_.push_back((event == WorkerEvent::kTimeout ? "kill the late" : "kill") + name);
    }
  }
  void hangs(int rank, const std::string& why) override {
    calls_.push_back("hangs " + std::to_string(rank) + ": " + why);
  }
  void begin_epoch(Epoch epoch) override { calls_.push_back("begin " + std::to_string(number(epoch))); }
  Duration lose_epoch(Epoch epoch, const std::string& reason, Loss loss, bool planned) override {
    calls_.push_back("lose " + std::to_string(number(epoch)) + (planned ? " as planned: " : ": ") + reason +
                     (loss == Loss::kKilled ? " (killed)" : " (failed)"));
    return kAllowance;
  }
  void memory_lost(int rank) override { calls_.push_back("memory lost " + std::to_string(rank)); }
  void worker_waits(int rank) override { calls_.push_back("waits " + std::to_string(rank)); }
  void worker_failed(int rank) override { calls_.push_back("failed " + std::to_string(rank)); }
  void worker_stopped(int rank) override { calls_.push_back("stopped " + std::to_string(rank)); }
  void wake_at(std::optional<Time> when) override { wake = when; }

  Calls calls() { return std::exchange(calls_, {}); }
  void ended(int rank, bool memory_lost = false) {
    rules.ended(rank, "exit 1", Loss::kFailed, memory_lost, now);
  }
  // To when the rules want to be asked.
  void pass() {
    ASSERT_TRUE(wake.has_value());
    now = *wake;
    rules.pass_time(now);
  }
  // The ranks of the first epoch run; all that was called is forgotten.
  void run() {
    rules.start(now);
    rules.loaded(0, now);
    rules.loaded(1, now);
    ASSERT_TRUE(rules.epoch_active());
    calls();
  }
  void join(int rank) {
    rules.start_worker(rank, now);
    rules.loaded(rank, now);
    calls();
  }

  Time now{1000};
  std::optional<Time> wake;
  bool spawn_fails = false;
  WorkerPhase born = P::kLoading;
  // Ranks 0, 1 and 2 there may be; 0 and 1 begin.
  FleetRules rules{limits(), 3, kv::Topology::of_all(2), *this};

 private:
  Calls calls_;
};

// ---- the common start

TEST_F(FleetRulesTest, AnEpochBeginsWhenAllThatTakePartWait) {
  rules.start(now);
  EXPECT_EQ(calls(), (Calls{"spawn 0", "spawn 1"}));
  rules.loaded(1, now);
  EXPECT_EQ(calls(), Calls{});
  EXPECT_FALSE(rules.ever_ready());
  rules.loaded(0, now);
  EXPECT_EQ(calls(), Calls{"begin 1"});
  EXPECT_TRUE(rules.epoch_active() && rules.ever_ready());
  EXPECT_EQ(rules.epoch(), Epoch{1});
  EXPECT_EQ(rules.phase(0), P::kRunning);
  EXPECT_EQ(rules.phase(1), P::kRunning);
  EXPECT_EQ(rules.phase(2), P::kGone);
}

TEST_F(FleetRulesTest, DescribedIsNotLoaded) {
  born = P::kDescribing;
  rules.start(now);
  rules.described(0, now);
  EXPECT_FALSE(rules.all_described());
  rules.described(1, now);
  EXPECT_TRUE(rules.all_described());
  EXPECT_EQ(rules.beating(), RankMask{0});
  // Both start deadlines count from what was said last.
  now = now + Duration(10);
  rules.loads(0, now + Duration(700));
  rules.progress(1, now);
  EXPECT_EQ(*wake, now + Duration(5000));
  rules.loads(1, now + Duration(900));
  EXPECT_EQ(*wake, now + Duration(5700));
  rules.loaded(0, now);
  rules.loaded(1, now);
  EXPECT_EQ(calls(), (Calls{"spawn 0", "spawn 1", "begin 1"}));
  EXPECT_EQ(rules.beating(), RankMask{3});
}

TEST_F(FleetRulesTest, WhoDoesNotStartInTimeIsKilledAndStartedAgain) {
  rules.start(now);
  rules.loaded(0, now);
  calls();
  pass();
  EXPECT_EQ(now, Time{6000});
  EXPECT_EQ(calls(), Calls{"kill the late 1"});
  ended(1);
  EXPECT_EQ(calls(), Calls{"down 1"});
  pass();
  EXPECT_EQ(now, Time{6100});
  rules.loaded(1, now);
  EXPECT_EQ(calls(), (Calls{"spawn 1", "begin 1"}));
}

TEST_F(FleetRulesTest, ASpawnThatFailsIsTriedAgain) {
  spawn_fails = true;
  rules.start(now);
  EXPECT_EQ(calls(), (Calls{"spawn fails 0", "down 0", "spawn 1"}));
  EXPECT_EQ(rules.phase(0), P::kGone);
  EXPECT_EQ(rules.supervisor(0).exits().back().text, "no process");
  pass();
  EXPECT_EQ(now, Time{1100});
  EXPECT_EQ(calls(), Calls{"spawn 0"});
}

// ---- an epoch is lost

TEST_F(FleetRulesTest, TheNextBeginsWhenTheSurvivorHasAbortedAndTheLostIsBack) {
  run();
  ended(1);
  EXPECT_EQ(calls(), (Calls{"lose 1: rank 1 ended: exit 1 (failed)", "down 1"}));
  EXPECT_FALSE(rules.epoch_active());
  EXPECT_EQ(rules.phase(0), P::kAborting);
  EXPECT_TRUE(rules.waits(0) && !rules.waits(1));
  EXPECT_EQ(rules.beating(), RankMask{1});
  pass();
  rules.loaded(1, now);
  EXPECT_EQ(calls(), Calls{"spawn 1"});
  rules.aborted(0, Epoch{1});
  EXPECT_EQ(calls(), Calls{"begin 2"});
}

TEST_F(FleetRulesTest, OrTheOtherWayRound) {
  run();
  ended(1);
  rules.aborted(0, Epoch{1});
  EXPECT_EQ(rules.phase(0), P::kWaiting);
  pass();
  calls();
  rules.loaded(1, now);
  EXPECT_EQ(calls(), Calls{"begin 2"});
}

TEST_F(FleetRulesTest, ALateAbortedOfAnOlderEpochIsIgnored) {
  run();
  rules.aborted(0, Epoch{1});  // nobody asked
  EXPECT_EQ(rules.phase(0), P::kRunning);
  rules.set_topology(rules.topology(), now);
  rules.aborted(0, Epoch{1});
  rules.aborted(1, Epoch{1});
  EXPECT_EQ(rules.epoch(), Epoch{2});
  rules.set_topology(rules.topology(), now);
  calls();
  rules.aborted(0, Epoch{2});
  rules.aborted(1, Epoch{1});
  EXPECT_EQ(rules.phase(1), P::kAborting);
  EXPECT_EQ(calls(), Calls{});
  rules.aborted(1, Epoch{2});
  EXPECT_EQ(calls(), Calls{"begin 3"});
}

TEST_F(FleetRulesTest, WhoHangsLosesTheEpochAndIsKilled) {
  run();
  rules.hung(0, "no heartbeat", now);
  EXPECT_EQ(calls(), (Calls{"hangs 0: no heartbeat", "lose 1: rank 0 hangs (failed)", "kill 0"}));
  // Its end loses nothing more, and does not count as a survivor's word.
  rules.aborted(1, Epoch{1});
  EXPECT_EQ(calls(), Calls{});
  ended(0);
  EXPECT_EQ(calls(), Calls{"down 0"});
  rules.hung(0, "no heartbeat", now);  // there is nobody
  EXPECT_EQ(calls(), Calls{});
}

TEST_F(FleetRulesTest, WhoDoesNotAbortInTimeIsKilled) {
  run();
  now = now + Duration(7);
  const Time lost = now;
  ended(1);
  pass();
  rules.loaded(1, now);
  calls();
  while (now < lost + kAllowance) {
    ASSERT_EQ(calls(), Calls{});
    pass();
  }
  EXPECT_EQ(now, lost + kAllowance);
  EXPECT_EQ(calls(), (Calls{"hangs 0: did not leave its step within 2.5 s", "kill 0"}));
  ended(0);
  pass();
  rules.loaded(0, now);
  EXPECT_EQ(calls(), (Calls{"down 0", "spawn 0", "begin 2"}));
  // The deadline went with the epoch that was lost.
  rules.pass_time(now + kAllowance);
  EXPECT_EQ(calls(), Calls{});
}

TEST_F(FleetRulesTest, AWorkerThatWasKilledIsAnotherLoss) {
  run();
  rules.ended(0, "signal 9 (Killed)", Loss::kKilled, false, now);
  EXPECT_EQ(calls(), (Calls{"lose 1: rank 0 ended: signal 9 (Killed) (killed)", "down 0"}));
}

TEST_F(FleetRulesTest, WhoHasWorkedIsStartedAtOnce) {
  run();
  join(2);
  rules.step_done();
  ended(1);
  EXPECT_EQ(*wake, now);
  pass();
  EXPECT_EQ(calls(), (Calls{"lose 1: rank 1 ended: exit 1 (failed)", "down 1", "spawn 1"}));
  // Rank 2 takes no part, so it has not worked.
  ended(2);
  EXPECT_EQ(*wake, now + Duration(100));
}

// ---- memory

TEST_F(FleetRulesTest, TheEpochIsLostBeforeTheMemory) {
  run();
  ended(1, true);
  EXPECT_EQ(calls(), (Calls{"lose 1: rank 1 ended: exit 1 (failed)", "memory lost 1", "down 1"}));
}

TEST_F(FleetRulesTest, TheMemoryOfOneThatTakesNoPartIsAnEpochToo) {
  run();
  join(2);
  ended(2, true);
  EXPECT_EQ(calls(), (Calls{"lose 1: rank 2 ended: exit 1 (failed)", "memory lost 2", "down 2"}));
}

TEST_F(FleetRulesTest, BeforeTheFirstEpochThereIsNothingToLose) {
  rules.start(now);
  calls();
  ended(0, true);
  EXPECT_EQ(calls(), Calls{"down 0"});
}

// ---- workers that come and go

TEST_F(FleetRulesTest, OneThatTakesNoPartEndsNoEpoch) {
  run();
  EXPECT_EQ(rules.unused_rank(), 2);
  rules.start_worker(2, now);
  EXPECT_EQ(rules.unused_rank(), std::nullopt);
  rules.loaded(2, now);
  EXPECT_EQ(calls(), (Calls{"spawn 2", "waits 2"}));
  EXPECT_EQ(rules.phase(2), P::kWaiting);
  rules.hung(2, "no heartbeat", now);
  ended(2);
  EXPECT_EQ(calls(), (Calls{"hangs 2: no heartbeat", "kill 2", "down 2"}));
  pass();
  rules.loaded(2, now);  // it has joined long ago
  EXPECT_EQ(calls(), Calls{"spawn 2"});
  EXPECT_TRUE(rules.epoch_active());
}

TEST_F(FleetRulesTest, OneThatIsToJoinAndEndsIsGivenUp) {
  run();
  rules.start_worker(2, now);
  calls();
  ended(2);
  EXPECT_EQ(calls(), (Calls{"ask to stop 2", "failed 2", "down 2"}));
  EXPECT_FALSE(rules.wanted(2));
  EXPECT_EQ(rules.supervisor(2).state(), S::kDown);
  EXPECT_FALSE(rules.supervisor(2).deadline().has_value());
  EXPECT_EQ(rules.unused_rank(), 2);
}

TEST_F(FleetRulesTest, AChangeOfRanks) {
  run();
  join(2);
  rules.set_topology(kv::Topology(RankMask{0b101}), now);
  EXPECT_EQ(calls(), Calls{"lose 1 as planned: ranks 0, 2 take part from now on (killed)"});
  rules.aborted(0, Epoch{1});
  EXPECT_EQ(calls(), Calls{});  // rank 1 may still write, though it takes no part in what comes
  rules.aborted(1, Epoch{1});
  EXPECT_EQ(calls(), Calls{"begin 2"});
  EXPECT_EQ(rules.phase(1), P::kWaiting);
  EXPECT_EQ(rules.phase(2), P::kRunning);
  rules.stop_worker(1, now);
  EXPECT_EQ(calls(), Calls{"ask to stop 1"});
  ended(1);
  EXPECT_EQ(calls(), (Calls{"stopped 1", "down 1"}));
  EXPECT_TRUE(rules.epoch_active());
  rules.stop_worker(1, now);  // there is none
  EXPECT_EQ(calls(), Calls{"stopped 1"});
}

TEST_F(FleetRulesTest, TheOthersBeginWithoutOneThatIsGone) {
  run();
  ended(1);
  rules.aborted(0, Epoch{1});
  calls();
  rules.set_topology(kv::Topology(RankMask{0b001}), now);  // no epoch runs, so none is lost
  EXPECT_EQ(calls(), Calls{"begin 2"});
}

// It dies before it said Aborted, and the others wait for nothing else.
TEST_F(FleetRulesTest, TheEndOfOneThatTakesNoPartMayLetTheNextBegin) {
  run();
  rules.set_topology(kv::Topology(RankMask{0b001}), now);
  rules.aborted(0, Epoch{1});
  calls();
  ended(1);
  EXPECT_EQ(calls(), (Calls{"down 1", "begin 2"}));
}

// ---- stop

TEST_F(FleetRulesTest, AfterAStopNothingBegins) {
  run();
  join(2);
  rules.stop(now);
  EXPECT_EQ(calls(), (Calls{"lose 1: stopping (killed)", "ask to stop 0", "ask to stop 1", "ask to stop 2"}));
  rules.aborted(0, Epoch{1});
  rules.aborted(1, Epoch{1});
  EXPECT_EQ(rules.phase(1), P::kWaiting);
  ended(0);
  EXPECT_EQ(calls(), Calls{"down 0"});
  EXPECT_EQ(*wake, now + Duration(2000));
  pass();
  EXPECT_EQ(calls(), (Calls{"kill the late 1", "kill the late 2"}));
  ended(1);
  ended(2);
  EXPECT_EQ(calls(), (Calls{"down 1", "down 2"}));
  EXPECT_EQ(wake, std::nullopt);
}

TEST_F(FleetRulesTest, AfterAStopTheTableAloneSaysWhoIsLate) {
  run();
  rules.stop(now);
  calls();
  rules.pass_time(now + Duration(1999));
  EXPECT_EQ(calls(), Calls{});
  rules.kill_all(now);
  EXPECT_EQ(calls(), (Calls{"kill 0", "kill 1"}));
  EXPECT_EQ(*wake, now + Duration(3000));
  rules.pass_time(now + kAllowance);
  EXPECT_EQ(calls(), (Calls{"kill the late 0", "kill the late 1"}));  // again: they are not reaped
}

}  // namespace
}  // namespace weft::daemon
