// The worker process: a shell around the step runner that does what the daemon says, in this order:
//
//   Describe → ModelDescription
//   MapArenas → LoadProgress … Loaded
//   Begin → plans of the epoch from the ring, a result each, until the epoch is aborted → Aborted
//   Begin …
//
// A spare worker has no rank: it is described, maps everything, says Loaded, and waits for TakeRank → Loaded;
// from then on it is that rank.
//
// Crash-only: nothing here outlives a step, and whatever goes wrong ends the process after a Failure message.
// One thread runs all of it; a ticker thread counts the heartbeat up, also while a step computes: it says
// that the process lives, the progress words (kv::RankState) say that the step does.
#pragma once

#include <memory>
#include <optional>

#include "proto/vocab/result.h"
#include "worker/arenas.h"
#include "worker/command_channel.h"
#include "worker/describe.h"
#include "worker/model/weights.h"
#include "worker/step_runner.h"
#include "worker/thread_pool.h"

namespace weft::worker {

class WorkerProcess {
 public:
  explicit WorkerProcess(CommandChannel& channel) : channel_(channel) {}
  // Runs until something fails; Stop and the daemon's death end the process elsewhere (CommandChannel).
  Error run();

 private:
  Result<void> serve();
  Result<void> describe(const wire::Describe& request);
  Result<void> map_and_load(const wire::MapArenas& message, std::vector<kv::Descriptor> descriptors);
  Result<void> take_rank(const wire::TakeRank& message);
  void wait_for_memory_loss();
  // Before the first epoch, and one of another topology: every rank has sealed its share of the weights.
  Result<void> prepare(const kv::Topology& topology);
  Result<void> run_epoch(const wire::Begin& begin);
  Result<void> run_plan(std::span<const std::byte> bytes, Epoch epoch, uint32_t sequence);
  void start_ticker();

  CommandChannel& channel_;
  std::optional<WorkerSettings> settings_;
  std::unique_ptr<Arenas> arenas_;
  bool loaded_ = false;
  Duration spin_{0};  // of this worker's waits, decided before its threads are pinned
  std::unique_ptr<ThreadPool> threads_;
  std::unique_ptr<Exchange> exchange_;
  ModelWeights weights_;
  std::unique_ptr<StepRunner> runner_;
};

}  // namespace weft::worker
