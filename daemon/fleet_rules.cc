#include "daemon/fleet_rules.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "proto/vocab/check.h"

namespace weft::daemon {
namespace {

std::string rank_text(int rank) { return "rank " + std::to_string(rank); }

std::string seconds_text(Duration duration) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds(duration));
  return text;
}

}  // namespace

FleetRules::FleetRules(SupervisorLimits limits, int rank_count, const kv::Topology& first, FleetShell& shell)
    : shell_(shell), ranks_(static_cast<size_t>(rank_count), Rank{Supervisor(limits)}), topology_(first) {}

void FleetRules::start(Time now) {
  for (int place = 0; place < topology_.count(); ++place) {
    at(topology_.rank(place)).wanted = true;
    apply(topology_.rank(place), WorkerEvent::kWantUp, now);
  }
}

void FleetRules::stop(Time now) {
  stopping_ = true;
  lose_epoch("stopping", Loss::kKilled, false, now);
  abort_deadline_.reset();  // the supervisor's own deadline rules now
  for (int rank = 0; rank < rank_count(); ++rank) apply(rank, WorkerEvent::kWantDown, now);
}

void FleetRules::kill_all(Time now) {
  for (int rank = 0; rank < rank_count(); ++rank) apply(rank, WorkerEvent::kHung, now);
}

void FleetRules::set_topology(const kv::Topology& topology, Time now) {
  topology_ = topology;
  lose_epoch("ranks " + topology.text() + " take part from now on", Loss::kKilled, true, now);
  begin_epoch_if_all_wait();
}

void FleetRules::start_worker(int rank, Time now) {
  CHECK(!topology_.contains(rank) && !wanted(rank), "rank ", rank, " is there");
  at(rank).wanted = at(rank).joining = true;
  apply(rank, WorkerEvent::kWantUp, now);
}

void FleetRules::stop_worker(int rank, Time now) {
  CHECK(!topology_.contains(rank), "rank ", rank, " takes part");
  at(rank).wanted = at(rank).joining = false;
  apply(rank, WorkerEvent::kWantDown, now);
  if (phase(rank) == WorkerPhase::kGone) shell_.worker_stopped(rank);
}

// ---- what happens to processes

void FleetRules::spawned(int rank, WorkerPhase phase) {
  CHECK(at(rank).phase == WorkerPhase::kGone, "a second process for rank ", rank);
  at(rank).phase = phase;
}

void FleetRules::spawn_failed(int rank, const std::string& why, Time now) {
  at(rank).supervisor.record_exit(now, why);
  apply(rank, WorkerEvent::kExited, now);
}

void FleetRules::described(int rank, Time now) {
  CHECK(phase(rank) == WorkerPhase::kDescribing, "rank ", rank, " describes itself again");
  at(rank).phase = WorkerPhase::kDescribed;
  progress(rank, now);
}

void FleetRules::loads(int rank, Time since) {
  at(rank).phase = WorkerPhase::kLoading;
  progress(rank, since);
}

void FleetRules::progress(int rank, Time now) {
  at(rank).supervisor.progress(now);
  wake();
}

void FleetRules::loaded(int rank, Time now) {
  CHECK(phase(rank) == WorkerPhase::kLoading, "rank ", rank, " does not load");
  at(rank).phase = WorkerPhase::kWaiting;
  apply(rank, WorkerEvent::kReady, now);
  if (std::exchange(at(rank).joining, false)) shell_.worker_waits(rank);
  begin_epoch_if_all_wait();
}

void FleetRules::aborted(int rank, Epoch epoch) {
  if (phase(rank) != WorkerPhase::kAborting || epoch != epoch_) return;  // late: of an older epoch
  at(rank).phase = WorkerPhase::kWaiting;
  begin_epoch_if_all_wait();
}

void FleetRules::hung(int rank, const std::string& why, Time now) {
  if (phase(rank) == WorkerPhase::kGone) return;
  shell_.hangs(rank, why);
  if (topology_.contains(rank)) lose_epoch(rank_text(rank) + " hangs", Loss::kFailed, false, now);
  apply(rank, WorkerEvent::kHung, now);
}

void FleetRules::ended(int rank, const std::string& how, Loss loss, bool memory_lost, Time now) {
  Rank& own = at(rank);
  own.phase = WorkerPhase::kGone;
  own.supervisor.record_exit(now, how);
  if (topology_.contains(rank) || memory_lost) {
    lose_epoch(rank_text(rank) + " ended: " + how, loss, false, now);
  }
  if (memory_lost && ever_ready_) shell_.memory_lost(rank);
  if (std::exchange(own.joining, false)) {
    own.wanted = false;
    apply(rank, WorkerEvent::kWantDown, now);
    shell_.worker_failed(rank);
  } else if (!own.wanted && !stopping_) {
    shell_.worker_stopped(rank);
  }
  apply(rank, WorkerEvent::kExited, now);
  begin_epoch_if_all_wait();
}

void FleetRules::step_done() {
  for (int place = 0; place < topology_.count(); ++place) at(topology_.rank(place)).supervisor.worked();
}

void FleetRules::pass_time(Time now) {
  if (abort_deadline_ && *abort_deadline_ <= now) {
    abort_deadline_.reset();
    for (int rank = 0; rank < rank_count(); ++rank) {
      if (phase(rank) != WorkerPhase::kAborting) continue;
      hung(rank, "did not leave its step within " + seconds_text(abort_allowance_), now);
    }
  }
  for (int rank = 0; rank < rank_count(); ++rank) {
    const auto deadline = supervisor(rank).deadline();
    if (deadline && *deadline <= now) apply(rank, WorkerEvent::kTimeout, now);
  }
  wake();
}

// ---- how things stand

bool FleetRules::waits(int rank) const {
  return phase(rank) == WorkerPhase::kWaiting || phase(rank) == WorkerPhase::kAborting;
}

bool FleetRules::all_described() const {
  for (int place = 0; place < topology_.count(); ++place) {
    if (phase(topology_.rank(place)) != WorkerPhase::kDescribed) return false;
  }
  return true;
}

std::optional<int> FleetRules::unused_rank() const {
  for (int rank = 0; rank < rank_count(); ++rank) {
    if (!wanted(rank) && phase(rank) == WorkerPhase::kGone) return rank;
  }
  return std::nullopt;
}

RankMask FleetRules::beating() const {
  RankMask mask = 0;
  for (int rank = 0; rank < rank_count(); ++rank) {
    if (waits(rank) || phase(rank) == WorkerPhase::kRunning) mask |= mask_of(rank);
  }
  return mask;
}

// Runs the table and has done what it says.
void FleetRules::apply(int rank, WorkerEvent event, Time now) {
  Supervisor& supervisor = at(rank).supervisor;
  const WorkerState was = supervisor.state();
  const WorkerAction action = supervisor.handle(event, now);
  wake();
  shell_.carry_out(rank, was, event, action);
}

void FleetRules::lose_epoch(const std::string& reason, Loss loss, bool planned, Time now) {
  if (!epoch_active_) return;
  epoch_active_ = false;
  for (Rank& rank : ranks_) {
    if (rank.phase == WorkerPhase::kRunning) rank.phase = WorkerPhase::kAborting;
  }
  abort_allowance_ = shell_.lose_epoch(epoch_, reason, loss, planned);
  abort_deadline_ = now + abort_allowance_;
  wake();
}

void FleetRules::begin_epoch_if_all_wait() {
  if (stopping_ || epoch_active_) return;
  for (int rank = 0; rank < rank_count(); ++rank) {
    const bool ready = topology_.contains(rank) ? phase(rank) == WorkerPhase::kWaiting
                                                : phase(rank) != WorkerPhase::kAborting;
    if (!ready) return;
  }
  abort_deadline_.reset();
  wake();
  epoch_ = Epoch{number(epoch_) + 1};
  epoch_active_ = ever_ready_ = true;
  for (int place = 0; place < topology_.count(); ++place) {
    at(topology_.rank(place)).phase = WorkerPhase::kRunning;
  }
  shell_.begin_epoch(epoch_);
}

void FleetRules::wake() {
  std::optional<Time> first = abort_deadline_;
  for (const Rank& rank : ranks_) {
    const auto deadline = rank.supervisor.deadline();
    if (deadline && (!first || *deadline < *first)) first = deadline;
  }
  shell_.wake_at(first);
}

}  // namespace weft::daemon
