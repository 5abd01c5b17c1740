#include "worker/model/selection.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "kernels/elementwise.h"
#include "kernels/fp8_rows.h"

namespace weft::worker {

void Selection::reset() {
  scratch(state_.selected, state_.home_count() * state_.config.index_topk);
  state_.selected_count.assign(static_cast<size_t>(state_.home_count()), -1);
  state_.selection_given.clear();
}

// Calls body(span, first home row, count) for the home rows of each span that choose among more than
// index_topk keys.
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
    const SpanRoute& span = state_.span_of(home[static_cast<size_t>(begin)]);
    if (!state_.attends(span) || state_.gives_selection(span)) first = end;
    if (first < end) body(span, first, end - first);
    begin = end;
  }
}

void Selection::select(const SpanRoute& span, int64_t first_home, int64_t count, int64_t index_layer) {
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
  p.dtype = state_.setup.cache.index_query_dtype();
  p.fp8_keys = state_.setup.cache.index_keys == CacheDType::kFp8;
  p.heads = config.index_heads;
  p.width = config.index_width;
  p.block_tokens = P;
  p.rows = count;
  p.query = query_.data() + first_home * p.heads * p.width * static_cast<int64_t>(dtype_bytes(p.dtype));
  p.weights = weights_ + first_home * p.heads;
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

namespace {

// Whether a rank may read entries at positions whose index keys a member of its index group scores.
bool may_read(const SpanRoute& span, int rank, int member) {
  return (rank - member) % kv::common_classes(span.grouping.c, span.index_c) == 0;
}

}  // namespace

// As they are scored. Beside FP8 keys they are FP8 values themselves, and their scales join the weights of
// the heads.
void Selection::round_queries(const float* query, float* weights) {
  const CacheFormat& cache = state_.setup.cache;
  const DType dtype = cache.index_query_dtype();
  const int64_t width = state_.config.index_width, vectors = state_.home_count() * state_.config.index_heads;
  const auto vector_bytes = width * static_cast<int64_t>(dtype_bytes(dtype));
  std::byte* stored = scratch(query_, vectors * vector_bytes);
  for_rows(state_.parallel, vectors, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::byte* to = stored + i * vector_bytes;
      if (cache.index_keys != CacheDType::kFp8) {
        kernels::convert(query + i * width, width, dtype, to);
        continue;
      }
      uint8_t codes[kernels::kFp8Group];
      const float scale = kernels::quantise_e4m3(query + i * width, width, !cache.index_float_scales, codes);
      kernels::decode_e4m3(codes, width, 1, reinterpret_cast<uint16_t*>(to));
      weights[i] *= scale;
    }
  });
  weights_ = weights;
}

void Selection::offer(int64_t index_layer, const float* query, float* weights) {
  round_queries(query, weights);
  if (state_.layout.split_count() == 0) return;
  const EntriesOutbox at =
      entries_outbox(state_.layout, state_.config, state_.setup.cache.query_dtype(), state_.rank);
  std::byte* outbox = state_.exchange.outbox().data();
  auto* heads = reinterpret_cast<kernels::OfferHead*>(outbox + at.heads);
  auto* scores = reinterpret_cast<float*>(outbox + at.scores);
  auto* positions = reinterpret_cast<int32_t*>(outbox + at.positions);
  const int64_t k = state_.config.index_topk;
  for_scored_spans([&](const SpanRoute& span, int64_t first_home, int64_t count) {
    if (!span.split_index()) return;
    select(span, first_home, count, index_layer);
    const int64_t first_part = offer_lengths_[{index_layer, span.index_c}].keys(k, span.index_c);
    for_rows(state_.parallel, count, 1, [&](int64_t i, int64_t) {
      const int64_t row = span.first_split + state_.home()[static_cast<size_t>(first_home + i)].row;
      kernels::write_offer({found_.data() + i * k, static_cast<size_t>(found_count_[static_cast<size_t>(i)])},
                           first_part, heads + row, scores + row * k, positions + row * k);
    });
  });
}

void Selection::choose(int64_t index_layer) {
  const int64_t k = state_.config.index_topk;
  for_scored_spans([&](const SpanRoute& span, int64_t first_home, int64_t count) {
    if (span.split_index()) return choose_split(span, first_home, count, index_layer);
    select(span, first_home, count, index_layer);
    for (int64_t i = 0; i < count; ++i) {
      keep(first_home + i,
           {found_.data() + i * k, static_cast<size_t>(found_count_[static_cast<size_t>(i)])});
    }
  });
}

void Selection::choose_split(const SpanRoute& span, int64_t first_home, int64_t count, int64_t index_layer) {
  const int64_t k = state_.config.index_topk;
  const int first = group_first(state_.rank, span.index_c);
  std::vector<kernels::Offer> members;  // of split row 0
  for (int member = first; member < first + span.index_c; ++member) {
    const EntriesOutbox at =
        entries_outbox(state_.layout, state_.config, state_.setup.cache.query_dtype(), member);
    const std::byte* inbox = state_.exchange.inbox(member).data();
    members.push_back({reinterpret_cast<const kernels::OfferHead*>(inbox + at.heads),
                       reinterpret_cast<const float*>(inbox + at.scores),
                       reinterpret_cast<const int32_t*>(inbox + at.positions)});
  }
  std::vector<int64_t> bytes(static_cast<size_t>(count));
  std::vector<int64_t> most(static_cast<size_t>(count));
  split_.resize(static_cast<size_t>(state_.parallel.thread_count()));
  state_.parallel.run(count, [&](int64_t i, int thread) {
    const int64_t home = first_home + i;
    const int64_t row = span.first_split + state_.home()[static_cast<size_t>(home)].row;
    kernels::SplitTopK& found = split_[static_cast<size_t>(thread)];
    std::vector<kernels::Offer> offers;
    for (const kernels::Offer& from : members) {
      offers.push_back({from.head + row, from.scores + row * k, from.positions + row * k});
    }
    kernels::find_split_top_k(offers, k, found);
    int32_t* out = state_.selected.data() + home * k;
    int64_t kept = 0;
    for (int64_t member = 0; member < span.index_c; ++member) {
      const auto at = static_cast<size_t>(member);
      const int rank = first + static_cast<int>(member);
      if (may_read(span, state_.rank, rank)) {
        kept += kernels::read_chosen(offers[at], member, found, out + kept);
      }
      const kernels::SplitTopK::Read& read = found.reads[at];
      if (rank != state_.rank) bytes[static_cast<size_t>(i)] += read.bytes;
      most[static_cast<size_t>(i)] = std::max(most[static_cast<size_t>(i)], read.chosen);
    }
    std::sort(out, out + kept);
    state_.selected_count[static_cast<size_t>(home)] = static_cast<int32_t>(kept);
  });
  state_.count(span.index, kv::CrossKind::kCandidates,
               std::accumulate(bytes.begin(), bytes.end(), int64_t{0}));
  offer_lengths_[{index_layer, span.index_c}].learn(*std::max_element(most.begin(), most.end()));
}

}  // namespace weft::worker
