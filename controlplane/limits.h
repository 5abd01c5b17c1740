// Everything the control plane is sized from, fixed at start; and, as the one thing that changes, the
// topology.
//
// validate() names the field and the relation that does not hold; ControlPlane CHECKs a valid value. Rows,
// tokens, blocks and pages are counts.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "kv/layout.h"
#include "kv/topology.h"
#include "proto/vocab/result.h"
#include "proto/vocab/units.h"

namespace weft::controlplane {

// Which unused blocks make room (prefix_cache.h).
enum class Eviction { kLru, kReuse };
const char* eviction_name(Eviction eviction);  // "lru", "reuse"

// When a block is copied to the host: as soon as it can be shared, or when its pages are about to be needed.
enum class HostWrite { kThrough, kBack };
const char* host_write_name(HostWrite write);  // "through", "back"

// What is done, beside evicting, for a waiting request that finds no room (pressure.h): nothing; copies are
// given up; and, for a more urgent one, others give back all they have.
enum class OnPressure { kNone, kThin, kPreempt };
const char* on_pressure_name(OnPressure on_pressure);  // "none", "thin", "preempt"

struct Limits {
  int rank_count = 1;  // that there may be, each with its pools
  // The ranks that compute; empty: all. ControlPlane changes its own copy when workers come and go. What is
  // counted in places (kv/topology.h): groupings, residencies, origins, sampler ranks.
  kv::Topology topology;
  kv::CacheGeometry geometry;
  std::vector<std::array<int64_t, kv::kStreams>> pool_pages;  // [rank][stream]; 0 for a stream without layers

  // The second tier (host_pool.h), by stream; none: there is no such tier.
  std::array<int64_t, kv::kStreams> host_pages{};
  HostWrite host_write = HostWrite::kBack;
  // Of contexts that lie on the host (host_context.h): tokens of a hot buffer, over all ranks that divide a
  // context; 0: none. Blocks whose entries may be on devices at once.
  int64_t hot_tokens = 0;
  int64_t host_window = 64;
  int64_t host_plan_bytes =
      64 * kMiB;  // that one plan moves each way and for each rank, at most or one block

  // What one plan copies at most for each rank for changes of grouping, or one block; a change that needs
  // more is spread over plans. 0: all in one.
  int64_t copy_plan_bytes = 4 * kMiB;

  // Of the model, to count what a choice of mechanisms moves; 0: unknown, and nothing is chosen by bytes.
  int64_t query_bytes = 0;  // of one query head
  int64_t value_width = 0;  // elements of a partial's o
  int64_t index_topk = 0;   // 0: every row reads all it may see
  int64_t window = 0;       // keys that a row sees in so many layers
  int64_t window_layers = 0;
  int64_t draft_layers = 0;  // that are loaded

  int64_t max_context = 0;  // tokens of prompt and answer together
  int64_t table_count = 0;  // > max_running: a sequence that changes its table needs a second one for a while
  int64_t max_running = 64;      // sequences that hold pages
  int64_t max_waiting = 1024;    // requests queued behind them; more are refused
  int64_t max_passes = 64;       // requests that may come in before an earlier one that finds no room
  int64_t max_step_rows = 2048;  // rows of one step, prefill and decode together
  int64_t max_samples = 64;      // sampled rows of one step
  int64_t max_chunk_rows = 0;    // rows of one sequence's prefill chunk; 0: only the step's own limit
  int plans_in_flight = 2;       // 1 or 2
  Eviction eviction = Eviction::kLru;
  OnPressure on_pressure = OnPressure::kNone;
  int64_t calm_plans = 64;  // without pressure, before copies that were given up come back
  // Ended requests whose context a turn can name as its parent, and their tokens, shared ones once.
  int64_t kept_contexts = 4096;
  int64_t kept_tokens = int64_t{16} << 20;

  kv::Topology active() const { return topology.count() > 0 ? topology : kv::Topology::of_all(rank_count); }
  int places() const { return topology.count() > 0 ? topology.count() : rank_count; }

  int64_t table_blocks() const { return ceil_div(max_context, geometry.block_tokens); }
  // Copies that one plan can carry, and as many loads and as many spills: those of one sequence that spreads
  // from one rank to all.
  int64_t max_copies() const { return table_blocks() * kv::max_block_pages(geometry, rank_count); }
  // Copies of blocks that the host pool can hold.
  int64_t host_copies() const {
    int64_t copies = host_pages[0] / std::max<int64_t>(1, geometry.stream(kv::Stream::kEntries).used_parts());
    const int64_t parts = geometry.stream(kv::Stream::kIndexKeys).used_parts();
    return parts > 0 ? std::min(copies, host_pages[1] / parts) : copies;
  }
  int64_t pages(kv::Stream stream, int rank) const {
    return pool_pages[static_cast<size_t>(rank)][static_cast<size_t>(stream)];
  }
  // A model without an indexer keeps no index keys: no pages, no table entries.
  bool uses(kv::Stream stream) const { return geometry.page_bytes(stream) > 0; }
};

Result<void> validate(const Limits& limits);

}  // namespace weft::controlplane
