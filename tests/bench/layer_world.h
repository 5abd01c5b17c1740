// The arenas of layer_measure's worker processes: weights and cache of random numbers, page tables of every
// grouping, and what the ranks leave behind.
//
// Built before the processes are forked, in memory that they share. The same seeds give the same bytes.
#pragma once

#include <memory>
#include <vector>

#include "kv/control_arena.h"
#include "kv/page_pool.h"
#include "tests/bench/layer_measure.h"
#include "worker/model/weights.h"

namespace weft::bench {

inline constexpr int kLayerRanks = 2;
inline constexpr int64_t kLayerBlock = 64;  // tokens

class LayerWorld {
 public:
  explicit LayerWorld(const LayerRun& run);
  void write_plan(wire::StepPlan& plan, size_t grouping, int64_t step) const;

  const LayerRun& run;
  const std::vector<LayerGrouping> groupings = layer_groupings();
  const worker::ModelConfig config;
  const kv::CacheGeometry geometry;
  worker::ModelWeights weights;
  std::unique_ptr<kv::ControlArena> control;
  size_t mailbox = 0;
  std::vector<std::byte*> mailboxes;
  std::vector<kv::PagePool> pools;
  // Of the ranks, in shared memory.
  struct Outcome {
    double seconds[worker::kStages];
  };
  Outcome* outcome(int rank, size_t grouping, int round) const {
    const auto index =
        (static_cast<size_t>(rank) * groupings.size() + grouping) * static_cast<size_t>(run.rounds);
    return reinterpret_cast<Outcome*>(results_.data()) + index + static_cast<size_t>(round);
  }
  struct Step {
    int64_t exchanges;
    kv::CrossedBytes crossed;
    uint64_t digest;
  };
  Step* step(int rank, size_t grouping) const {
    return reinterpret_cast<Step*>(steps_.data()) + static_cast<size_t>(rank) * groupings.size() + grouping;
  }

 private:
  int64_t blocks() const { return run.shape.context / kLayerBlock + 1; }
  kv::Grouping ranks_of(size_t grouping, int64_t sequence) const {
    const kv::DecodeWish wish = groupings[grouping].decode;
    if (wish.kind == kv::DecodeKind::kDp) return {static_cast<int>(sequence % kLayerRanks), 1, 1};
    return {0, kLayerRanks, wish.c};
  }
  TableId table(size_t grouping, int64_t sequence) const {
    return TableId{static_cast<uint32_t>(static_cast<int64_t>(grouping) * run.rows + sequence)};
  }
  void fill_pools();
  void write_tables();

  std::vector<kv::Mapping> memory_;
  kv::Mapping results_, steps_;
};

}  // namespace weft::bench
