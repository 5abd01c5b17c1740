#include "worker/model/selection.h"

#include <algorithm>
#include <cstring>

namespace weft::worker {

void Selection::reset() {
  scratch(state_.selected, state_.home_count() * state_.config.index_topk);
  state_.selected_count.assign(static_cast<size_t>(state_.home_count()), -1);
}

// Calls body(span, first home row, count) for the home rows of each span that see more than index_topk keys.
// Rows of a span are consecutive at home and ascend in position, so these are the last ones.
template <typename Body>
void Selection::for_scored_spans(const Body& body) {
  const auto& home = state_.home();
  for (int64_t begin = 0; begin < state_.home_count();) {
    int64_t end = begin;
    while (end < state_.home_count() &&
           home[static_cast<size_t>(end)].span == home[static_cast<size_t>(begin)].span) {
      ++end;
    }
    int64_t first = begin;
    while (first < end && home[static_cast<size_t>(first)].position + 1 <= state_.config.index_topk) ++first;
    if (!state_.attends(state_.span_of(home[static_cast<size_t>(begin)]))) first = end;
    if (first < end) body(state_.span_of(home[static_cast<size_t>(begin)]), first, end - first);
    begin = end;
  }
}

void Selection::select(const SpanRoute& span, int64_t first_home, int64_t count, int64_t index_layer,
                       const void* query, const float* weights) {
  const ModelConfig& config = state_.config;
  const CacheView& view = state_.views[static_cast<size_t>(span.index)];
  const int64_t P = state_.setup.block_tokens;
  const int64_t key_bytes = state_.geometry.stream(kv::Stream::kIndexKeys).bytes_per_token;

  positions_.clear();
  for (int64_t i = 0; i < count; ++i)
    positions_.push_back(state_.home()[static_cast<size_t>(first_home + i)].position);
  const int64_t seen = positions_.back() + 1;
  keys_.clear();
  const int64_t page_bytes = state_.geometry.layer_bytes(kv::Stream::kIndexKeys);
  if (span.copy_context) scratch(copied_, std::ssize(view.index_keys.page) * page_bytes);
  for (int64_t block = 0; block * P < seen; ++block) {
    const std::byte* page = view.index_keys.page[static_cast<size_t>(block)];
    if (page == nullptr) continue;
    const int64_t valid = std::min(P, seen - block * P);
    const std::byte* keys = page + index_layer * page_bytes;
    if (span.copy_context && view.index_keys.remote[static_cast<size_t>(block)]) {
      keys = static_cast<const std::byte*>(
          std::memcpy(copied_.data() + block * page_bytes, keys, static_cast<size_t>(page_bytes)));
    }
    keys_.push_back({keys, block * P, valid});
    if (view.index_keys.remote[static_cast<size_t>(block)]) {
      state_.count(span.index, kv::CrossKind::kIndexKeys, valid * key_bytes);
    }
  }

  kernels::IndexSelect p;
  p.dtype = state_.setup.cache_dtype;
  p.heads = config.index_heads;
  p.width = config.index_width;
  p.block_tokens = P;
  p.rows = count;
  p.query = static_cast<const std::byte*>(query) +
            first_home * p.heads * p.width * static_cast<int64_t>(dtype_bytes(p.dtype));
  p.weights = weights + first_home * p.heads;
  p.row_positions = positions_.data();
  p.keys = keys_;
  p.top_k = config.index_topk;
  p.out = scratch(found_, count * p.top_k);
  p.out_count = scratch(found_count_, count);
  kernels::index_select(p, state_.parallel);
}

void Selection::keep(int64_t home, std::span<const kernels::Candidate> chosen) {
  int32_t* out = state_.selected.data() + home * state_.config.index_topk;
  for (size_t i = 0; i < chosen.size(); ++i) out[i] = chosen[i].position;
  state_.selected_count[static_cast<size_t>(home)] = static_cast<int32_t>(chosen.size());
}

void Selection::offer(int64_t index_layer, const void* query, const float* weights) {
  if (state_.layout.split_count() == 0) return;
  const EntriesOutbox at =
      entries_outbox(state_.layout, state_.config, state_.setup.cache_dtype, state_.rank);
  std::byte* outbox = state_.exchange.outbox().data();
  auto* counts = reinterpret_cast<int32_t*>(outbox + at.counts);
  auto* candidates = reinterpret_cast<kernels::Candidate*>(outbox + at.candidates);
  const int64_t k = state_.config.index_topk;
  for_scored_spans([&](const SpanRoute& span, int64_t first_home, int64_t count) {
    if (!span.split_index()) return;
    select(span, first_home, count, index_layer, query, weights);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = span.first_split + state_.home()[static_cast<size_t>(first_home + i)].row;
      counts[row] = found_count_[static_cast<size_t>(i)];
      std::memcpy(candidates + row * k, found_.data() + i * k,
                  static_cast<size_t>(counts[row]) * sizeof(kernels::Candidate));
    }
  });
}

void Selection::choose(int64_t index_layer, const void* query, const float* weights) {
  const int64_t k = state_.config.index_topk;
  std::vector<kernels::Candidate> chosen(static_cast<size_t>(k));
  for_scored_spans([&](const SpanRoute& span, int64_t first_home, int64_t count) {
    if (!span.split_index()) {
      select(span, first_home, count, index_layer, query, weights);
      for (int64_t i = 0; i < count; ++i) {
        keep(first_home + i,
             {found_.data() + i * k, static_cast<size_t>(found_count_[static_cast<size_t>(i)])});
      }
      return;
    }
    const int first = group_first(state_.rank, span.index_c);
    std::vector<std::span<const kernels::Candidate>> lists(static_cast<size_t>(span.index_c));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = span.first_split + state_.home()[static_cast<size_t>(first_home + i)].row;
      for (int member = first; member < first + span.index_c; ++member) {
        const EntriesOutbox at =
            entries_outbox(state_.layout, state_.config, state_.setup.cache_dtype, member);
        const std::byte* inbox = state_.exchange.inbox(member).data();
        const int32_t n = reinterpret_cast<const int32_t*>(inbox + at.counts)[row];
        lists[static_cast<size_t>(member - first)] = {
            reinterpret_cast<const kernels::Candidate*>(inbox + at.candidates) + row * k,
            static_cast<size_t>(n)};
        if (member != state_.rank) {
          state_.count(
              span.index, kv::CrossKind::kCandidates,
              static_cast<int64_t>(sizeof(int32_t)) + n * static_cast<int64_t>(sizeof(kernels::Candidate)));
        }
      }
      const int64_t n = kernels::merge_candidates(lists, k, chosen.data());
      keep(first_home + i, {chosen.data(), static_cast<size_t>(n)});
    }
  });
}

}  // namespace weft::worker
