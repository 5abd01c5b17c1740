// The worker processes: which live, which epoch runs. The decisions are the supervisor table's.
//
// One daemon::Supervisor for each rank, asked at every event of its process and at every deadline; what it
// says is done to simulated processes. The rules between ranks are those of daemon/worker_fleet.h: an epoch
// begins when every rank waits for one, ends with the first process that is seen to die or hang, and the next
// one begins when every survivor has left its step and every lost worker has been reaped and replaced.
//
// A killed or dying process can still write until it is reaped, a survivor until it says that it left its
// step. Checker "epochs" compares what the table thinks with what there is.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "daemon/supervisor.h"
#include "tests/simulation/core.h"
#include "tests/simulation/engine.h"

namespace weft::simulation {

class Fleet {
 public:
  Fleet(Core& core, Engine& engine);

  void start();
  void stop();
  void pass_time();  // deadlines that are over
  bool stopped() const;
  bool all_run() const { return engine_.epoch_active(); }
  int64_t memories_lost() const { return memories_lost_; }

  // These ranks take part in the next epoch; the present one ends.
  void set_topology(RankMask ranks);
  RankMask topology() const { return topology_; }
  // Its process is there, and neither dead for the daemon nor about to be ready.
  bool is_there(int rank) const {
    const State state = ranks_[static_cast<size_t>(rank)].state;
    return state == State::kWaiting || state == State::kAborting;
  }
  bool waits(int rank) const {
    const Rank& own = ranks_[static_cast<size_t>(rank)];
    return own.state == State::kWaiting && own.wanted;
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
  enum class State : uint8_t { kGone, kLoading, kWaiting, kRunning, kAborting };
  struct Rank {
    daemon::Supervisor supervisor;
    State state = State::kGone;
    bool dead = false;                          // not reaped
    bool killed = false;                        // told to die
    daemon::Loss loss = daemon::Loss::kFailed;  // how it died
    bool memory_lost = false;
    bool asked_to_stop = false;
    bool spawn_fails = false;
    bool wanted = true;
    std::optional<Time> stalled_until, stalled_since;
    bool has_process() const { return state != State::kGone; }
    bool acts() const { return has_process() && !dead && !killed && !stalled_until; }
  };

  Rank& at(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  void apply(int rank, daemon::WorkerEvent event);
  void spawn(int rank);
  void hung(int rank);
  bool takes_part(int rank) const { return holds(topology_, rank); }
  void lose_epoch(daemon::Loss loss);
  void begin_epoch_if_all_wait();
  bool run_phase(int rank);
  int count() const { return static_cast<int>(ranks_.size()); }

  Core& core_;
  Engine& engine_;
  std::vector<Rank> ranks_;
  std::optional<Time> abort_deadline_;
  RankMask topology_ = 0;
  int64_t seen_steps_ = 0;  // done
  bool stopping_ = false;
  bool ever_ready_ = false;
  int64_t memories_lost_ = 0;
};

}  // namespace weft::simulation
