// The rules between the ranks: when an epoch is lost, when the next may begin, who may take part.
//
// An *epoch* begins when every rank that shall take part waits for one and no other is still in its step. It
// ends at once when one of its workers dies, hangs or has to stop. The next begins when every survivor has
// said Aborted, every lost worker has been reaped and its successor has said Loaded; a survivor that does not
// say Aborted in time is killed. So no process of an older epoch can write into memory of a newer one.
//
// Workers come and go: a rank may start, and wait, without taking part; set_topology() says who does in the
// next epoch. What becomes of a rank that takes no part ends no epoch, unless its memory is lost.
//
// The rules alone, apart from how processes live and speak: what happens to them goes in, with the time, and
// what there is to do comes out as calls of a FleetShell: daemon/worker_fleet.h, and the simulation's
// (tests/simulation/fleet.h). What to do with one worker is the supervisor table's business
// (daemon/supervisor.h). No process, clock or thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "daemon/flights.h"
#include "daemon/supervisor.h"
#include "kv/topology.h"
#include "proto/vocab/clock.h"

namespace weft::daemon {

// Where a live process stands in the common start.
enum class WorkerPhase : uint8_t {
  kGone,
  kDescribing,
  kDescribed,
  kLoading,
  kWaiting,  // for an epoch
  kRunning,
  kAborting,  // its epoch is lost, and it has not said that it left its step
};

// Does what the rules say. It may ask them inside of each call, and tell them more.
class FleetShell {
 public:
  virtual ~FleetShell() = default;
  // What the table says, which was in state `was`. A kSpawn is answered by spawned() or spawn_failed(),
  // inside of this call.
  virtual void carry_out(int rank, WorkerState was, WorkerEvent event, WorkerAction action) = 0;
  virtual void hangs(int rank, const std::string& why) = 0;  // it is about to be killed
  virtual void begin_epoch(Epoch epoch) = 0;                 // of the topology's ranks
  // Its workers have to leave their steps. `planned`: for a change of ranks. Returns how long a survivor may
  // take.
  virtual Duration lose_epoch(Epoch epoch, const std::string& reason, Loss loss, bool planned) = 0;
  virtual void memory_lost(int rank) = 0;  // after the epoch
  // Of start_worker(): it is loaded and waits to take part, or it has ended before and is given up.
  virtual void worker_waits(int rank) = 0;
  virtual void worker_failed(int rank) = 0;
  virtual void worker_stopped(int rank) = 0;  // of stop_worker(): its process is gone
  // When to call pass_time(); empty: never. It replaces what was said before.
  virtual void wake_at(std::optional<Time> when) = 0;
};

class FleetRules {
 public:
  // There may be ranks 0 … rank_count − 1; `first` are those of the first epoch.
  FleetRules(SupervisorLimits limits, int rank_count, const kv::Topology& first, FleetShell& shell);

  void start(Time now);
  void stop(Time now);      // nothing begins any more
  void kill_all(Time now);  // of stop(), at once
  // The present epoch ends and one with these ranks begins, when they all wait.
  void set_topology(const kv::Topology& topology, Time now);
  // Of ranks that take no part.
  void start_worker(int rank, Time now);
  void stop_worker(int rank, Time now);

  // ---- what happens to processes
  void spawned(int rank, WorkerPhase phase);
  void spawn_failed(int rank, const std::string& why, Time now);
  void described(int rank, Time now);
  void loads(int rank, Time since);  // the arenas are made. Its start deadline counts from `since`
  void progress(int rank, Time now);
  void loaded(int rank, Time now);
  void aborted(int rank, Epoch epoch);
  void hung(int rank, const std::string& why, Time now);
  // It is reaped. `memory_lost`: and what lay in its pool is gone.
  void ended(int rank, const std::string& how, Loss loss, bool memory_lost, Time now);
  void step_done();  // by all ranks
  // Deadlines that are over.
  void pass_time(Time now);

  // ---- how things stand
  int rank_count() const { return static_cast<int>(ranks_.size()); }
  const kv::Topology& topology() const { return topology_; }  // of the present epoch, or of the next one
  Epoch epoch() const { return epoch_; }
  bool epoch_active() const { return epoch_active_; }
  bool ever_ready() const { return ever_ready_; }
  bool stopping() const { return stopping_; }
  const Supervisor& supervisor(int rank) const { return at(rank).supervisor; }
  WorkerPhase phase(int rank) const { return at(rank).phase; }
  bool wanted(int rank) const { return at(rank).wanted; }  // it has a process, or will have one again
  bool waits(int rank) const;                              // its process is ready, or leaves its step
  bool all_described() const;                              // all that take part
  std::optional<int> unused_rank() const;                  // one that has no process and will have none
  RankMask beating() const;                                // whose heartbeat must move

 private:
  struct Rank {
    Supervisor supervisor;
    WorkerPhase phase = WorkerPhase::kGone;
    bool wanted = false;
    bool joining = false;  // start_worker() waits for its outcome
  };

  Rank& at(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  const Rank& at(int rank) const { return ranks_[static_cast<size_t>(rank)]; }
  void apply(int rank, WorkerEvent event, Time now);
  void lose_epoch(const std::string& reason, Loss loss, bool planned, Time now);
  void begin_epoch_if_all_wait();
  void wake();

  FleetShell& shell_;
  std::vector<Rank> ranks_;
  kv::Topology topology_;
  Epoch epoch_{};
  bool epoch_active_ = false;
  bool ever_ready_ = false;
  bool stopping_ = false;
  Duration abort_allowance_{};  // of the lost epoch's survivors
  std::optional<Time> abort_deadline_;
};

}  // namespace weft::daemon
