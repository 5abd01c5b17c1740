// Runs one step plan on one rank: the forward pass, its exchange points, sampling, and the result.
//
// A plan without rows moves pages only.
//
// Owns scratch memory only; everything a later step needs is in the arenas. A runner is of one topology: a
// change of the ranks that take part needs another one. One thread calls run(); kernels spread work over
// `parallel`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kv/control_arena.h"
#include "kv/page_pool.h"
#include "kv/topology.h"
#include "proto/vocab/result.h"
#include "proto/worker.pb.h"
#include "worker/comm/exchange.h"
#include "worker/model/config.h"
#include "worker/model/weights.h"

namespace weft::worker {

// The parts of a step, in order; from kProject to kFeedForward once for each layer of the model.
enum class Stage : uint8_t {
  kInputs,         // views, tokens, angles, embeddings
  kProject,        // queries, entries and index projections; entries are written
  kEntries,        // exchange point kEntries
  kChoose,         // index scores and selection
  kAttend,         // partials over own entries
  kPartials,       // exchange point kPartials, and merging
  kOutput,         // W_UV and o_proj
  kAttentionSums,  // exchange point kAttentionSums, and the residual
  kFeedForward,    // the other half of the layer
  kHead,           // head and draft layer
};
inline constexpr int kStages = 10;

struct RunnerSetup {
  const ModelConfig* config = nullptr;
  const ModelWeights* weights = nullptr;
  CacheFormat cache;
  int64_t block_tokens = 64;
  int64_t max_step_rows = 0;
  int rank = 0;
  kv::Topology topology;  // of the epochs that it runs in; empty: all ranks
  kv::ControlArena* control = nullptr;
  std::vector<kv::PagePool> pools;  // by rank
  kv::PagePool host;                // no pages: there is no host pool
  std::vector<int> cores;           // that this worker is pinned to; empty: none
  Exchange* exchange = nullptr;
  kernels::Parallel* parallel = nullptr;
  // Tests: called with every full row of logits at the rank that holds it.
  std::function<void(uint64_t request, int64_t position, std::span<const float> logits)> on_logits;
  // Tests: the same of the draft layer; `position` is the lead row's.
  std::function<void(uint64_t request, int64_t position, int64_t round, std::span<const float> logits)>
      on_guess;
  // Benchmarks: called when a part ends.
  std::function<void(Stage)> on_stage;
};

// The outbox that the exchange points of a step of `max_step_rows` rows need, for any plan and any topology
// of up to `rank_count` ranks.
size_t outbox_bytes(const ModelConfig& config, DType query_dtype, int rank_count, int64_t max_step_rows);

class StepRunner {
 public:
  explicit StepRunner(RunnerSetup setup);
  ~StepRunner();
  // kCancelled: the epoch was aborted in the middle. Other errors end the worker.
  Result<wire::StepResult> run(const wire::StepPlan& plan, Epoch epoch);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace weft::worker
