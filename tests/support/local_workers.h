// W ranks in one process: real arenas, real runners, real exchange points, one thread per rank and step.
//
// For tests that need thousands of steps under many groupings. Plans come from the caller, page tables are in
// the arena, memory is anonymous.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kv/control_arena.h"
#include "kv/page_pool.h"
#include "worker/step_runner.h"
#include "worker/thread_pool.h"

namespace weft::test {

struct LocalModel {
  worker::ModelConfig config;
  DType weight_dtype = DType::kF32;
  kv::Mapping arena;
  worker::ModelWeights weights;
};
// Loaded once per folder, dtype and options; kept for the life of the process.
const LocalModel& local_model(const std::string& folder, DType weight_dtype, bool draft_layers = false,
                              bool split_experts = false);

struct LocalOptions {
  int rank_count = 1;
  CacheFormat cache;
  int64_t block_tokens = 64;
  int64_t max_step_rows = 2048;
  kv::PoolPages pool;     // per rank
  kv::PoolPages host;     // none: no host pool
  int64_t hot_pages = 0;  // of a sequence's hot buffer on one rank, at most
  int64_t table_count = 64;
  int64_t table_blocks = 512;
  int threads = 1;  // per rank
};

class LocalWorkers {
 public:
  LocalWorkers(const LocalModel& model, const LocalOptions& options);
  ~LocalWorkers();

  kv::ControlArena& control() { return *control_; }
  const LocalOptions& options() const { return options_; }
  const kv::CacheGeometry& geometry() const { return geometry_; }
  const LocalModel& model() const { return model_; }
  kv::PagePool& host() { return host_; }
  kv::PagePool& pool(int rank) { return pools_[static_cast<size_t>(rank)]; }

  // A new epoch, in which these ranks take part; at first all do.
  void begin_epoch(const kv::Topology& topology);
  // Runs one plan on the ranks that take part; fails with the first rank's error. Results in order of ranks.
  Result<std::vector<wire::StepResult>> run(const wire::StepPlan& plan);
  // Every row of logits that was asked for, by (request, position). A row computed twice must be equal.
  const std::map<std::pair<uint64_t, int64_t>, std::vector<float>>& logits() const { return logits_; }
  // The draft layer's, by (request, position of the lead row, round).
  using Guesses = std::map<std::tuple<uint64_t, int64_t, int64_t>, std::vector<float>>;
  const Guesses& guesses() const { return guesses_; }
  void clear_logits() { logits_.clear(); }
  // Those of positions first … end − 1: rows of drafts that did not hold will be computed again.
  void forget_logits(uint64_t request, int64_t first, int64_t end) {
    logits_.erase(logits_.lower_bound({request, first}), logits_.lower_bound({request, end}));
  }
  void keep_logits(bool keep) { keep_logits_ = keep; }

 private:
  struct Rank;
  worker::RunnerSetup setup_of(int rank);
  const LocalModel& model_;
  LocalOptions options_;
  kv::CacheGeometry geometry_;
  std::vector<kv::Mapping> memory_;
  std::unique_ptr<kv::ControlArena> control_;
  std::vector<kv::PagePool> pools_;
  kv::PagePool host_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  kv::Topology topology_;
  Epoch epoch_{0};
  std::mutex logits_mutex_;
  bool keep_logits_ = true;
  std::map<std::pair<uint64_t, int64_t>, std::vector<float>> logits_;
  Guesses guesses_;
};

}  // namespace weft::test
