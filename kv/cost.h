// The meter's arithmetic: which bytes cross when a span runs under a grouping, by kind, without running it.
//
// The same rules as the counters in worker/: bytes are charged to the rank that copies or dereferences them
// (the producer of an entry for a holder elsewhere, the reader of everything else). All numbers but two are
// exact, and `exact` is false where one of these is not 0. Which entries a row of a sparse model selects is
// data, so the entries that PCP owners read from other ranks' pages are an upper bound. And how much is read
// of other ranks' offers of index keys is data: counted is what proves the top-k of scores that chance deals
// out to the ranks, as nearly always; uneven or equal scores add to it. Owned rows are split as if no other
// owned span were in the step: of several, up to 4C rows of a zigzag span may be on other ranks.
#pragma once

#include <cstdint>
#include <span>

#include "kv/layout.h"
#include "kv/mechanisms.h"
#include "kv/meter.h"

namespace weft::kv {

// Numbers of a loaded model, as its ModelDescription gives them.
struct CostModel {
  CacheGeometry geometry;  // index keys: 0 layers without an indexer
  int64_t layers = 0;
  int64_t dense_layers = 0;  // of them, with a dense feed-forward; the rest have experts
  int64_t hidden = 0;
  int64_t vocabulary = 0;
  int64_t query_bytes = 0;                        // of one head's query, in the cache's dtype
  int64_t value_width = 0;                        // elements of one partial's o
  int64_t index_topk = 0;                         // 0: every row reads all it may see
  int64_t window = 0;                             // keys that a row sees in the layers with a window
  int64_t window_layers = 0;                      // of the layers; they have no indexer
  uint32_t dense_segments = (1u << kShards) - 1;  // segments of a dense MLP that are not empty by shape
  uint32_t moe_segments = (1u << kShards) - 1;
  int rank_count = 1;
  int64_t index_layers() const { return geometry.stream(Stream::kIndexKeys).layers; }
};

// A span of a step, and where its sequence's blocks are.
struct CostSpan {
  int64_t start = 0;
  int64_t rows = 1;
  Split split = Split::kShared;
  Grouping grouping;
  int index_c = 1;
  Mechanisms mechanisms;
  Residency residency;  // of blocks read and written
  int origin = 0;
  bool no_write = false;
  int64_t head_rows = 0;  // the last rows whose logits are wanted
  int sampler = 0;
};

struct Cost {
  CrossedBytes crossed;
  bool exact = true;
  Cost& operator+=(const Cost& other) {
    crossed += other.crossed;
    exact = exact && other.exact;
    return *this;
  }
};

// What `rank` is charged in one layer that has experts and no window; with index_layer, one that owns an
// indexer.
Cost layer_cost(const CostModel& model, const CostSpan& span, int rank, bool index_layer);
// What `rank` is charged in the whole step, head included.
Cost step_cost(const CostModel& model, const CostSpan& span, int rank);

// The same of all ranks together.
Cost total_layer_cost(const CostModel& model, const CostSpan& span, bool index_layer);
Cost total_step_cost(const CostModel& model, const CostSpan& span);

// Exchange points that every rank passes in a step of these spans, without page copies: the closed formula.
int64_t step_exchanges(const CostModel& model, std::span<const CostSpan> spans);

// A prompt of `tokens` in chunks of `chunk` rows; `span` gives all but start, rows and head rows. The last
// row of the last chunk is sampled.
Cost prefill_cost(const CostModel& model, CostSpan span, int64_t tokens, int64_t chunk);

}  // namespace weft::kv
