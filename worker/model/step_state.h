// What the phases of one step share on one rank: the setup, the layout, scratch buffers, and the meter.
//
// Scratch grows to the largest step seen and is kept. Everything here belongs to the thread that runs the
// step; kernels spread rows over threads and write disjoint parts.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/gemm.h"
#include "kv/meter.h"
#include "proto/vocab/units.h"
#include "worker/comm/routes.h"
#include "worker/model/hot_buffer.h"
#include "worker/page_mover.h"
#include "worker/step_runner.h"

namespace weft::worker {

// How this rank sees the cache of one span, for one step.
struct CacheView {
  // Of one part, by block: the page's first byte in the pool this rank reads it from (nullptr where it does
  // not read it), and whether that pool is another rank's. Of the first so many blocks it is the host pool.
  struct Part {
    std::vector<const std::byte*> page;
    std::vector<uint8_t> remote;
    int64_t host_blocks = 0;
  };
  // Under the span's grouping. Whole rows read every part, wide rows those of their c-group; of the others
  // there are no blocks here.
  std::vector<Part> entries;
  Part index_keys;  // under index_c
  // Positions that this rank reads, of whichever part, by canonical shard, ascending.
  std::array<std::vector<int64_t>, kv::kShards> shard_positions;
  // Where decode rows look first for entries of host blocks; null: nowhere. Its slots lie in these pages.
  HotBuffer* hot = nullptr;
  std::vector<PageId> hot_pages;
  bool used = false;
};

struct StepState {
  explicit StepState(RunnerSetup setup);

  const RunnerSetup setup;
  const ModelConfig& config;
  const ModelWeights& weights;
  kernels::Parallel& parallel;
  Exchange& exchange;
  const kv::Topology topology;
  // In a step a rank goes by its place in the topology, and rank_count are those that take part: here, and
  // wherever worker/model and worker/comm say rank.
  const int rank, rank_count;
  const kv::CacheGeometry geometry;

  // The page and the pool of the rank at a place.
  PageId page_at(std::span<const PageId> pages, int place) const {
    return pages[static_cast<size_t>(topology.rank(place))];
  }
  const kv::PagePool& pool_at(int place) const {
    return setup.pools[static_cast<size_t>(topology.rank(place))];
  }

  // Copies between this rank's pool and the host pool; null without one.
  const std::unique_ptr<PageMover> mover;
  // Before cached bytes of a layer are read, or offered to other ranks.
  Result<void> await_loads(int64_t layer) {
    return mover == nullptr ? Result<void>() : mover->wait_layer(layer, exchange.deadline());
  }

  // Of the step being run.
  StepLayout layout;
  Epoch epoch{};
  std::vector<CacheView> views;           // by span
  std::vector<kv::CrossedBytes> crossed;  // by span
  // By span: entries of host blocks that decode rows chose, in all layers, and how many of them were in the
  // hot buffer.
  struct HotCount {
    int64_t hits = 0, misses = 0;
    HotCount& operator+=(const HotCount& other) {
      hits += other.hits;
      misses += other.misses;
      return *this;
    }
  };
  std::vector<HotCount> hot_counts;
  HotBuffers hot_buffers;
  std::vector<uint32_t> tokens;     // by home row
  std::vector<float> cosine, sine;  // [home rows][rope / 2]
  std::vector<float> x;             // [home rows][hidden]: the residual
  std::vector<float> normed;        // [all rows][hidden]

  // Selection of the last full index layer, by home row: ascending positions; dense rows have count −1.
  std::vector<int32_t> selected;  // [home rows][index_topk]
  std::vector<int32_t> selected_count;
  // By span: its rows read what `selected` says already, and nothing is chosen. Empty: no span does.
  std::vector<uint8_t> selection_given;

  const std::vector<HomeRow>& home() const { return layout.home(rank); }
  int64_t home_count() const { return static_cast<int64_t>(home().size()); }
  // Whether this rank computes the attention of a span's rows that are at home here: of whole rows always.
  bool attends(const SpanRoute& span) const { return !span.wide || span.grouping.contains(rank); }
  // Whether entries of a span are read where they lie only: by the ranks that hold them.
  bool own_pages(const SpanRoute& span) const { return span.wide || span.pass_query; }
  bool gives_selection(const SpanRoute& span) const {
    const auto index = static_cast<size_t>(span.index);
    return index < selection_given.size() && selection_given[index] != 0;
  }
  // Whether entries of a span's owned rows are expanded (MLA only).
  bool expands(const SpanRoute& span) const {
    return span.expand_context && config.attention == AttentionKind::kMla && !config.hash;
  }
  // Consecutive whole rows, as ranges of home rows, that expand alike.
  struct WholeRun {
    kv::Range home;
    bool expands = false;
  };
  std::vector<WholeRun> whole_runs() const;
  // Home rows whose attention this rank computes: ranges, ascending.
  std::vector<kv::Range> attended() const;
  // The parts of the entries that this rank reads, and of wide rows stores.
  kv::Range parts_of(const SpanRoute& span) const {
    if (span.pass_query && !span.grouping.contains(rank)) return {};
    return kv::held_parts(
        geometry, kv::Stream::kEntries,
        own_pages(span) ? kv::group_pattern(span.grouping, span.grouping.c, rank_count) : kv::single(rank),
        rank, rank_count);
  }
  const SpanRoute& span_of(const HomeRow& row) const { return layout.spans()[static_cast<size_t>(row.span)]; }
  void ended(Stage stage) const {
    if (setup.on_stage) setup.on_stage(stage);
  }
  void count(int span, kv::CrossKind kind, int64_t bytes) {
    crossed[static_cast<size_t>(span)][kind] += bytes;
  }

  // This rank's outbox of the coming exchange point, and what `from` published at the last one. One rank
  // alone passes none: it reads back what it wrote, at most [rows][hidden].
  float* outbox();
  const float* inbox(int from) const;
  std::vector<float> lone_outbox;

  // Byte offset of a span's queries in from's outbox of kEntries. Worked out when first asked for.
  size_t query_offset(const SpanRoute& span, int from);
  std::vector<std::vector<size_t>> query_offsets;  // by rank; AttentionPhase::begin_step() forgets them
};

// Runs body(begin, end) over consecutive ranges of rows.
void for_rows(kernels::Parallel& parallel, int64_t rows, int64_t at_once,
              const std::function<void(int64_t begin, int64_t end)>& body);

// The left side of a product, in the dtype of its weights.
class Operand {
 public:
  // float32: x itself; bf16: a copy, valid until the next call.
  const void* of(kernels::Parallel& parallel, DType dtype, const float* x, int64_t count);

 private:
  std::vector<std::byte> buffer_;
};

// Grows, never shrinks; contents undefined.
template <typename T>
T* scratch(std::vector<T>& buffer, int64_t count) {
  if (std::ssize(buffer) < count) buffer.resize(static_cast<size_t>(count));
  return buffer.data();
}

}  // namespace weft::worker
