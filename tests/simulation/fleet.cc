#include "tests/simulation/fleet.h"

#include <algorithm>

namespace weft::simulation {

using daemon::WorkerAction;
using daemon::WorkerEvent;
using daemon::WorkerState;

Fleet::Fleet(Core& core, Engine& engine)
    : core_(core),
      engine_(engine),
      ranks_(static_cast<size_t>(core.setup.limits.rank_count)),
      rules_(core.setup.supervisor, count(), kv::Topology(core.ranks()), *this) {}

void Fleet::stop() {
  stopping_ = true;
  rules_.stop(core_.now);
}

bool Fleet::stopped() const {
  return std::none_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.process.there(); });
}

void Fleet::pass_time() {
  const Time now = core_.now;
  if (std::exchange(seen_steps_, engine_.done_steps()) != engine_.done_steps()) rules_.step_done();
  for (int rank = 0; rank < count(); ++rank) {
    Process& own = process(rank);
    if (own.stalled_until && *own.stalled_until <= now) own.stalled_until = own.stalled_since = std::nullopt;
    if (own.stalled_since && holds(rules_.beating(), rank) && !own.killed &&
        now - *own.stalled_since > core_.setup.hang_deadline)
      rules_.hung(rank, "stalled", now);
  }
  rules_.pass_time(now);
}

// ---- what the rules say

void Fleet::carry_out(int rank, WorkerState was, WorkerEvent event, WorkerAction action) {
  ++core_.coverage.supervisor[static_cast<size_t>(was)][static_cast<size_t>(event)];
  switch (action) {
    case WorkerAction::kNone:
    case WorkerAction::kRetryLater:
    case WorkerAction::kSettle:
    case WorkerAction::kForgive:
      break;
    case WorkerAction::kSpawn:
      spawn(rank);
      break;
    case WorkerAction::kAskToStop:
      process(rank).asked_to_stop = true;
      break;
    case WorkerAction::kKill:
      process(rank).killed = true;
      break;
  }
}

void Fleet::spawn(int rank) {
  CHECK(!process(rank).there(), "a second process for a rank");
  process(rank) = {};
  if (std::exchange(at(rank).spawn_fails, false)) {
    ++core_.coverage.mark(Mark::kSpawnFailed);
    rules_.spawn_failed(rank, "no process", core_.now);
    return;
  }
  process(rank).state = State::kLoading;
  core_.workers.new_process(rank);
  rules_.spawned(rank, daemon::WorkerPhase::kLoading);
}

void Fleet::hangs(int, const std::string&) { ++core_.coverage.mark(Mark::kHung); }

void Fleet::begin_epoch(Epoch epoch) {
  for (int rank = 0; rank < count(); ++rank) {
    Process& own = process(rank);
    const bool takes_part = holds(core_.topology, rank);
    core_.verdict.expect(Checker::kEpochs,
                         takes_part ? own.state == State::kWaiting
                                    : own.state != State::kRunning && own.state != State::kAborting,
                         "an epoch begins, and rank ", rank, " is not ready for it");
    if (!takes_part) continue;
    own.state = State::kRunning;
    own.epoch = epoch;
  }
  engine_.epoch_began();
}

Duration Fleet::lose_epoch(Epoch, const std::string&, daemon::Loss loss, bool) {
  for (Rank& rank : ranks_) {
    if (rank.process.state == State::kRunning) rank.process.state = State::kAborting;
  }
  engine_.epoch_lost(loss);
  return core_.setup.hang_deadline;
}

void Fleet::memory_lost(int rank) {
  ++memories_lost_;
  engine_.feed_without_plans(MemoryLost{rank});
  core_.ledger.memory_lost(core_.plane);
}

// ---- acts

bool Fleet::stop_worker(int rank) {
  if (rules_.topology().contains(rank) || !std::exchange(at(rank).wanted, false)) return false;
  rules_.stop_worker(rank, core_.now);
  return true;
}

bool Fleet::start_worker(int rank) {
  if (process(rank).there() || std::exchange(at(rank).wanted, true)) return false;
  rules_.start_worker(rank, core_.now);
  return true;
}

bool Fleet::run_phase(int rank) {
  Process& own = process(rank);
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
  Process& own = process(rank);
  if (own.state != State::kLoading || !own.acts() || own.asked_to_stop) return false;
  own.state = State::kWaiting;
  rules_.loaded(rank, core_.now);
  return true;
}

// It may stand in the middle of a phase: that one it ends.
bool Fleet::leave_step(int rank) {
  Process& own = process(rank);
  if (own.state != State::kAborting || !own.acts()) return false;
  if (core_.workers.ready(rank) && !core_.workers.poisoned(rank)) core_.workers.run(rank);
  own.state = State::kWaiting;
  rules_.aborted(rank, own.epoch);
  return true;
}

bool Fleet::reap(int rank) {
  Process& own = process(rank);
  if (!own.there()) return false;
  const bool leaves = own.asked_to_stop && !own.stalled_until;
  if (!own.dead && !own.killed && !leaves) return false;
  const Process before = std::exchange(own, {});
  if (before.memory_lost) core_.workers.lose(rank);
  rules_.ended(rank, "ended", before.loss, before.memory_lost, core_.now);
  return true;
}

bool Fleet::kill(int rank, int64_t writes, daemon::Loss loss) {
  Process& own = process(rank);
  if (!own.there() || own.dead) return false;
  const bool in_step = own.state == State::kRunning || own.state == State::kAborting;
  if (in_step && !own.stalled_until && core_.workers.ready(rank) && !core_.workers.run(rank, &writes))
    ++core_.coverage.mark(Mark::kPartialPhases);
  own.dead = true;
  own.loss = loss;
  return true;
}

bool Fleet::stall(int rank, Duration duration) {
  Process& own = process(rank);
  if (!own.acts()) return false;
  own.stalled_since = core_.now;
  own.stalled_until = core_.now + duration;
  return true;
}

bool Fleet::lose_memory(int rank, int64_t writes) {
  if (!kill(rank, writes)) return false;
  process(rank).memory_lost = true;
  return true;
}

bool Fleet::fail_next_spawn(int rank) { return !std::exchange(at(rank).spawn_fails, true); }

// What the rules think is what there is.
void Fleet::check() const {
  for (int rank = 0; rank < count(); ++rank) {
    const Rank& of = ranks_[static_cast<size_t>(rank)];
    const Process& own = of.process;
    const WorkerState state = rules_.supervisor(rank).state();
    const bool fits = [&] {
      switch (state) {
        case WorkerState::kDown:
          return !own.there() && (stopping_ || !of.wanted || rules_.supervisor(rank).deadline().has_value());
        case WorkerState::kStarting:
          return own.state == State::kLoading && !own.killed;
        case WorkerState::kReady:
          return own.there() && own.state != State::kLoading && !own.killed;
        case WorkerState::kDraining:
          return own.there() && own.asked_to_stop;
        case WorkerState::kStopping:
          return own.there() && own.killed;
      }
      return false;
    }();
    core_.verdict.expect(Checker::kEpochs, fits, "rank ", rank, " is '", daemon::worker_state_name(state),
                         "' for the supervisor, which does not fit its process");
    core_.verdict.expect(
        Checker::kEpochs,
        !engine_.epoch_active() || (own.state == State::kRunning) == holds(core_.topology, rank), "rank ",
        rank, " is not in the epoch that runs, or should not be");
  }
}

}  // namespace weft::simulation
