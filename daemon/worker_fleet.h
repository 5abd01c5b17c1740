// The worker processes of all ranks: spawned, brought to a common start, replaced when they die.
//
// Start: every worker gets Describe; when all have answered alike the arenas are made; every worker gets
// MapArenas, loads its share of the weights and says Loaded. Epochs begin and end by the rules of
// daemon/fleet_rules.h; here are the processes, messages, timers and log lines that they ask for. An epoch
// ends by the abort word.
//
// With --spare there is one process more, from the first epoch on, which takes the place of a worker that
// died (daemon/spare_worker.h).
//
// Loop thread only. Expected failures go to FleetListener::fleet_failed() and only before the fleet has been
// ready once; afterwards it retries for ever.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/arenas.h"
#include "daemon/event_log.h"
#include "daemon/fleet_rules.h"
#include "daemon/loop.h"
#include "daemon/options.h"
#include "daemon/process.h"
#include "daemon/spare_worker.h"
#include "daemon/start_progress.h"
#include "proto/worker.pb.h"

namespace weft::daemon {

class FleetListener {
 public:
  virtual ~FleetListener() = default;
  // All ranks have described the model: how large are the arenas?
  virtual Result<ArenaSizes> size_arenas(const wire::ModelDescription& model) = 0;
  virtual void arenas_made(kv::ControlArena& control, int results_fd) = 0;
  virtual void epoch_began(Epoch epoch) = 0;
  // The abort word is set. Results may still arrive until the next epoch begins. Returns how long a survivor
  // may take to leave its step.
  virtual Duration epoch_lost(Epoch epoch, const std::string& reason, Loss loss) = 0;
  virtual void worker_started(int rank) = 0;  // a new process for this rank
  // Of start_worker(): it is loaded and waits to take part, or it has ended before and is given up.
  virtual void worker_waits(int rank) = 0;
  virtual void worker_failed(int rank, const Error& why) = 0;
  virtual void worker_stopped(int rank) = 0;  // of stop_worker(): its process is gone
  // It ended with a Failure of its "pool": what lay there is gone. The epoch is lost.
  virtual void memory_lost(int rank) = 0;
  // The fleet cannot start and has given up.
  virtual void fleet_failed(const Error& failure) = 0;
  virtual void fleet_stopped() = 0;  // after stop(): every process is reaped
};

class WorkerFleet : private FleetShell {
 public:
  WorkerFleet(Loop& loop, const EventLog& log, const Options& options, SupervisorLimits limits,
              FleetListener& listener);
  ~WorkerFleet() override;

  void start() { rules_.start(loop_.now()); }
  void stop();      // politely; kills what is late
  void kill_all();  // now; still reaps
  void hung(int rank, const std::string& why);
  void step_done();  // by all ranks

  // ---- workers that come and go
  const kv::Topology& topology() const { return rules_.topology(); }
  // No plan is in flight.
  void set_topology(const kv::Topology& topology) { rules_.set_topology(topology, loop_.now()); }
  void start_worker(int rank, const Device& device);
  void stop_worker(int rank) { rules_.stop_worker(rank, loop_.now()); }
  bool has_worker(int rank) const { return rank >= 0 && rank < rank_count() && rules_.wanted(rank); }
  std::optional<int> unused_rank() const { return rules_.unused_rank(); }
  const Device& device(int rank) const;
  bool waits(int rank) const { return rules_.waits(rank); }
  int rank_count() const { return rules_.rank_count(); }  // that there may be

  bool epoch_active() const { return rules_.epoch_active(); }
  Epoch epoch() const { return rules_.epoch(); }
  bool ever_ready() const { return rules_.ever_ready(); }
  bool has_arenas() const { return arenas_.has_value(); }
  RankMask beating() const { return rules_.beating(); }
  uint64_t restarts() const;
  const wire::ModelDescription& model() const { return model_; }

  struct Status {
    WorkerState state{};
    pid_t pid = 0;
    uint64_t restarts = 0;
    std::string last_exit;
    Duration uptime{0};
    std::string device;
    bool takes_part = false;
  };
  Status status(int rank) const;
  // Of the ranks that are not there: how their last process ended. Empty while an epoch runs.
  std::string trouble() const;
  // Of the present start or, later, of the return of lost ranks.
  TensorCount loading() const { return loading_.shown(); }

 private:
  struct Rank;

  // ---- FleetShell
  void carry_out(int rank, WorkerState was, WorkerEvent event, WorkerAction action) override;
  void hangs(int rank, const std::string& why) override;
  void begin_epoch(Epoch epoch) override;
  Duration lose_epoch(Epoch epoch, const std::string& reason, Loss loss, bool planned) override;
  void memory_lost(int rank) override;
  void worker_waits(int rank) override { listener_.worker_waits(rank); }
  void worker_failed(int rank) override;
  void worker_stopped(int rank) override;
  void wake_at(std::optional<Time> when) override;

  void spawn_worker(int rank);
  bool adopt_spare(int rank);  // instead, if there is one
  void watch(int rank);
  SpareWorker::Script spare_script();
  void send(int rank, const wire::ToWorker& message, const std::vector<int>& descriptors = {});
  void read_socket(int rank);
  void read_output(int rank);
  void take_message(int rank, const wire::FromWorker& message);
  void take_description(int rank, const wire::ModelDescription& description);
  void worker_ended(int rank);
  void give_up_if_hopeless(int rank, const std::string& how);
  void map_arenas_everywhere();
  void send_arenas(int rank);
  void note_progress();
  void fail(const Error& failure);
  void check_stopped();
  wire::ToWorker describe(int rank) const;

  Loop& loop_;
  const EventLog& log_;
  const Options& options_;
  FleetListener& listener_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::optional<SpareWorker> spare_;  // with --spare
  std::optional<Timer> spare_timer_;
  std::optional<Arenas> arenas_;
  wire::ModelDescription model_;
  StartProgress loading_;
  FleetRules rules_;
  Timer timer_;  // of their deadlines
  bool failed_ = false;
};

}  // namespace weft::daemon
