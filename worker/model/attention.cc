#include "worker/model/attention.h"

#include <algorithm>
#include <cstring>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "worker/model/attend.h"
#include "worker/model/attention_ends.h"
#include "worker/model/residual.h"
#include "worker/model/tree_sum.h"

namespace weft::worker {

using kernels::Gemm;

struct AttentionPhase::Work {
  explicit Work(StepState& s)
      : state(s),
        selection(s),
        ends(s.config.attention == AttentionKind::kMla ? make_mla(s, selection) : make_grouped(s)),
        presence(attention_segments(s.config)) {}

  StepState& state;
  Selection selection;
  const std::unique_ptr<AttentionEnds> ends;
  const SegmentPresence presence;
  std::vector<float> z_wide, z_whole;  // [row][heads][value width]
  std::vector<float> own_partials;     // [dcp rows][own heads][value width + 2]
  std::vector<float> sums;

  void publish_queries();
  void attend_wide(int64_t layer);
  void attend_whole(int64_t layer);
  void merge_dcp();
  void output(const LayerWeights& w, const float* z_rows, int64_t rows, kv::Range heads, kv::Range segments,
              const std::function<float*(size_t node, int64_t row)>& place);
  void outputs(const LayerWeights& w);
  void share(const LayerWeights& w);

  int64_t wide() const { return state.layout.wide_count(); }
  int64_t whole() const { return state.layout.whole_count(state.rank); }
  kv::Range all_heads() const { return {0, state.config.heads}; }
  int64_t query_bytes() const {  // of one head
    return state.config.key_width() * static_cast<int64_t>(dtype_bytes(state.setup.cache_dtype));
  }
  const std::byte* queries_of(int member) const { return state.exchange.inbox(member).data(); }
  int64_t nodes_of(int rank) const {
    return std::ssize(kv::tree_nodes(kv::owned_segments(rank, state.rank_count)));
  }
  kv::Range heads_of(int rank) const { return kv::owned_heads(rank, state.rank_count, state.config.heads); }
  // Those of some heads that read a part.
  kv::Range readers_of(int64_t part, kv::Range heads) const {
    const int64_t group = state.config.group_heads();
    return {std::max(heads.begin, part * group), std::min(heads.end, (part + 1) * group)};
  }
};

void AttentionPhase::Work::publish_queries() {
  const auto row_bytes = static_cast<size_t>(state.own_heads().size() * query_bytes());
  std::byte* outbox = state.exchange.outbox().data();
  for (const SpanRoute& span : state.layout.spans()) {
    if (!span.dcp()) continue;
    std::memcpy(outbox + static_cast<size_t>(span.first_dcp) * row_bytes,
                ends->wide_query() + static_cast<size_t>(span.first_wide) * row_bytes,
                static_cast<size_t>(span.rows) * row_bytes);
  }
}

// Wide rows: tp rows finish here; dcp rows leave their own partials in own_partials and the others' in the
// outbox. One job for each row, member of the c-group and part that its heads read.
void AttentionPhase::Work::attend_wide(int64_t layer) {
  const ModelConfig& config = state.config;
  const int64_t words = kernels::partial_words(config.value_width());
  const int64_t own = state.own_heads().size();
  float* z_rows = scratch(z_wide, wide() * own * config.value_width());
  float* own_rows = scratch(own_partials, state.layout.dcp_count() * own * words);
  std::vector<AttendJob> jobs;
  const auto add_rows = [&](const SpanRoute& span, int64_t part, int member) {
    const kv::Range heads = heads_of(member), readers = readers_of(part, heads);
    if (readers.empty()) return;
    const bool mine = member == state.rank;
    const std::byte* queries = mine ? ends->wide_query() + span.first_wide * heads.size() * query_bytes()
                                    : queries_of(member) + span.first_dcp * heads.size() * query_bytes();
    float* partials = mine ? own_rows + span.first_dcp * own * words
                           : state.outbox() + partials_offset(state.layout, config, span, state.rank, member);
    for (int64_t row = 0; row < span.rows; ++row) {
      const int64_t head = row * heads.size() + readers.begin - heads.begin;
      AttendJob job;
      job.home = span.first_wide + row;
      job.part = static_cast<int>(part);
      job.query = queries + head * query_bytes();
      job.heads = readers.size();
      if (span.dcp()) {
        job.partials = partials + head * words;
      } else {
        job.finished = z_rows + (span.first_wide * own + head) * config.value_width();
      }
      jobs.push_back(job);
    }
    if (!mine) state.count(span.index, kv::CrossKind::kQueries, span.rows * readers.size() * query_bytes());
  };
  for (const SpanRoute& span : state.layout.spans()) {
    if (!span.wide) continue;
    const int first = group_first(state.rank, span.grouping.c);
    for (int64_t part = 0; part < config.kv_heads; ++part) {
      for (int member = first; member < first + span.grouping.c; ++member) add_rows(span, part, member);
    }
  }
  attend(state, layer, jobs);
}

void AttentionPhase::Work::attend_whole(int64_t layer) {
  const ModelConfig& config = state.config;
  float* z_rows = scratch(z_whole, whole() * config.heads * config.value_width());
  std::vector<AttendJob> jobs;
  for (int64_t begin = 0, end = 0; begin < whole(); begin = end) {
    const auto span_of = [&](int64_t i) { return state.home()[static_cast<size_t>(wide() + i)].span; };
    while (end < whole() && span_of(end) == span_of(begin)) ++end;
    for (int64_t part = 0; part < config.kv_heads; ++part) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i * config.heads + part * config.group_heads();
        AttendJob job;
        job.home = wide() + i;
        job.part = static_cast<int>(part);
        job.query = ends->whole_query() + head * query_bytes();
        job.heads = config.group_heads();
        job.finished = z_rows + head * config.value_width();
        jobs.push_back(job);
      }
    }
  }
  attend(state, layer, jobs);
}

// After exchange point kPartials: the partials of this rank's head slice, by residue class, down the upper
// tree.
void AttentionPhase::Work::merge_dcp() {
  const ModelConfig& config = state.config;
  const int64_t words = kernels::partial_words(config.value_width());
  const int64_t own = state.own_heads().size();
  if (own == 0) return;
  for (const SpanRoute& span : state.layout.spans()) {
    if (!span.dcp()) continue;
    const int c = span.grouping.c;
    const int first = group_first(state.rank, c);
    for_rows(state.parallel, span.rows, 4, [&](int64_t begin, int64_t end) {
      std::vector<float> classes(static_cast<size_t>(c * own * words));
      for (int64_t row = begin; row < end; ++row) {
        for (int member = first; member < first + c; ++member) {
          const float* from = member == state.rank
                                  ? own_partials.data() + (span.first_dcp + row) * own * words
                                  : state.inbox(member) +
                                        partials_offset(state.layout, config, span, member, state.rank) +
                                        row * own * words;
          std::memcpy(classes.data() + kv::owned_class(member - first, span.origin, c) * own * words, from,
                      static_cast<size_t>(own * words) * sizeof(float));
        }
        float* out = z_wide.data() + (span.first_wide + row) * own * config.value_width();
        for (int64_t head = 0; head < own; ++head) {
          kernels::merge_partials(classes.data() + head * words, c, own * words, config.value_width());
          kernels::finish_partial(classes.data() + head * words, config.value_width(),
                                  out + head * config.value_width());
        }
      }
    });
    state.count(span.index, kv::CrossKind::kPartials,
                span.rows * (c - 1) * own * words * static_cast<int64_t>(sizeof(float)));
  }
}

// o_proj over some heads of `rows` rows; node sums of the owned segments go where `place` says.
void AttentionPhase::Work::output(const LayerWeights& w, const float* z_rows, int64_t rows, kv::Range heads,
                                  kv::Range segments,
                                  const std::function<float*(size_t node, int64_t row)>& place) {
  const ModelConfig& config = state.config;
  if (rows == 0) return;
  const auto bytes = static_cast<int64_t>(dtype_bytes(state.weights.dtype));
  const int64_t out_stride = heads.size() * config.value;
  const auto* ox = static_cast<const std::byte*>(ends->head_outputs(w, z_rows, rows, heads));
  const auto compute = [&](int segment, int64_t row_begin, int64_t row_count, float* out) {
    const kv::Range items = kv::segment_items(segment, config.heads);
    Gemm p;
    p.weights = w.o;
    p.k_begin = items.begin * config.value;
    p.k_end = items.end * config.value;
    p.rows = row_count;
    p.x = ox + (row_begin * out_stride + (items.begin - heads.begin) * config.value) * bytes;
    p.x_stride = out_stride;
    p.y = out;
    p.y_stride = config.hidden;
    kernels::gemm(p, state.parallel);
  };
  sum_segments(segments, presence, rows, config.hidden, state.parallel, compute, place);
}

// Wide rows: node sums into the outbox. Whole rows: the whole sum, residual, norm, and the normed row for
// everyone.
void AttentionPhase::Work::outputs(const LayerWeights& w) {
  const int64_t d = state.config.hidden;
  const kv::Range segments = kv::owned_segments(state.rank, state.rank_count);
  float* outbox = state.outbox();
  output(w, z_wide.data(), wide(), state.own_heads(), segments,
         [&](size_t node, int64_t row) { return outbox + (static_cast<int64_t>(node) * wide() + row) * d; });

  float* sums_rows = scratch(sums, whole() * d);
  output(w, z_whole.data(), whole(), all_heads(), {0, kv::kShards},
         [&](size_t, int64_t row) { return sums_rows + row * d; });
  float* shared_rows = outbox + nodes_of(state.rank) * wide() * d;
  for_rows(state.parallel, whole(), 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* residual = state.x.data() + (wide() + i) * d;
      add_to_residual(sums_rows + i * d, w.o_bias, residual, d);
      kernels::rms_norm(residual, d, w.post_attention_norm, state.config.rms_eps, 1, d, shared_rows + i * d,
                        d);
    }
  });
}

// After exchange point kAttentionSums: residuals of the wide rows, and the normed rows of the whole step.
void AttentionPhase::Work::share(const LayerWeights& w) {
  const int64_t d = state.config.hidden;
  float* normed = scratch(state.normed, state.layout.row_count() * d);
  add_sums(
      state, presence, w.o_bias, wide(), wide(), [](int64_t home) { return home; },
      [&](int64_t home) {
        kernels::rms_norm(state.x.data() + home * d, d, w.post_attention_norm, state.config.rms_eps, 1, d,
                          normed + state.home()[static_cast<size_t>(home)].global * d, d);
      });
  const auto row_bytes = d * static_cast<int64_t>(sizeof(float));
  for (int from = 0; from < state.rank_count; ++from) {
    const float* rows = state.inbox(from) + nodes_of(from) * wide() * d;
    const auto& home = state.layout.home(from);
    for (int64_t i = wide(); i < std::ssize(home); ++i) {
      const HomeRow& row = home[static_cast<size_t>(i)];
      std::memcpy(normed + row.global * d, rows + (i - wide()) * d, static_cast<size_t>(row_bytes));
      if (from != state.rank) state.count(row.span, kv::CrossKind::kRows, row_bytes);
    }
  }
  const int64_t sum_bytes = remote_sum_bytes(state, presence);
  for (const SpanRoute& span : state.layout.spans()) {
    if (span.wide) state.count(span.index, kv::CrossKind::kRows, span.rows * sum_bytes);
  }
}

AttentionPhase::AttentionPhase(StepState& state) : work_(std::make_unique<Work>(state)) {}
AttentionPhase::~AttentionPhase() = default;

void AttentionPhase::begin_step() { work_->selection.reset(); }

Result<void> AttentionPhase::run(int64_t layer) {
  Work& work = *work_;
  StepState& state = work.state;
  const LayerWeights& w = state.weights.layers[static_cast<size_t>(layer)];
  const Indexer indexer = state.config.layers[static_cast<size_t>(layer)].indexer;
  const auto point = static_cast<int>(layer);
  work.ends->project(layer);
  if (state.layout.passes_entries(indexer)) {
    work.publish_queries();
    TRY_VOID(state.exchange.pass(ExchangePoint::kEntries, point));
  }
  work.ends->choose(layer);
  work.attend_wide(layer);
  work.attend_whole(layer);
  if (state.layout.passes_partials()) {
    TRY_VOID(state.exchange.pass(ExchangePoint::kPartials, point));
    work.merge_dcp();
  }
  work.outputs(w);
  if (state.layout.passes_sums()) TRY_VOID(state.exchange.pass(ExchangePoint::kAttentionSums, point));
  work.share(w);
  return {};
}

}  // namespace weft::worker
