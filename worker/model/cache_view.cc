#include "worker/model/cache_view.h"

#include <algorithm>
#include <utility>

#include "kernels/indexer.h"

namespace weft::worker {
namespace {

// The holder this rank reads a block from: itself if it can, else the next holder round the ring.
int reader_of(const PageId (&pages)[kMaxRanks], int rank, int rank_count) {
  for (int i = 0; i < rank_count; ++i) {
    const int holder = (rank + i) % rank_count;
    if (pages[holder] != kNoPage) return holder;
  }
  return -1;
}

Result<void> view_stream(const StepState& state, const SpanRoute& span, kv::Stream stream, int c,
                         std::vector<const std::byte*>& page, std::vector<uint8_t>& remote) {
  const auto table = std::as_const(*state.setup.control).table(span.table);
  const int64_t blocks = ceil_div(span.end(), state.setup.block_tokens);
  CHECK_LE(blocks, std::ssize(table));
  page.assign(static_cast<size_t>(blocks), nullptr);
  remote.assign(static_cast<size_t>(blocks), 0);
  const int own_class = c > 1 ? kv::owned_class(state.rank % c, span.origin, c) : 0;
  for (int64_t block = 0; block < blocks; ++block) {
    if (c > 1 && kv::residue_class(block, c) != own_class) continue;
    const auto& pages = table[static_cast<size_t>(block)].page[static_cast<size_t>(stream)];
    const int holder = reader_of(pages, state.rank, state.rank_count);
    if (holder < 0 || (span.wide && holder != state.rank)) {
      return error(ErrorCode::kFailedPrecondition,
                   "block " + std::to_string(block) + " of request " + std::to_string(span.request) +
                       " is not resident where rank " + std::to_string(state.rank) + " must read it",
                   "plan");
    }
    page[static_cast<size_t>(block)] =
        state.setup.pools[static_cast<size_t>(holder)].page(stream, pages[holder]);
    remote[static_cast<size_t>(block)] = holder != state.rank;
  }
  return {};
}

// The dense lists by shard: every position this rank reads, up to the last position of the step.
void list_entries(const StepState& state, const SpanRoute& span, CacheView& view) {
  const int64_t P = state.setup.block_tokens;
  const int64_t entry_bytes = state.geometry.stream(kv::Stream::kEntries).bytes_per_token;
  for (size_t block = 0; block < view.entry_page.size(); ++block) {
    if (view.entry_page[block] == nullptr) continue;
    const auto shard = static_cast<size_t>(kv::canonical_shard(static_cast<int64_t>(block)));
    const int64_t first = static_cast<int64_t>(block) * P;
    const int64_t last = std::min(first + P, span.end());
    for (int64_t position = first; position < last; ++position) {
      view.shard_positions[shard].push_back(position);
      view.shard_entries[shard].push_back(view.entry_page[block] + (position - first) * entry_bytes);
    }
  }
}

// Calls write(page of holder, remote) for every holder of a home row's block that this rank must write.
template <typename Write>
void for_holders(StepState& state, const HomeRow& row, kv::Stream stream, const Write& write) {
  const SpanRoute& span = state.span_of(row);
  if (span.no_write) return;
  const auto table = std::as_const(*state.setup.control).table(span.table);
  const auto& pages =
      table[static_cast<size_t>(row.position / state.setup.block_tokens)].page[static_cast<size_t>(stream)];
  for (int holder = 0; holder < state.rank_count; ++holder) {
    if (pages[holder] == kNoPage) continue;
    // A wide row's holders are all at home: each writes its own page. A whole row has one producer.
    if (span.wide && holder != state.rank) continue;
    write(state.setup.pools[static_cast<size_t>(holder)], pages[holder], holder != state.rank);
  }
}

}  // namespace

Result<void> make_views(StepState& state, const wire::StepPlan& plan) {
  const bool indexed = state.config.index_layers() > 0;
  state.views.assign(state.layout.spans().size(), {});
  for (const HomeRow& row : state.home()) {
    CacheView& view = state.views[static_cast<size_t>(row.span)];
    if (view.used) continue;
    view.used = true;
    const SpanRoute& span = state.span_of(row);
    CHECK_EQ(state.setup.control->table_version(span.table), plan.spans(span.index).table_version());
    TRY_VOID(view_stream(state, span, kv::Stream::kEntries, span.wide ? span.grouping.c : 1, view.entry_page,
                         view.entry_remote));
    if (indexed) {
      TRY_VOID(view_stream(state, span, kv::Stream::kIndexKeys, span.wide ? span.index_c : 1, view.index_page,
                           view.index_remote));
    }
    list_entries(state, span, view);
  }
  return {};
}

void store_entries(StepState& state, int64_t layer, const float* entries) {
  const int64_t width = state.config.entry_width();
  const int64_t bytes = state.geometry.stream(kv::Stream::kEntries).bytes_per_token;
  const int64_t P = state.setup.block_tokens;
  for (int64_t i = 0; i < state.home_count(); ++i) {
    const HomeRow& row = state.home()[static_cast<size_t>(i)];
    for_holders(state, row, kv::Stream::kEntries, [&](const kv::PagePool& pool, PageId page, bool remote) {
      std::byte* slot = pool.layer(kv::Stream::kEntries, page, layer) + (row.position % P) * bytes;
      kernels::convert(entries + i * width, width, state.setup.cache_dtype, slot);
      if (remote) state.count(row.span, kv::CrossKind::kEntries, bytes);
    });
  }
}

void store_index_keys(StepState& state, int64_t index_layer, const float* keys) {
  const int64_t width = state.config.index_width;
  const int64_t P = state.setup.block_tokens;
  const int64_t bytes = state.geometry.stream(kv::Stream::kIndexKeys).bytes_per_token;
  for (int64_t i = 0; i < state.home_count(); ++i) {
    const HomeRow& row = state.home()[static_cast<size_t>(i)];
    for_holders(state, row, kv::Stream::kIndexKeys, [&](const kv::PagePool& pool, PageId page, bool remote) {
      kernels::store_index_key(keys + i * width, width, state.setup.cache_dtype, P, row.position % P,
                               pool.layer(kv::Stream::kIndexKeys, page, index_layer));
      if (remote) state.count(row.span, kv::CrossKind::kIndexKeys, bytes);
    });
  }
}

}  // namespace weft::worker
