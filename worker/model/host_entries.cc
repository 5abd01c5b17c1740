#include "worker/model/host_entries.h"

#include <algorithm>
#include <cstring>

namespace weft::worker {
namespace {

std::byte* slot_address(const StepState& state, const CacheView& view, int64_t layer, int32_t slot) {
  const int64_t P = state.setup.block_tokens;
  const PageId page = view.hot_pages[static_cast<size_t>(slot / P)];
  return state.pool_at(state.rank).layer(kv::Stream::kEntries, page, layer) +
         slot % P * state.geometry.stream(kv::Stream::kEntries).bytes_per_token;
}

// Positions in host blocks that this rank reads, ascending, each once.
std::vector<int32_t> selected_on_host(const StepState& state, const CacheView::Part& part,
                                      std::span<const AttendJob> jobs) {
  std::vector<int32_t> positions;
  for (const AttendJob& job : jobs) {
    if (is_dense(state, job)) continue;
    const int32_t* selected = state.selected.data() + job.home * state.config.index_topk;
    const int32_t n = state.selected_count[static_cast<size_t>(job.home)];
    for (int32_t i = 0; i < n; ++i) {
      const int64_t block = selected[i] / state.setup.block_tokens;
      if (block >= part.host_blocks) break;  // ascending
      if (part.page[static_cast<size_t>(block)] != nullptr) positions.push_back(selected[i]);
    }
  }
  std::sort(positions.begin(), positions.end());
  positions.erase(std::unique(positions.begin(), positions.end()), positions.end());
  return positions;
}

}  // namespace

void fetch_selected(StepState& state, int64_t layer, std::span<const AttendJob> jobs) {
  const AttendJob& first = jobs.front();
  const CacheView& view = state.views[static_cast<size_t>(first.span)];
  const CacheView::Part& part = view.entries[static_cast<size_t>(first.part)];
  const std::vector<int32_t> positions = selected_on_host(state, part, jobs);
  std::vector<HotBuffer::Miss> misses;
  const int64_t hits = view.hot->use(layer, positions, misses);
  const int64_t P = state.setup.block_tokens;
  const int64_t bytes = state.geometry.stream(kv::Stream::kEntries).bytes_per_token;
  const int64_t offset = layer * state.geometry.layer_bytes(kv::Stream::kEntries);
  for_rows(state.parallel, std::ssize(misses), 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto [position, slot] = misses[static_cast<size_t>(i)];
      std::memcpy(slot_address(state, view, layer, slot),
                  part.page[static_cast<size_t>(position / P)] + offset + position % P * bytes,
                  static_cast<size_t>(bytes));
    }
  });
  state.count(first.span, kv::CrossKind::kHost, std::ssize(misses) * bytes);
  StepState::HotCount& counts = state.hot_counts[static_cast<size_t>(first.span)];
  counts.hits += hits;
  counts.misses += std::ssize(positions) - hits;
}

const std::byte* hot_entry(const StepState& state, const CacheView& view, int64_t layer, int32_t position) {
  const int32_t slot = view.hot->slot_of(layer, position);
  return slot < 0 ? nullptr : slot_address(state, view, layer, slot);
}

}  // namespace weft::worker
