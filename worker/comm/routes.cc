#include "worker/comm/routes.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "kernels/attention.h"
#include "kernels/gemm.h"
#include "kernels/split_top_k.h"
#include "proto/vocab/units.h"

namespace weft::worker {
namespace {

Error bad_plan(const std::string& what) { return error(ErrorCode::kInvalidArgument, what, "plan"); }

Result<SpanRoute> make_span(const wire::Span& span, int index, int rank_count) {
  SpanRoute route;
  route.index = index;
  route.request = span.request();
  route.table = TableId{span.table()};
  route.start = static_cast<int64_t>(span.start());
  route.rows = span.rows();
  route.split = static_cast<kv::Split>(span.split());
  route.grouping = {static_cast<int>(span.group_base()), static_cast<int>(span.group_width()),
                    static_cast<int>(span.group_c())};
  route.origin = static_cast<int>(span.origin());
  route.index_c = static_cast<int>(span.index_c());
  route.host_blocks = span.host_blocks();
  route.prefill = span.prefill();
  route.draft_tokens = span.draft_tokens();
  route.seed = span.sampling().seed();
  route.replicate_query = span.replicate_query();
  route.tree_partials = span.tree_partials();
  route.pass_query = span.pass_query();
  route.copy_context = span.copy_context();
  route.expand_context = span.expand_context();
  route.no_write = span.no_write();
  const kv::Grouping& g = route.grouping;
  if (route.rows < 1) return bad_plan("a span without rows");
  if (span.split() >= kv::kSplits) return bad_plan("unknown split " + std::to_string(span.split()));
  if (g.width < 1 || g.c < 1 || g.width % g.c != 0 || g.base < 0 || g.base + g.width > rank_count ||
      rank_count % g.width != 0 || g.base % g.width != 0) {
    return bad_plan("impossible grouping " + kv::grouping_name(g, rank_count));
  }
  if (route.tree_partials && !std::has_single_bit(static_cast<unsigned>(g.c))) {
    return bad_plan("a tree of partials needs a power of two, not " + kv::grouping_name(g, rank_count));
  }
  if (route.index_c < 1 || g.width % route.index_c != 0)
    return bad_plan("index_c must divide the group's width");
  if (route.pass_query && route.split == kv::Split::kShared) return bad_plan("only owned rows pass queries");
  const bool literal = static_cast<uint32_t>(span.tokens_size()) == span.rows();
  const bool reference = span.tokens_size() == 0 && span.has_input() && span.rows() == 1;
  if (!literal && !reference) return bad_plan("a span needs as many tokens as rows, or one input reference");
  if (span.sample_rows() > span.rows()) return bad_plan("more rows draw than there are");
  if (span.draft_tokens() > 1 && span.prefill()) return bad_plan("a prompt's last row is guessed from once");
  route.wide = route.split == kv::Split::kShared && g.width > 1;
  return route;
}

int owner(const SpanRoute& span, int64_t row) {
  return span.split == kv::Split::kShared ? span.grouping.base : span.owners.owner(row);
}

void set_owners(std::vector<SpanRoute>& spans, int64_t index_topk, int rank_count) {
  std::vector<kv::OwnedSpan> owned;
  for (const SpanRoute& span : spans) {
    if (span.split != kv::Split::kShared) owned.push_back({span.split, span.start, span.rows});
  }
  std::vector<kv::RowOwners> owners = kv::split_rows(owned, index_topk, rank_count);
  size_t next = 0;
  for (SpanRoute& span : spans) {
    if (span.split != kv::Split::kShared) span.owners = std::move(owners[next++]);
  }
}

int rounds_of(const SpanRoute& span) {
  if (span.pass_query) return 1;
  if (!span.dcp()) return 0;
  return span.tree_partials ? std::countr_zero(static_cast<unsigned>(span.grouping.c)) : 1;
}

int64_t nodes_of(const kv::Grouping& ranks, int rank) {
  if (!ranks.contains(rank)) return 0;
  return std::ssize(kv::tree_nodes(kv::owned_segments(rank - ranks.base, ranks.width)));
}

// Spans of one group become neighbours; within a group they keep their order.
std::vector<int> by_group(const std::vector<SpanRoute>& spans) {
  std::vector<int> order;
  for (const SpanRoute& span : spans) {
    if (span.wide) order.push_back(span.index);
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
    const kv::Grouping& x = spans[static_cast<size_t>(a)].grouping;
    const kv::Grouping& y = spans[static_cast<size_t>(b)].grouping;
    return std::pair(x.base, x.width) < std::pair(y.base, y.width);
  });
  return order;
}

}  // namespace

Result<StepLayout> StepLayout::make(const wire::StepPlan& plan, int64_t index_topk, int rank_count) {
  StepLayout layout;
  layout.rank_count_ = rank_count;
  layout.has_copies_ = plan.copies_size() > 0 || plan.spans_size() == 0;
  layout.home_.resize(static_cast<size_t>(rank_count));
  for (int i = 0; i < plan.spans_size(); ++i) {
    TRY(SpanRoute span, make_span(plan.spans(i), i, rank_count));
    span.first_row = layout.row_count_;
    layout.row_count_ += span.rows;
    layout.partial_rounds_ = std::max(layout.partial_rounds_, rounds_of(span));
    if (span.gathers_query()) layout.has_gathered_ = true;
    if (span.split != kv::Split::kShared) layout.has_owned_ = true;
    layout.spans_.push_back(std::move(span));
  }
  set_owners(layout.spans_, index_topk, rank_count);
  layout.wide_spans_ = by_group(layout.spans_);
  for (const int index : layout.wide_spans_) layout.add_wide(layout.spans_[static_cast<size_t>(index)]);
  for (const SpanRoute& span : layout.spans_) {
    for (int64_t row = 0; row < span.rows && !span.wide; ++row) {
      layout.home_[static_cast<size_t>(owner(span, row))].push_back(
          {span.index, row, span.start + row, span.first_row + row});
    }
  }
  for (const SpanRoute& span : layout.spans_) {
    const wire::Span& wire_span = plan.spans(span.index);
    const int64_t first_sampled = span.rows - wire_span.sample_rows();
    for (int64_t row = wire_span.digest() ? 0 : first_sampled; row < span.rows; ++row) {
      const int64_t sample = row < first_sampled ? -1 : wire_span.sample_index() + row - first_sampled;
      HeadRow head = head_row(span, row, static_cast<int>(wire_span.sampler_rank()), rank_count);
      head.sample = sample;
      head.digest = wire_span.digest();
      layout.head_rows_.push_back(head);
    }
  }
  return layout;
}

void StepLayout::add_wide(SpanRoute& span) {
  const kv::Grouping ranks{span.grouping.base, span.grouping.width, 1};
  if (wide_groups_.empty() || !(wide_groups_.back().ranks == ranks)) {
    wide_groups_.push_back({ranks, wide_count_, 0});
  }
  wide_groups_.back().rows += span.rows;
  span.first_wide = wide_count_;
  span.first_split = split_count_;
  wide_count_ += span.rows;
  if (span.split_index()) split_count_ += span.rows;
  for (auto& rows : home_) {
    for (int64_t row = 0; row < span.rows; ++row) {
      rows.push_back({span.index, row, span.start + row, span.first_row + row});
    }
  }
}

kv::Range StepLayout::owned_rows(const SpanRoute& span, int rank) const {
  const auto& rows = home(rank);
  const auto before = [](const HomeRow& row, int index) { return row.span < index; };
  const auto begin = std::lower_bound(rows.begin() + wide_count_, rows.end(), span.index, before);
  const auto end = std::lower_bound(begin, rows.end(), span.index + 1, before);
  return {begin - rows.begin(), end - rows.begin()};
}

bool StepLayout::passes_entries(Indexer indexer) const {
  if (rank_count_ == 1) return false;
  return has_owned_ || has_gathered_ || (indexer == Indexer::kFull && split_count_ > 0);
}

HeadRow head_row(const SpanRoute& span, int64_t row, int sampler, int rank_count) {
  HeadRow out;
  out.span = span.index;
  out.global = span.first_row + row;
  out.position = span.start + row;
  out.provider = span.wide || rank_count == 1 ? -1 : owner(span, row);
  out.sampler = sampler % rank_count;
  return out;
}

bool passes_head_rows(std::span<const HeadRow> batch) {
  return std::any_of(batch.begin(), batch.end(), [](const HeadRow& row) { return row.provider >= 0; });
}

namespace {

int64_t head_exchanges(std::span<const HeadRow> rows) {
  int64_t count = 0;
  while (!rows.empty()) {
    const auto batch = std::min<size_t>(kHeadBatch, rows.size());
    count += passes_head_rows(rows.first(batch)) ? 2 : 1;
    rows = rows.subspan(batch);
  }
  return count;
}

}  // namespace

int64_t StepLayout::exchange_count(const ModelConfig& config) const {
  if (rank_count_ == 1) return 0;
  int64_t count = passes_copies() ? 1 : 0;
  if (row_count_ == 0) return count;  // a plan that only copies
  for (const LayerConfig& layer : config.layers) {
    count += (passes_entries(layer.indexer) ? 1 : 0) + partial_rounds() + 2;
  }
  count += head_exchanges(head_rows_);
  return config.draft_layers > 0 ? count + draft_exchange_count(config) : count;
}

// The first round of each draft layer runs with the step's own rows, and is counted with the layers. Each
// further round has a row for each span that wants more guesses.
int64_t StepLayout::draft_exchange_count(const ModelConfig& config) const {
  int64_t count = 0;
  for (int64_t round = 0;; ++round) {
    std::vector<HeadRow> rows;
    bool gathers = false, split = false;
    int partial_rounds = 0;
    for (const SpanRoute& span : spans_) {
      if (span.draft_tokens <= round) continue;
      rows.push_back(head_row(span, span.rows - 1, 0, rank_count_));
      gathers = gathers || span.gathers_query();
      partial_rounds = std::max(partial_rounds, rounds_of(span));
      split = split || span.split_index();
    }
    if (rows.empty()) return count;
    count += head_exchanges(rows);
    if (round < config.draft_layers) continue;
    const bool entries = gathers || (split && config.layers.back().indexer == Indexer::kFull);
    count += (entries ? 1 : 0) + partial_rounds + 2;
  }
}

kv::Range vocabulary_slice(int64_t vocabulary, int rank, int rank_count) {
  const int64_t panels = ceil_div(vocabulary, kernels::kPanel);
  return {std::min(panels * rank / rank_count * kernels::kPanel, vocabulary),
          std::min(panels * (rank + 1) / rank_count * kernels::kPanel, vocabulary)};
}

namespace {

// Of one span in from's outbox.
size_t query_bytes(const StepLayout& layout, const ModelConfig& config, DType query_dtype,
                   const SpanRoute& span, int from) {
  int64_t heads = 0;
  if (span.gathers_query()) heads = span.rows * kv::rank_heads(span.grouping, from, config.heads).size();
  if (span.pass_query) heads = layout.owned_rows(span, from).size() * config.heads;
  return static_cast<size_t>(heads * config.key_width()) * dtype_bytes(query_dtype);
}

}  // namespace

EntriesOutbox entries_outbox(const StepLayout& layout, const ModelConfig& config, DType query_dtype,
                             int from) {
  EntriesOutbox out;
  size_t at = 0;
  for (const SpanRoute& span : layout.spans()) at += query_bytes(layout, config, query_dtype, span, from);
  const auto place = [&](int64_t bytes) {
    const auto begin = static_cast<size_t>(round_up(static_cast<int64_t>(at), 64));
    at = begin + static_cast<size_t>(bytes);
    return begin;
  };
  const int64_t rows = layout.split_count();
  out.heads = place(rows * static_cast<int64_t>(sizeof(kernels::OfferHead)));
  out.scores = place(rows * config.index_topk * static_cast<int64_t>(sizeof(float)));
  out.positions = place(rows * config.index_topk * static_cast<int64_t>(sizeof(int32_t)));
  out.bytes = at;
  return out;
}

std::vector<size_t> queries_offsets(const StepLayout& layout, const ModelConfig& config, DType query_dtype,
                                    int from) {
  std::vector<size_t> offsets;
  size_t at = 0;
  for (const SpanRoute& span : layout.spans()) {
    offsets.push_back(at);
    at += query_bytes(layout, config, query_dtype, span, from);
  }
  return offsets;
}

bool sends_partials(const SpanRoute& span, int from, int member, int round) {
  const int c = span.grouping.c;
  if (!span.dcp() || group_first(from, c) != group_first(member, c)) return false;
  if (!span.tree_partials) return round == 0 && from != member;
  const int bit = c >> (round + 1);
  return bit > 0 && (class_of(span, from) ^ class_of(span, member)) / bit == 1;
}

PartialsMap::PartialsMap(const StepLayout& layout, const ModelConfig& config, int from, int round)
    : ranks_(static_cast<size_t>(layout.rank_count())), offset_(layout.spans().size() * ranks_, -1) {
  const int64_t words = kernels::partial_words(config.value_width());
  for (const SpanRoute& span : layout.spans()) {
    if (!span.dcp() || !span.grouping.contains(from)) continue;
    const int first = group_first(from, span.grouping.c);
    for (int member = first; member < first + span.grouping.c; ++member) {
      if (!sends_partials(span, from, member, round)) continue;
      offset_[static_cast<size_t>(span.index) * ranks_ + static_cast<size_t>(member)] =
          static_cast<int64_t>(floats_);
      floats_ +=
          static_cast<size_t>(span.rows * kv::rank_heads(span.grouping, member, config.heads).size() * words);
    }
  }
}

size_t PartialsMap::offset(const SpanRoute& span, int member) const {
  const int64_t offset = offset_[static_cast<size_t>(span.index) * ranks_ + static_cast<size_t>(member)];
  CHECK(offset >= 0, "span ", span.index, ": no partials of ", member, " are sent");
  return static_cast<size_t>(offset);
}

bool reads_for(const SpanRoute& span, const ModelConfig& config, int rank_count, int reader, int owner,
               int64_t part) {
  if (!span.grouping.contains(reader)) return false;
  return kv::class_reader(config.cache_geometry(DType::kF32, 1), span.grouping, owner, part,
                          class_of(span, reader), span.origin, rank_count) == reader;
}

std::vector<PassedPartials> passed_partials(const StepLayout& layout, const ModelConfig& config, int reader) {
  std::vector<PassedPartials> out;
  auto at = static_cast<int64_t>(PartialsMap(layout, config, reader, 0).floats());
  const int64_t words = config.group_heads() * kernels::partial_words(config.value_width());
  for (const SpanRoute& span : layout.spans()) {
    for (int owner = 0; owner < layout.rank_count() && span.pass_query; ++owner) {
      for (int64_t part = 0; part < config.kv_heads && owner != reader; ++part) {
        if (!reads_for(span, config, layout.rank_count(), reader, owner, part)) continue;
        out.push_back({span.index, owner, part, static_cast<size_t>(at)});
        at += layout.owned_rows(span, owner).size() * words;
      }
    }
  }
  return out;
}

int64_t attention_sums_row(const StepLayout& layout, int from, size_t group) {
  int64_t rows = 0;
  for (size_t i = 0; i < group; ++i) {
    const WideGroup& before = layout.wide_groups()[i];
    rows += nodes_of(before.ranks, from) * before.rows;
  }
  return rows;
}

}  // namespace weft::worker
