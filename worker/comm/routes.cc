#include "worker/comm/routes.h"

#include <algorithm>

#include "kernels/attention.h"
#include "kernels/gemm.h"
#include "kernels/indexer.h"
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
  route.draft_tokens = span.draft_tokens();
  route.no_write = span.no_write();
  const kv::Grouping& g = route.grouping;
  if (route.rows < 1) return bad_plan("a span without rows");
  if (span.split() >= kv::kSplits) return bad_plan("unknown split " + std::to_string(span.split()));
  if (g.width < 1 || g.c < 1 || g.width % g.c != 0 || g.base < 0 || g.base + g.width > rank_count) {
    return bad_plan("impossible grouping " + kv::grouping_name(g, rank_count));
  }
  if (g.width != 1 && g.width != rank_count) {
    return bad_plan("a group spans one rank or all: " + kv::grouping_name(g, rank_count));
  }
  if (route.index_c < 1 || g.width % route.index_c != 0)
    return bad_plan("index_c must divide the group's width");
  const bool literal = static_cast<uint32_t>(span.tokens_size()) == span.rows();
  const bool reference = span.tokens_size() == 0 && span.has_input() && span.rows() == 1;
  if (!literal && !reference) return bad_plan("a span needs as many tokens as rows, or one input reference");
  if (span.sample_rows() > span.rows()) return bad_plan("more rows draw than there are");
  if (span.draft_tokens() > 1 && span.prefill()) return bad_plan("a prompt's last row is guessed from once");
  route.wide = rank_count > 1 && route.split == kv::Split::kShared && g.width == rank_count;
  return route;
}

int owner(const SpanRoute& span, int64_t row, int rank_count) {
  return span.split == kv::Split::kShared ? span.grouping.base
                                          : kv::row_owner(span.split, row, span.rows, rank_count);
}

}  // namespace

Result<StepLayout> StepLayout::make(const wire::StepPlan& plan, int rank_count) {
  StepLayout layout;
  layout.rank_count_ = rank_count;
  layout.has_copies_ = plan.copies_size() > 0;
  layout.home_.resize(static_cast<size_t>(rank_count));
  for (int i = 0; i < plan.spans_size(); ++i) {
    TRY(SpanRoute span, make_span(plan.spans(i), i, rank_count));
    span.first_row = layout.row_count_;
    span.first_wide = layout.wide_count_;
    span.first_dcp = layout.dcp_count_;
    span.first_split = layout.split_count_;
    layout.row_count_ += span.rows;
    if (span.wide) layout.wide_count_ += span.rows;
    if (span.dcp()) layout.dcp_count_ += span.rows;
    if (span.split_index()) layout.split_count_ += span.rows;
    if (span.split != kv::Split::kShared) layout.has_owned_ = true;
    layout.spans_.push_back(span);
  }
  for (const bool wide : {true, false}) {
    for (const SpanRoute& span : layout.spans_) {
      if (span.wide != wide) continue;
      for (int64_t row = 0; row < span.rows; ++row) {
        const HomeRow home{span.index, row, span.start + row, span.first_row + row};
        if (wide) {
          for (auto& rows : layout.home_) rows.push_back(home);
        } else {
          layout.home_[static_cast<size_t>(owner(span, row, rank_count))].push_back(home);
        }
      }
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

bool StepLayout::passes_entries(Indexer indexer) const {
  if (rank_count_ == 1) return false;
  return has_owned_ || dcp_count_ > 0 || (indexer == Indexer::kFull && split_count_ > 0);
}

HeadRow head_row(const SpanRoute& span, int64_t row, int sampler, int rank_count) {
  HeadRow out;
  out.span = span.index;
  out.global = span.first_row + row;
  out.position = span.start + row;
  out.provider = span.wide || rank_count == 1 ? -1 : owner(span, row, rank_count);
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
  for (const LayerConfig& layer : config.layers) {
    count += (passes_entries(layer.indexer) ? 1 : 0) + (passes_partials() ? 1 : 0) + 2;
  }
  count += head_exchanges(head_rows_);
  return config.draft_layer ? count + draft_exchange_count(config) : count;
}

// Round 0 runs with the step's own rows, and is counted with the layers. Each further one has a row for each
// span that wants more guesses.
int64_t StepLayout::draft_exchange_count(const ModelConfig& config) const {
  int64_t count = 0;
  for (int64_t round = 0;; ++round) {
    std::vector<HeadRow> rows;
    bool dcp = false, split = false;
    for (const SpanRoute& span : spans_) {
      if (span.draft_tokens <= round) continue;
      rows.push_back(head_row(span, span.rows - 1, 0, rank_count_));
      dcp = dcp || span.dcp();
      split = split || span.split_index();
    }
    if (rows.empty()) return count;
    count += head_exchanges(rows);
    if (round == 0) continue;
    const bool entries = dcp || (split && config.layers.back().indexer == Indexer::kFull);
    count += (entries ? 1 : 0) + (dcp ? 1 : 0) + 2;
  }
}

kv::Range vocabulary_slice(int64_t vocabulary, int rank, int rank_count) {
  const int64_t panels = ceil_div(vocabulary, kernels::kPanel);
  return {std::min(panels * rank / rank_count * kernels::kPanel, vocabulary),
          std::min(panels * (rank + 1) / rank_count * kernels::kPanel, vocabulary)};
}

EntriesOutbox entries_outbox(const StepLayout& layout, const ModelConfig& config, DType cache_dtype,
                             int from) {
  const int64_t heads = kv::owned_heads(from, layout.rank_count(), config.heads).size();
  EntriesOutbox out;
  size_t at = static_cast<size_t>(layout.dcp_count() * heads * config.key_width()) * dtype_bytes(cache_dtype);
  out.counts = at = static_cast<size_t>(round_up(static_cast<int64_t>(at), 64));
  at += static_cast<size_t>(layout.split_count()) * sizeof(int32_t);
  out.candidates = at = static_cast<size_t>(round_up(static_cast<int64_t>(at), 64));
  at += static_cast<size_t>(layout.split_count() * config.index_topk) * sizeof(kernels::Candidate);
  out.bytes = at;
  return out;
}

size_t partials_offset(const StepLayout& layout, const ModelConfig& config, const SpanRoute& span, int from,
                       int to) {
  const int64_t words = kernels::partial_words(config.value_width());
  int64_t at = 0;
  for (const SpanRoute& other : layout.spans()) {
    if (!other.dcp()) continue;
    const int c = other.grouping.c;
    for (int member = group_first(from, c); member < group_first(from, c) + c; ++member) {
      if (other.index == span.index && member == to) return static_cast<size_t>(at);
      if (member == from) continue;
      at += other.rows * kv::owned_heads(member, layout.rank_count(), config.heads).size() * words;
    }
  }
  CHECK(false, "span ", span.index, " has no partials from ", from, " to ", to);
  return 0;
}

}  // namespace weft::worker
