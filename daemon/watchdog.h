// Says which workers hang, from the progress words they leave in the control arena.
//
// Two rules. A rank whose heartbeat stands still for the heartbeat deadline is hung (stopped, or stuck
// outside of all code that beats). And when a plan is in flight and *no* rank's progress words have moved for
// the plan's allowance, the ranks that the others wait for are hung; if that names none, all are.
//
// The same allowance is what a survivor of a lost epoch gets to leave its step (daemon/worker_fleet.h).
//
// Silence is counted in looks, each at most one look interval long, so that a daemon that was itself stopped
// for a while does not blame its workers. Pure. Loop thread only.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "controlplane/plan.h"
#include "proto/vocab/clock.h"
#include "proto/vocab/ids.h"

namespace weft::daemon {

// A copy of what kv::RankState shows.
struct RankProgress {
  uint32_t heartbeat = 0;
  uint32_t step_low = 0;
  uint32_t layer = 0;
  uint32_t exchange = 0;
  uint32_t waiting_for = 0;  // RankMask; 0: computing
  uint32_t results_written = 0;
};

// How long all ranks may stand still in one place of this plan: `base`, and more for heavy rows and copies.
// One layer's work between two exchange points bounds a stand-still; 1 µs per (row, key) pair and 5 ms per
// row is far more than any build needs for that.
Duration step_allowance(const controlplane::Plan& plan, Duration base);
// After how long a worker may itself give up on another one: late enough that the watchdog judges first.
Duration longest_wait(Duration allowance);

class Watchdog {
 public:
  static constexpr Duration kLookInterval = std::chrono::milliseconds(500);

  Watchdog(int rank_count, Duration heartbeat_deadline);
  // A new process for this rank: its silence starts now.
  void forget(int rank);
  // `watched`: ranks that must beat. `allowance`: of the oldest plan in flight; empty when none is.
  // `running`: those that take part in steps.
  RankMask look(Time now, std::span<const RankProgress> ranks, RankMask watched,
                std::optional<Duration> allowance, RankMask running = ~RankMask{0});

 private:
  int rank_count_;
  Duration heartbeat_deadline_;
  Time last_look_{};
  bool looked_ = false;
  std::array<std::optional<uint32_t>, kMaxRanks> heartbeat_{};
  std::array<Duration, kMaxRanks> silence_{};
  std::array<RankProgress, kMaxRanks> progress_{};
  Duration still_{0};
};

}  // namespace weft::daemon
