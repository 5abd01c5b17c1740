#include "worker/model/cache_view.h"

#include <algorithm>
#include <span>
#include <string>

#include "kernels/indexer.h"

namespace weft::worker {
namespace {

// The holder this rank reads a block from: itself if it can, else the next holder round the ring.
int reader_of(const StepState& state, std::span<const PageId> pages) {
  for (int i = 0; i < state.rank_count; ++i) {
    const int holder = (state.rank + i) % state.rank_count;
    if (state.page_at(pages, holder) != kNoPage) return holder;
  }
  return -1;
}

Result<void> view_part(const StepState& state, const SpanRoute& span, kv::Stream stream, int64_t part, int c,
                       CacheView::Part& view) {
  const auto number = static_cast<int>(state.geometry.first_part(stream) + part);
  const int64_t blocks = ceil_div(span.end(), state.setup.block_tokens);
  view.page.assign(static_cast<size_t>(blocks), nullptr);
  view.remote.assign(static_cast<size_t>(blocks), 0);
  const bool local = span.wide || (span.pass_query && stream == kv::Stream::kEntries);
  const int own_class = c > 1 ? kv::owned_class(state.rank % c, span.origin, c) : 0;
  view.host_blocks = stream == kv::Stream::kEntries ? span.host_blocks : 0;
  for (int64_t block = 0; block < blocks; ++block) {
    if (c > 1 && kv::residue_class(block, c) != own_class) continue;
    if (block < view.host_blocks) {
      const PageId page = state.setup.control->host_page(span.table, block, static_cast<int>(part));
      view.page[static_cast<size_t>(block)] = state.setup.host.page(stream, page);
      continue;
    }
    const auto pages = state.setup.control->pages(span.table, block, number);
    const int holder = reader_of(state, pages);
    if (holder < 0 || (local && holder != state.rank)) {
      return error(ErrorCode::kFailedPrecondition,
                   std::string(kv::stream_name(stream)) + " part " + std::to_string(part) + " of block " +
                       std::to_string(block) + " of request " + std::to_string(span.request) +
                       " is not resident where rank " + std::to_string(state.rank) + " must read it",
                   "plan");
    }
    view.page[static_cast<size_t>(block)] = state.pool_at(holder).page(stream, state.page_at(pages, holder));
    view.remote[static_cast<size_t>(block)] = holder != state.rank;
  }
  return {};
}

Result<void> view_entries(const StepState& state, const SpanRoute& span, CacheView& view) {
  const int c = state.own_pages(span) ? span.grouping.c : 1;
  const kv::Range parts = state.parts_of(span);
  view.entries.resize(static_cast<size_t>(state.geometry.stream(kv::Stream::kEntries).parts));
  for (int64_t part = parts.begin; part < parts.end; ++part) {
    TRY_VOID(view_part(state, span, kv::Stream::kEntries, part, c, view.entries[static_cast<size_t>(part)]));
  }
  if (parts.empty()) return {};
  // A rank reads the same blocks of every part that it reads.
  const auto& pages = view.entries[static_cast<size_t>(parts.begin)].page;
  const int64_t P = state.setup.block_tokens;
  for (int64_t block = 0; block < std::ssize(pages); ++block) {
    if (pages[static_cast<size_t>(block)] == nullptr) continue;
    auto& positions = view.shard_positions[static_cast<size_t>(kv::canonical_shard(block))];
    for (int64_t position = block * P; position < std::min((block + 1) * P, span.end()); ++position) {
      positions.push_back(position);
    }
  }
  return {};
}

// Decode rows look into the hot buffer first; a chunk of a prompt touches nearly everything.
void view_hot(StepState& state, const SpanRoute& span, CacheView& view) {
  if (span.prefill || span.host_blocks == 0) return;
  view.hot_pages = state.setup.control->hot_pages(span.table, state.setup.rank);
  if (view.hot_pages.empty()) return;
  view.hot = &state.hot_buffers.of(span.table, state.setup.control->table_version(span.table),
                                   state.geometry.stream(kv::Stream::kEntries).layers,
                                   std::ssize(view.hot_pages) * state.setup.block_tokens);
}

Result<void> check_host_blocks(const StepState& state, const SpanRoute& span) {
  if (span.host_blocks == 0) return {};
  const char* wrong = nullptr;
  if (state.setup.host.pages().entries == 0) wrong = "entries in a host pool that there is not";
  if (span.host_blocks * state.setup.block_tokens > (span.no_write ? span.end() : span.start))
    wrong = "rows that would be written to the host pool";
  return wrong == nullptr ? Result<void>() : error(ErrorCode::kInvalidArgument, wrong, "plan");
}

// Calls write(page of holder, remote) for every holder of a part (numbered through) of a home row's block
// that this rank must write.
template <typename Write>
void for_holders(StepState& state, const HomeRow& row, int part, const Write& write) {
  const SpanRoute& span = state.span_of(row);
  if (span.no_write) return;
  const auto pages = state.setup.control->pages(span.table, row.position / state.setup.block_tokens, part);
  for (int holder = 0; holder < state.rank_count; ++holder) {
    const PageId page = state.page_at(pages, holder);
    if (page == kNoPage) continue;
    // A wide row's holders all compute it: each writes its own page. A whole row has one producer.
    if (span.wide && holder != state.rank) continue;
    write(state.pool_at(holder), page, holder != state.rank);
  }
}

}  // namespace

Result<void> make_views(StepState& state, const wire::StepPlan& plan) {
  const bool indexed = state.config.index_layers() > 0;
  state.views.assign(state.layout.spans().size(), {});
  state.hot_buffers.sweep(state.epoch);
  for (const SpanRoute& span : state.layout.spans()) TRY_VOID(check_host_blocks(state, span));
  // Of rows that pass their queries, readers need not own any.
  for (const SpanRoute& span : state.layout.spans()) {
    if (span.pass_query) TRY_VOID(view_entries(state, span, state.views[static_cast<size_t>(span.index)]));
  }
  for (const HomeRow& row : state.home()) {
    CacheView& view = state.views[static_cast<size_t>(row.span)];
    if (view.used) continue;
    view.used = true;
    const SpanRoute& span = state.span_of(row);
    if (!state.attends(span)) continue;
    CHECK_EQ(state.setup.control->table_version(span.table), plan.spans(span.index).table_version());
    if (!span.pass_query) TRY_VOID(view_entries(state, span, view));
    view_hot(state, span, view);
    if (indexed) {
      TRY_VOID(
          view_part(state, span, kv::Stream::kIndexKeys, 0, span.wide ? span.index_c : 1, view.index_keys));
    }
  }
  return {};
}

void store_entries(StepState& state, int64_t layer, const NewEntries& rows) {
  const kernels::EntryFormat format = state.config.entry_format(state.setup.cache.entries);
  const int64_t bytes = state.geometry.stream(kv::Stream::kEntries).bytes_per_token;
  const int64_t P = state.setup.block_tokens;
  for (int64_t i = 0; i < rows.count; ++i) {
    const HomeRow& row = state.home()[static_cast<size_t>(rows.home_begin + i)];
    for_holders(state, row, rows.part, [&](const kv::PagePool& pool, PageId page, bool remote) {
      std::byte* slot = pool.layer(kv::Stream::kEntries, page, layer) + (row.position % P) * bytes;
      kernels::store_entry(format, rows.entries + i * rows.stride, slot);
      if (remote) state.count(row.span, kv::CrossKind::kEntries, bytes);
    });
  }
}

void store_index_keys(StepState& state, int64_t index_layer, kv::Range home, const float* keys) {
  const int part = state.geometry.first_part(kv::Stream::kIndexKeys);
  const CacheFormat& cache = state.setup.cache;
  const int64_t width = state.config.index_width;
  const int64_t P = state.setup.block_tokens;
  const int64_t bytes = state.geometry.stream(kv::Stream::kIndexKeys).bytes_per_token;
  for (int64_t i = home.begin; i < home.end; ++i) {
    const HomeRow& row = state.home()[static_cast<size_t>(i)];
    for_holders(state, row, part, [&](const kv::PagePool& pool, PageId page, bool remote) {
      std::byte* page_layer = pool.layer(kv::Stream::kIndexKeys, page, index_layer);
      if (cache.index_keys == CacheDType::kFp8) {
        kernels::store_fp8_index_key(keys + i * width, width, !cache.index_float_scales, P, row.position % P,
                                     page_layer);
      } else {
        kernels::store_index_key(keys + i * width, width, cache.index_query_dtype(), P, row.position % P,
                                 page_layer);
      }
      if (remote) state.count(row.span, kv::CrossKind::kIndexKeys, bytes);
    });
  }
}

}  // namespace weft::worker
