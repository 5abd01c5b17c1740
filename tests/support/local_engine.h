// The real control plane driving real runners in one process: requests in, tokens and logits out.
//
// Every plan is encoded as weftd encodes it, its table writes are applied to the arena, and two plans are in
// flight where the control plane wants it. Nothing is random here.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "controlplane/control_plane.h"
#include "kv/meter.h"
#include "tests/support/local_workers.h"

namespace weft::test {

struct EngineOptions {
  LocalOptions workers;
  int64_t max_chunk_rows = 0;
  int plans_in_flight = 2;
  int64_t max_context = 2048;
  RankMask start_ranks = 0;  // that take part at first; 0: all
  int64_t hot_tokens = 0;
  int64_t host_window = 4;
};

struct RequestOptions {
  controlplane::GroupingWish grouping;
  controlplane::SamplingParams sampling;
  int64_t max_tokens = 8;
  std::vector<uint32_t> stop_tokens;
  controlplane::Speculation speculation;
  bool digest = true;
  bool use_prefix_cache = true;
  controlplane::ContextPlace context = controlplane::ContextPlace::kAuto;
  std::string salt;
};

// What became of one request.
struct RequestOutcome {
  std::vector<uint32_t> tokens;
  bool finished = false;
  controlplane::FinishedNotice notice;
  std::vector<controlplane::RegroupedNotice> regroups;
  kv::CrossedBytes prefill_crossed, decode_crossed;  // all ranks together
  int64_t hot_hits = 0, hot_misses = 0;
};

class LocalEngine {
 public:
  LocalEngine(const LocalModel& model, const EngineOptions& options);

  RequestId submit(const std::vector<uint32_t>& prompt, const RequestOptions& options);
  void send(const controlplane::Event& event) { events_.push_back(event); }
  void regroup(RequestId request, kv::DecodeWish decode, kv::IndexWish index);
  void change(int rank, bool joins);

  // Runs one step; false when nothing is left to run. `seen` hears of every plan before it runs.
  bool step();
  void run_all();
  std::function<void(const wire::StepPlan&)> seen;

  const RequestOutcome& outcome(RequestId request) { return outcomes_[request]; }
  controlplane::ControlPlane& control_plane() { return control_plane_; }
  LocalWorkers& workers() { return workers_; }
  const std::vector<controlplane::TopologyNotice>& changes() const { return changes_; }
  int64_t steps() const { return steps_; }
  int64_t exchanges() const { return exchanges_; }  // that rank 0 has passed
  // SHA-256 over the raw logits of positions 0 … end, in order, one after the other. CHECKs that all are
  // there.
  std::string digest(RequestId request, int64_t positions);

 private:
  void take_plans();
  void notice(const controlplane::Notice& notice);

  EngineOptions options_;
  LocalWorkers workers_;
  controlplane::ControlPlane control_plane_;
  std::vector<controlplane::Event> events_;
  std::vector<wire::StepPlan> plans_;  // in flight, in order
  std::map<RequestId, RequestOutcome> outcomes_;
  std::vector<controlplane::TopologyNotice> changes_;
  uint64_t next_request_ = 1;
  uint64_t next_command_ = 1;
  int64_t steps_ = 0, exchanges_ = 0;
  Time now_{};
};

}  // namespace weft::test
