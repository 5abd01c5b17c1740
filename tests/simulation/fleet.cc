#include "tests/simulation/fleet.h"

#include <algorithm>

namespace weft::simulation {

using daemon::WorkerAction;
using daemon::WorkerEvent;
using daemon::WorkerState;

Fleet::Fleet(Core& core, Engine& engine) : core_(core), engine_(engine) {
  for (int rank = 0; rank < core.setup.limits.rank_count; ++rank)
    ranks_.push_back(
        {.supervisor = daemon::Supervisor(core.setup.supervisor), .stalled_until = {}, .stalled_since = {}});
}

void Fleet::start() {
  topology_ = core_.ranks();
  for (int rank = 0; rank < count(); ++rank) apply(rank, WorkerEvent::kWantUp);
}

void Fleet::set_topology(RankMask ranks) {
  topology_ = ranks;
  lose_epoch(daemon::Loss::kKilled);
  begin_epoch_if_all_wait();
}

bool Fleet::stop_worker(int rank) {
  if (takes_part(rank) || !std::exchange(at(rank).wanted, false)) return false;
  apply(rank, WorkerEvent::kWantDown);
  return true;
}

bool Fleet::start_worker(int rank) {
  if (at(rank).has_process() || std::exchange(at(rank).wanted, true)) return false;
  apply(rank, WorkerEvent::kWantUp);
  return true;
}

void Fleet::stop() {
  stopping_ = true;
  lose_epoch(daemon::Loss::kKilled);
  abort_deadline_.reset();
  for (int rank = 0; rank < count(); ++rank) apply(rank, WorkerEvent::kWantDown);
}

bool Fleet::stopped() const {
  return std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.has_process(); });
}

void Fleet::pass_time() {
  const Time now = core_.now;
  if (std::exchange(seen_steps_, engine_.done_steps()) != engine_.done_steps())
    for_each_rank(topology_, [&](int rank) { at(rank).supervisor.worked(); });
  for (int rank = 0; rank < count(); ++rank) {
    Rank& own = at(rank);
    const auto over = [&](std::optional<Time> deadline) { return deadline && *deadline <= now; };
    if (over(own.stalled_until)) own.stalled_until = own.stalled_since = std::nullopt;
    const bool beats = own.state == State::kWaiting || own.state == State::kRunning;
    if (own.stalled_since && beats && !own.killed && now - *own.stalled_since > core_.setup.hang_deadline)
      hung(rank);
    if (over(abort_deadline_) && own.state == State::kAborting) hung(rank);
    if (over(own.supervisor.deadline())) apply(rank, WorkerEvent::kTimeout);
  }
  if (abort_deadline_ && *abort_deadline_ <= now) abort_deadline_.reset();
}

// Runs the table and does what it says.
void Fleet::apply(int rank, WorkerEvent event) {
  Rank& own = at(rank);
  ++core_.coverage.supervisor[static_cast<size_t>(own.supervisor.state())][static_cast<size_t>(event)];
  switch (own.supervisor.handle(event, core_.now)) {
    case WorkerAction::kNone:
    case WorkerAction::kRetryLater:
    case WorkerAction::kSettle:
    case WorkerAction::kForgive:
      break;
    case WorkerAction::kSpawn:
      spawn(rank);
      break;
    case WorkerAction::kAskToStop:
      own.asked_to_stop = true;
      break;
    case WorkerAction::kKill:
      own.killed = true;
      break;
  }
}

void Fleet::spawn(int rank) {
  Rank& own = at(rank);
  CHECK(!own.has_process(), "a second process for a rank");
  own = {.supervisor = own.supervisor,
         .spawn_fails = own.spawn_fails,
         .wanted = own.wanted,
         .stalled_until = {},
         .stalled_since = {}};
  if (own.spawn_fails) {
    own.spawn_fails = false;
    ++core_.coverage.mark(Mark::kSpawnFailed);
    apply(rank, WorkerEvent::kExited);
    return;
  }
  own.state = State::kLoading;
  core_.workers.new_process(rank);
}

void Fleet::hung(int rank) {
  if (!at(rank).has_process()) return;
  ++core_.coverage.mark(Mark::kHung);
  if (takes_part(rank)) lose_epoch(daemon::Loss::kFailed);
  apply(rank, WorkerEvent::kHung);
}

void Fleet::lose_epoch(daemon::Loss loss) {
  if (!engine_.epoch_active()) return;
  for (Rank& rank : ranks_) {
    if (rank.state == State::kRunning) rank.state = State::kAborting;
  }
  abort_deadline_ = core_.now + core_.setup.hang_deadline;
  engine_.epoch_lost(loss);
}

void Fleet::begin_epoch_if_all_wait() {
  if (stopping_ || engine_.epoch_active()) return;
  for (int rank = 0; rank < count(); ++rank) {
    const State state = at(rank).state;
    if (takes_part(rank) ? state != State::kWaiting : state == State::kAborting) return;
  }
  for_each_rank(topology_, [&](int rank) { at(rank).state = State::kRunning; });
  abort_deadline_.reset();
  ever_ready_ = true;
  engine_.epoch_began();
}

// ---- acts

bool Fleet::run_phase(int rank) {
  Rank& own = at(rank);
  if (own.state != State::kRunning || !own.acts() || !core_.workers.ready(rank)) return false;
  if (core_.workers.poisoned(rank)) {
    int64_t writes = 3;
    core_.workers.run(rank, &writes);
    own.dead = true;
  } else {
    core_.workers.run(rank);
  }
  return true;
}

bool Fleet::work(int rank, int64_t phases) {
  bool any = false;
  while (phases-- > 0 && run_phase(rank)) any = true;
  return any;
}

bool Fleet::rush() {
  bool any = false;
  for (bool more = true; more;) {
    more = false;
    for (int rank = 0; rank < count(); ++rank) more = work(rank, kPhases) || more;
    any = any || more;
  }
  return any;
}

bool Fleet::load(int rank) {
  Rank& own = at(rank);
  if (own.state != State::kLoading || !own.acts() || own.asked_to_stop) return false;
  own.state = State::kWaiting;
  apply(rank, WorkerEvent::kReady);
  begin_epoch_if_all_wait();
  return true;
}

// It may stand in the middle of a phase: that one it ends.
bool Fleet::leave_step(int rank) {
  Rank& own = at(rank);
  if (own.state != State::kAborting || !own.acts()) return false;
  if (core_.workers.ready(rank) && !core_.workers.poisoned(rank)) core_.workers.run(rank);
  own.state = State::kWaiting;
  begin_epoch_if_all_wait();
  return true;
}

bool Fleet::reap(int rank) {
  Rank& own = at(rank);
  if (!own.has_process()) return false;
  const bool leaves = own.asked_to_stop && !own.stalled_until;
  if (!own.dead && !own.killed && !leaves) return false;
  own.state = State::kGone;
  own.dead = own.killed = false;
  own.stalled_until = own.stalled_since = std::nullopt;
  const bool memory_lost = std::exchange(own.memory_lost, false);
  const daemon::Loss loss = std::exchange(own.loss, daemon::Loss::kFailed);
  if (takes_part(rank) || memory_lost) lose_epoch(loss);
  if (memory_lost && ever_ready_) {
    ++memories_lost_;
    core_.workers.lose(rank);
    engine_.feed_without_plans(MemoryLost{rank});
    core_.ledger.memory_lost(core_.plane);
  }
  own.supervisor.record_exit(core_.now, "ended");
  apply(rank, WorkerEvent::kExited);
  begin_epoch_if_all_wait();
  return true;
}

bool Fleet::kill(int rank, int64_t writes, daemon::Loss loss) {
  Rank& own = at(rank);
  if (!own.has_process() || own.dead) return false;
  const bool in_step = own.state == State::kRunning || own.state == State::kAborting;
  if (in_step && !own.stalled_until && core_.workers.ready(rank) && !core_.workers.run(rank, &writes))
    ++core_.coverage.mark(Mark::kPartialPhases);
  own.dead = true;
  own.loss = loss;
  return true;
}

bool Fleet::stall(int rank, Duration duration) {
  Rank& own = at(rank);
  if (!own.acts()) return false;
  own.stalled_since = core_.now;
  own.stalled_until = core_.now + duration;
  return true;
}

bool Fleet::lose_memory(int rank, int64_t writes) {
  if (!kill(rank, writes)) return false;
  at(rank).memory_lost = true;
  return true;
}

bool Fleet::fail_next_spawn(int rank) { return !std::exchange(at(rank).spawn_fails, true); }

// What the table thinks is what there is.
void Fleet::check() const {
  for (int rank = 0; rank < count(); ++rank) {
    const Rank& own = ranks_[static_cast<size_t>(rank)];
    const WorkerState state = own.supervisor.state();
    const bool fits = [&] {
      switch (state) {
        case WorkerState::kDown:
          return !own.has_process() && (stopping_ || !own.wanted || own.supervisor.deadline().has_value());
        case WorkerState::kStarting:
          return own.state == State::kLoading && !own.killed;
        case WorkerState::kReady:
          return own.has_process() && own.state != State::kLoading && !own.killed;
        case WorkerState::kDraining:
          return own.has_process() && own.asked_to_stop;
        case WorkerState::kStopping:
          return own.has_process() && own.killed;
      }
      return false;
    }();
    core_.verdict.expect(Checker::kEpochs, fits, "rank ", rank, " is '", daemon::worker_state_name(state),
                         "' for the supervisor, which does not fit its process");
    core_.verdict.expect(Checker::kEpochs,
                         !engine_.epoch_active() || (own.state == State::kRunning) == takes_part(rank),
                         "rank ", rank, " is not in the epoch that runs, or should not be");
  }
}

}  // namespace weft::simulation
