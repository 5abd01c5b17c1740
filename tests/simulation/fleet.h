// The worker processes, simulated: which live, what they do, and what the daemon's rules say about them.
//
// daemon::FleetRules, the daemon's own, hears what happens to them and has done to them what it says; there
// is no rule here, save the watchdog's: a process that does not act for longer than the deadline hangs
// (daemon/watchdog.h has threads and clocks).
//
// A killed or dying process can still write until it is reaped, a survivor until it says that it left its
// step. Checker "epochs" compares what the rules think with what there is.
#pragma once

#include <optional>
#include <vector>

#include "daemon/fleet_rules.h"
#include "tests/simulation/core.h"
#include "tests/simulation/engine.h"

namespace weft::simulation {

class Fleet : private daemon::FleetShell {
 public:
  Fleet(Core& core, Engine& engine);

  void start() { rules_.start(core_.now); }
  void stop();
  void pass_time();  // deadlines that are over
  bool stopped() const;
  bool all_run() const { return engine_.epoch_active(); }
  int64_t memories_lost() const { return memories_lost_; }

  // These ranks take part in the next epoch; the present one ends.
  void set_topology(RankMask ranks) { rules_.set_topology(kv::Topology(ranks), core_.now); }
  bool is_there(int rank) const { return rules_.waits(rank); }
  bool waits(int rank) const {
    return rules_.phase(rank) == daemon::WorkerPhase::kWaiting && rules_.wanted(rank);
  }

  // ---- acts; false: there was nothing to do
  bool stop_worker(int rank);  // of a rank that takes no part
  bool start_worker(int rank);
  bool work(int rank, int64_t phases);  // some phases of one rank
  bool rush();
  bool load(int rank);
  bool leave_step(int rank);
  bool reap(int rank);
  // It dies in its next phase, after so many writes.
  bool kill(int rank, int64_t writes, daemon::Loss loss = daemon::Loss::kFailed);
  bool stall(int rank, Duration duration);
  bool fail_next_spawn(int rank);
  bool lose_memory(int rank, int64_t writes);  // it dies so, and its rank's pool with it

  void check() const;

 private:
  // Of the process, whatever the rules think.
  enum class State : uint8_t { kGone, kLoading, kWaiting, kRunning, kAborting };
  struct Process {
    State state = State::kGone;
    Epoch epoch{};                              // that it began last
    bool dead = false;                          // not reaped
    bool killed = false;                        // told to die
    daemon::Loss loss = daemon::Loss::kFailed;  // how it died
    bool memory_lost = false;
    bool asked_to_stop = false;
    std::optional<Time> stalled_until, stalled_since;
    bool there() const { return state != State::kGone; }
    bool acts() const { return there() && !dead && !killed && !stalled_until; }
  };
  struct Rank {
    Process process;
    bool wanted = true;  // by who starts and stops workers
    bool spawn_fails = false;
  };

  // ---- FleetShell
  void carry_out(int rank, daemon::WorkerState was, daemon::WorkerEvent event,
                 daemon::WorkerAction action) override;
  void hangs(int rank, const std::string& why) override;
  void begin_epoch(Epoch epoch) override;
  Duration lose_epoch(Epoch epoch, const std::string& reason, daemon::Loss loss, bool planned) override;
  void memory_lost(int rank) override;
  void worker_waits(int) override {}
  void worker_failed(int rank) override { at(rank).wanted = false; }
  void worker_stopped(int) override {}
  void wake_at(std::optional<Time>) override {}  // pass_time() is called all the time

  Rank& at(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  Process& process(int rank) { return at(rank).process; }
  void spawn(int rank);
  bool run_phase(int rank);
  int count() const { return static_cast<int>(ranks_.size()); }

  Core& core_;
  Engine& engine_;
  std::vector<Rank> ranks_;
  daemon::FleetRules rules_;
  bool stopping_ = false;
  int64_t seen_steps_ = 0;  // done
  int64_t memories_lost_ = 0;
};

}  // namespace weft::simulation
