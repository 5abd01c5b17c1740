#include "daemon/supervisor.h"

#include <algorithm>

namespace weft::daemon {
namespace {

using S = WorkerState;
using A = WorkerAction;

// Rows: states. Columns: exited, ready, timeout, want_up, want_down, hung.
constexpr SupervisorCell kTable[kWorkerStates][kWorkerEvents] = {
    // kDown: nothing lives, so only a delay that passed or a wish matters.
    {{S::kDown, A::kNone},
     {S::kDown, A::kNone},
     {S::kStarting, A::kSpawn},
     {S::kStarting, A::kSpawn},
     {S::kDown, A::kNone},
     {S::kDown, A::kNone}},
    // kStarting
    {{S::kDown, A::kRetryLater},
     {S::kReady, A::kSettle},
     {S::kStopping, A::kKill},
     {S::kStarting, A::kNone},
     {S::kDraining, A::kAskToStop},
     {S::kStopping, A::kKill}},
    // kReady
    {{S::kDown, A::kRetryLater},
     {S::kReady, A::kNone},
     {S::kReady, A::kForgive},
     {S::kReady, A::kNone},
     {S::kDraining, A::kAskToStop},
     {S::kStopping, A::kKill}},
    // kDraining: a wish for up is remembered (wanted) and met after the exit.
    {{S::kDown, A::kRetryLater},
     {S::kDraining, A::kNone},
     {S::kStopping, A::kKill},
     {S::kDraining, A::kNone},
     {S::kDraining, A::kNone},
     {S::kStopping, A::kKill}},
    // kStopping: only the exit leads out; a kill that has not worked is repeated.
    {{S::kDown, A::kRetryLater},
     {S::kStopping, A::kNone},
     {S::kStopping, A::kKill},
     {S::kStopping, A::kNone},
     {S::kStopping, A::kNone},
     {S::kStopping, A::kNone}},
};

constexpr size_t kExitsKept = 16;

}  // namespace

const char* worker_state_name(WorkerState state) {
  static constexpr const char* kNames[kWorkerStates] = {"down", "starting", "ready", "draining", "stopping"};
  return kNames[static_cast<int>(state)];
}

SupervisorCell supervise(WorkerState state, WorkerEvent event) {
  return kTable[static_cast<int>(state)][static_cast<int>(event)];
}

WorkerAction Supervisor::handle(WorkerEvent event, Time now) {
  if (event == WorkerEvent::kWantUp) wanted_ = true;
  if (event == WorkerEvent::kWantDown) {
    wanted_ = false;
    if (state_ == WorkerState::kDown) deadline_.reset();
  }
  const SupervisorCell cell = supervise(state_, event);
  state_ = cell.next;
  switch (cell.action) {
    case WorkerAction::kNone:
      break;
    case WorkerAction::kSpawn:
      ++spawns_;
      deadline_ = now + limits_.start_deadline;
      break;
    case WorkerAction::kRetryLater:
      deadline_.reset();
      if (wanted_) {
        deadline_ = now + delay_;
        delay_ = std::clamp(delay_ * 2, limits_.first_delay, limits_.delay_cap);
      }
      break;
    case WorkerAction::kSettle:
      deadline_ = now + limits_.quiet_period;
      break;
    case WorkerAction::kForgive:
      delay_ = std::min(delay_, limits_.first_delay);
      deadline_.reset();
      break;
    case WorkerAction::kAskToStop:
      deadline_ = now + limits_.stop_deadline;
      break;
    case WorkerAction::kKill:
      deadline_ = now + limits_.reap_deadline;
      break;
  }
  return cell.action;
}

void Supervisor::progress(Time now) {
  if (state_ == WorkerState::kStarting) deadline_ = now + limits_.start_deadline;
}

void Supervisor::record_exit(Time now, std::string text) {
  exits_.push_back({now, std::move(text)});
  if (exits_.size() > kExitsKept) exits_.pop_front();
}

}  // namespace weft::daemon
