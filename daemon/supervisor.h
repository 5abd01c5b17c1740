// What to do about one worker process: a pure table of state × event, and the few values around it.
//
// *Wanted* (up or down) is kept apart from *actual* (the state). Readiness is announced by the worker, never
// guessed. After an exit a wanted worker is started again: at once if it has worked since it was started (a
// step that it took part in is done), else later each time: the delay doubles to a cap, and goes back to the
// first delay once the worker has been ready for a quiet period. Each state has at most one deadline, and its
// passing is the event kTimeout.
//
// No process, timer or clock here: the caller (daemon/worker_fleet.h) carries the actions out. Loop thread
// only.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include "proto/vocab/clock.h"

namespace weft::daemon {

enum class WorkerState : uint8_t {
  kDown,      // no process; waits for its delay if it is wanted
  kStarting,  // a process that has not said that it is ready
  kReady,
  kDraining,  // asked to stop
  kStopping,  // killed, not reaped
};
inline constexpr int kWorkerStates = 5;

enum class WorkerEvent : uint8_t { kExited, kReady, kTimeout, kWantUp, kWantDown, kHung };
inline constexpr int kWorkerEvents = 6;

enum class WorkerAction : uint8_t {
  kNone,
  kSpawn,       // start a process
  kRetryLater,  // the process is gone: if wanted, wait for the delay
  kSettle,      // ready: count the quiet period
  kForgive,     // quiet for long: the next delay is the first again
  kAskToStop,
  kKill,
};

const char* worker_state_name(WorkerState state);

struct SupervisorCell {
  WorkerState next;
  WorkerAction action;
  friend bool operator==(const SupervisorCell&, const SupervisorCell&) = default;
};
SupervisorCell supervise(WorkerState state, WorkerEvent event);

struct SupervisorLimits {
  Duration start_deadline = std::chrono::seconds(60);  // without any sign of progress while starting
  Duration stop_deadline = std::chrono::seconds(5);
  Duration reap_deadline = std::chrono::seconds(10);  // after a kill; then it is killed again
  Duration first_delay = std::chrono::milliseconds(50);
  Duration delay_cap = std::chrono::seconds(10);
  Duration quiet_period = std::chrono::seconds(30);
};

struct WorkerExit {
  Time at;
  std::string text;  // "exit 1", "signal 9 (Killed)"
};

class Supervisor {
 public:
  explicit Supervisor(SupervisorLimits limits) : limits_(limits), delay_(limits.first_delay) {}

  // Applies the table, updates wanted, delay and deadline, and says what to do now. A kSpawn that failed is
  // reported as kExited.
  WorkerAction handle(WorkerEvent event, Time now);
  // A starting worker showed progress: its start deadline counts from now.
  void progress(Time now);
  // A step that the worker took part in is done: it can work, so its next start needs no delay.
  void worked() { delay_ = Duration(0); }
  void record_exit(Time now, std::string text);

  WorkerState state() const { return state_; }
  // When to report kTimeout; empty: never in this state.
  std::optional<Time> deadline() const { return deadline_; }
  uint64_t spawns() const { return spawns_; }
  const std::deque<WorkerExit>& exits() const { return exits_; }  // the last 16, oldest first

 private:
  SupervisorLimits limits_;
  WorkerState state_ = WorkerState::kDown;
  bool wanted_ = false;
  Duration delay_;
  std::optional<Time> deadline_;
  uint64_t spawns_ = 0;
  std::deque<WorkerExit> exits_;
};

}  // namespace weft::daemon
