// Runs the control plane against the workers: events in, plans out, results back.
//
// Owns the control plane, the plans in flight (flights.h has the rules about them) and the request book. The
// effects of a step are taken when it is done, in order of steps. A plan is repeated as the same bytes; a
// repeat that draws another token than an earlier attempt reported is our bug: logged and counted. Of
// abandoned plans the control plane retries the sequences one at a time.
//
// Callers post events; they are handled in the next turn, never inside of post(). Loop thread only.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "controlplane/control_plane.h"
#include "daemon/event_log.h"
#include "daemon/flights.h"
#include "daemon/loop.h"
#include "daemon/plan_recorder.h"
#include "daemon/request_book.h"
#include "daemon/watchdog.h"
#include "kv/control_arena.h"
#include "proto/worker.pb.h"

namespace weft::daemon {

class EngineListener {
 public:
  virtual ~EngineListener() = default;
  virtual void token(const controlplane::TokenNotice& notice) = 0;
  virtual void prefill(const controlplane::PrefillNotice& notice) = 0;
  virtual void digest(RequestId request, int64_t position, const std::string& sha256) = 0;
  virtual void finished(const controlplane::FinishedNotice& notice, const RequestRecord& record) = 0;
  virtual void regrouped(const controlplane::RegroupedNotice& notice) = 0;
  virtual void pinned(const controlplane::PinNotice& notice) = 0;
  virtual void step_done() = 0;  // by all ranks
  // Without an error: no plan is published before the next epoch has begun, which is of these ranks.
  virtual void topology(const controlplane::TopologyNotice& notice) = 0;
  // A worker broke its contract or does not move.
  virtual void rank_hung(int rank, const std::string& why) = 0;
};

struct EngineMetrics {
  uint64_t steps = 0;  // done
  uint64_t repeated_plans = 0;
  uint64_t token_mismatches = 0;  // our bug, see above
  kv::CrossedBytes crossed;
  uint64_t hot_hits = 0, hot_misses = 0;  // entries that lie on the host, chosen by decode rows
  struct Rank {
    uint64_t steps = 0, compute_ns = 0, wait_ns = 0, gap_ns = 0;
  };
  std::array<Rank, kMaxRanks> ranks{};
};

class Engine {
 public:
  Engine(Loop& loop, const EventLog& log, const controlplane::Limits& limits, kv::ControlArena& control,
         int results_fd, Duration hang_deadline, Duration heartbeat_deadline, std::string record_folder,
         EngineListener& listener);

  // ---- requests
  // `prompt_tokens`: with its parent's.
  void arrive(controlplane::RequestArrived event, int64_t prompt_tokens);
  void post(controlplane::Event event);

  // ---- workers
  void epoch_began(Epoch epoch);
  Duration epoch_lost(Loss loss);  // how long a worker may take to leave its step
  void worker_started(int rank) { watchdog_.forget(rank); }
  void memory_lost(int rank);  // after epoch_lost()
  // While no epoch runs: plans in flight will not be run any more, and then this happens.
  void post_without_plans(controlplane::Event event);
  // Which ranks must show a heartbeat; asked at every look.
  std::function<RankMask()> beating;

  // ---- queries
  const controlplane::ControlPlane& plane() const { return plane_; }
  const RequestBook& book() const { return book_; }
  const EngineMetrics& metrics() const { return metrics_; }
  // What a request has stored and done, now or when it ended.
  void fill_trace(const RequestRecord& record, wire::Trace* to) const;
  PlanRecorder& recorder() { return recorder_; }

 private:
  struct Parcel {
    controlplane::Plan plan;  // without table writes: they are applied
    std::string bytes;
    Duration allowance{};
    Time published{};
  };
  using PlanFlights = Flights<Parcel, wire::StepResult>;
  using Flight = PlanFlights::Flight;

  void schedule_turn();
  void turn();
  void dispatch(const std::vector<controlplane::Notice>& notices);
  void plan_ahead();
  void apply(const controlplane::TableWrite& write);
  void apply(const controlplane::HostTableWrite& write);
  void publish(Parcel& parcel);
  void collect();
  bool accept(int rank, const std::vector<std::byte>& bytes);
  void finish_done_steps();
  void finish_step(const Flight& flight);
  void tell_digests(const Flight& flight, const std::vector<controlplane::Notice>& notices);
  Duration meter(const Flight& flight);
  void look();
  int ranks() const { return plane_.limits().rank_count; }  // that there may be

  Loop& loop_;
  const EventLog& log_;
  EngineListener& listener_;
  kv::ControlArena& control_;
  int results_fd_;
  Duration hang_deadline_;
  controlplane::ControlPlane plane_;
  RequestBook book_;
  EngineMetrics metrics_;
  PlanRecorder recorder_;
  Watchdog watchdog_;
  Epoch epoch_{};  // the latest
  std::vector<controlplane::Event> events_;
  PlanFlights flights_;
  bool turn_scheduled_ = false;
  Time last_done_{};  // when the latest step was done
  Watch results_watch_;
  Timer look_timer_;
  Timer deadline_timer_;
};

}  // namespace weft::daemon
