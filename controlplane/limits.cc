#include "controlplane/limits.h"

#include <bit>
#include <string>

#include "proto/vocab/ids.h"

namespace weft::controlplane {
namespace {

Result<void> require(bool ok, const char* field, const std::string& rule) {
  if (ok) return {};
  return error(ErrorCode::kInvalidArgument, rule, field);
}

}  // namespace

const char* eviction_name(Eviction eviction) { return eviction == Eviction::kReuse ? "reuse" : "lru"; }

const char* host_write_name(HostWrite write) { return write == HostWrite::kThrough ? "through" : "back"; }

const char* on_pressure_name(OnPressure on_pressure) {
  switch (on_pressure) {
    case OnPressure::kNone:
      return "none";
    case OnPressure::kThin:
      return "thin";
    case OnPressure::kPreempt:
      return "preempt";
  }
  return "?";
}

Result<void> validate(const Limits& limits) {
  TRY_VOID(require(limits.rank_count >= 1 && limits.rank_count <= kMaxRanks, "rank_count",
                   "must be 1 to " + std::to_string(kMaxRanks)));
  TRY_VOID(require((limits.topology.ranks() & ~all_ranks(limits.rank_count)) == 0, "topology",
                   "has ranks beyond rank_count"));
  const int64_t block = limits.geometry.block_tokens;
  TRY_VOID(require(block >= 1 && std::has_single_bit(static_cast<uint64_t>(block)), "block_tokens",
                   "must be a power of two"));
  TRY_VOID(kv::validate(limits.geometry));
  TRY_VOID(require(limits.uses(kv::Stream::kEntries), "geometry", "entries must take room"));
  TRY_VOID(require(limits.pool_pages.size() == static_cast<size_t>(limits.rank_count), "pool_pages",
                   "one line for each rank"));
  for (int rank = 0; rank < limits.rank_count; ++rank) {
    TRY_VOID(
        require(limits.pages(kv::Stream::kEntries, rank) >= 1, "pool_pages", "at least one page of entries"));
    TRY_VOID(require(limits.pages(kv::Stream::kIndexKeys, rank) >= 0, "pool_pages", "must not be negative"));
  }
  for (const int64_t pages : limits.host_pages) {
    TRY_VOID(require(pages >= 0, "host_pages", "must not be negative"));
  }
  TRY_VOID(require(limits.hot_tokens >= 0, "hot_tokens", "must not be negative"));
  TRY_VOID(require(limits.host_window >= 1, "host_window", "must be at least 1"));
  TRY_VOID(require(limits.max_context >= 2, "max_context", "must hold a prompt token and an answer token"));
  TRY_VOID(require(limits.max_running >= 1, "max_running", "must be at least 1"));
  TRY_VOID(require(limits.max_waiting >= 1, "max_waiting", "must be at least 1"));
  TRY_VOID(require(limits.table_count > limits.max_running, "table_count", "must be above max_running"));
  // Every running sequence can decode in every step, so none of them starves.
  TRY_VOID(
      require(limits.max_step_rows >= limits.max_running, "max_step_rows", "must be at least max_running"));
  TRY_VOID(require(limits.max_samples >= limits.max_running, "max_samples", "must be at least max_running"));
  TRY_VOID(require(limits.max_chunk_rows >= 0, "max_chunk_rows", "must not be negative"));
  TRY_VOID(require(limits.plans_in_flight == 1 || limits.plans_in_flight == 2, "plans_in_flight",
                   "must be 1 or 2"));
  return {};
}

}  // namespace weft::controlplane
