#include "worker/model/attention.h"

#include <algorithm>
#include <cstring>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "worker/model/attend.h"
#include "worker/model/attention_ends.h"
#include "worker/model/expanded.h"
#include "worker/model/partials.h"
#include "worker/model/pass_query.h"
#include "worker/model/residual.h"
#include "worker/model/tree_sum.h"

namespace weft::worker {

using kernels::Gemm;

struct AttentionPhase::Work {
  explicit Work(StepState& s)
      : state(s),
        selection(s),
        partials(s),
        pass_query(s),
        expanded(s),
        ends(s.config.hash                               ? make_hash(s, selection)
             : s.config.attention == AttentionKind::kMla ? make_mla(s, selection)
                                                         : make_grouped(s)),
        presence(attention_segments(s.config)) {}

  StepState& state;
  Selection selection;
  Partials partials;
  PassQuery pass_query;
  Expanded expanded;
  const std::unique_ptr<AttentionEnds> ends;
  const SegmentPresence presence;
  std::vector<float> z_wide, z_whole;  // [row][heads][value width]
  std::vector<int64_t> z_offset;       // of wide spans, in z_wide
  std::vector<float> values_whole;     // of rows that expand: [row][heads][value]
  Operand values_operand;
  std::vector<float> sums;
  std::vector<Gemm> products;  // of o_proj

  void publish_queries();
  void place_wide();
  void attend_wide(int64_t layer);
  void attend_whole(int64_t layer);
  void attend_expanded(int64_t layer);
  void output(const LayerWeights& w, const void* values, int64_t rows, kv::Range heads, kv::Range segments,
              const std::function<float*(size_t node, int64_t row)>& place);
  void outputs(const LayerWeights& w);
  void share(const LayerWeights& w);

  int64_t wide() const { return state.layout.wide_count(); }
  int64_t whole() const { return state.layout.whole_count(state.rank); }
  kv::Range all_heads() const { return {0, state.config.heads}; }
  kv::Range heads_of(const kv::Grouping& ranks, int rank) const {
    return kv::rank_heads(ranks, rank, state.config.heads);
  }
  int64_t query_bytes() const {  // of one head
    return state.config.key_width() * static_cast<int64_t>(dtype_bytes(state.setup.cache.query_dtype()));
  }
  float* z_of(const SpanRoute& span) { return z_wide.data() + z_offset[static_cast<size_t>(span.index)]; }
  // Those of some heads that read a part.
  kv::Range readers_of(int64_t part, kv::Range heads) const {
    const int64_t group = state.config.group_heads();
    return {std::max(heads.begin, part * group), std::min(heads.end, (part + 1) * group)};
  }
};

void AttentionPhase::Work::publish_queries() {
  for (const SpanRoute& span : state.layout.spans()) {
    if (!span.gathers_query() || !state.attends(span)) continue;
    std::memcpy(state.exchange.outbox().data() + state.query_offset(span, state.rank), ends->wide_query(span),
                static_cast<size_t>(span.rows * heads_of(span.grouping, state.rank).size() * query_bytes()));
  }
}

void AttentionPhase::Work::place_wide() {
  z_offset.assign(state.layout.spans().size(), 0);
  int64_t size = 0;
  for (const int index : state.layout.wide_spans()) {
    const SpanRoute& span = state.layout.spans()[static_cast<size_t>(index)];
    z_offset[static_cast<size_t>(index)] = size;
    size += span.rows * heads_of(span.grouping, state.rank).size() * state.config.value_width();
  }
  scratch(z_wide, size);
}

// Wide rows of this rank's groups: tp rows finish here, dcp rows leave partials. One job for each row, member
// of the c-group and part that its heads read.
void AttentionPhase::Work::attend_wide(int64_t layer) {
  const ModelConfig& config = state.config;
  const int64_t words = kernels::partial_words(config.value_width());
  place_wide();
  partials.begin_layer();
  std::vector<AttendJob> jobs;
  const auto add_rows = [&](const SpanRoute& span, int64_t part, int member) {
    const kv::Range heads = heads_of(span.grouping, member), readers = readers_of(part, heads);
    if (readers.empty()) return;
    const bool received = member != state.rank && span.gathers_query();
    const kv::Range source = received ? heads : ends->query_heads(span);
    const std::byte* queries = received
                                   ? state.exchange.inbox(member).data() + state.query_offset(span, member)
                                   : ends->wide_query(span);
    float* out = span.dcp() ? partials.at(span, member) : z_of(span);
    for (int64_t row = 0; row < span.rows; ++row) {
      const int64_t head = row * heads.size() + readers.begin - heads.begin;
      AttendJob job;
      job.span = span.index;
      job.position = span.start + row;
      job.home = span.first_wide + row;
      job.part = static_cast<int>(part);
      job.query = queries + (row * source.size() + readers.begin - source.begin) * query_bytes();
      job.heads = readers.size();
      if (span.dcp()) {
        job.partials = out + head * words;
      } else {
        job.finished = out + head * config.value_width();
      }
      jobs.push_back(job);
    }
    if (received)
      state.count(span.index, kv::CrossKind::kQueries, span.rows * readers.size() * query_bytes());
  };
  for (const SpanRoute& span : state.layout.spans()) {
    if (!span.wide || !state.attends(span)) continue;
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
    if (state.layout.spans()[static_cast<size_t>(span_of(begin))].pass_query) continue;
    if (state.expands(state.layout.spans()[static_cast<size_t>(span_of(begin))])) continue;
    for (int64_t part = 0; part < config.kv_heads; ++part) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t head = i * config.heads + part * config.group_heads();
        AttendJob job;
        job.span = span_of(i);
        job.position = state.home()[static_cast<size_t>(wide() + i)].position;
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

void AttentionPhase::Work::attend_expanded(int64_t layer) {
  const auto runs = state.whole_runs();
  if (std::none_of(runs.begin(), runs.end(), [](const auto& run) { return run.expands; })) return;
  scratch(values_whole, whole() * state.config.heads * state.config.value);
  expanded.attend(layer, ends->plain_query(), values_whole.data());
}

// o_proj over some heads of `rows` rows, whose values are in the weights' dtype; node sums of the owned
// segments go where `place` says.
void AttentionPhase::Work::output(const LayerWeights& w, const void* values, int64_t rows, kv::Range heads,
                                  kv::Range segments,
                                  const std::function<float*(size_t node, int64_t row)>& place) {
  const ModelConfig& config = state.config;
  if (rows == 0) return;
  const auto bytes = static_cast<int64_t>(dtype_bytes(state.weights.dtype));
  const int64_t out_stride = heads.size() * config.value;
  const auto* ox = static_cast<const std::byte*>(values);
  const auto compute = [&](int64_t row_begin, int64_t row_count, std::span<float* const> sums) {
    products.clear();
    for (size_t i = 0; i < sums.size(); ++i) {
      if (sums[i] == nullptr) continue;
      const kv::Range items =
          kv::segment_items(static_cast<int>(segments.begin) + static_cast<int>(i), config.heads);
      Gemm p;
      p.weights = w.o;
      p.k_begin = items.begin * config.value;
      p.k_end = items.end * config.value;
      p.rows = row_count;
      p.x = ox + (row_begin * out_stride + (items.begin - heads.begin) * config.value) * bytes;
      p.x_stride = out_stride;
      p.y = sums[i];
      p.y_stride = config.hidden;
      products.push_back(p);
    }
    kernels::gemm(products, state.parallel);
  };
  sum_segments(segments, presence, rows, config.hidden, state.parallel, compute, place);
}

// Wide rows: node sums of each of this rank's groups into the outbox. Whole rows: the whole sum, residual,
// norm, and the normed row for everyone.
void AttentionPhase::Work::outputs(const LayerWeights& w) {
  const int64_t d = state.config.hidden;
  float* outbox = state.outbox();
  const float* z_rows = z_wide.data();
  const auto& groups = state.layout.wide_groups();
  for (size_t i = 0; i < groups.size(); ++i) {
    const auto& [ranks, first, rows] = groups[i];
    if (!ranks.contains(state.rank)) continue;
    const kv::Range heads = heads_of(ranks, state.rank);
    float* out = outbox + attention_sums_row(state.layout, state.rank, i) * d;
    output(w, ends->head_outputs(w, z_rows, rows, heads), rows, heads,
           kv::owned_segments(state.rank - ranks.base, ranks.width),
           [&, rows = rows](size_t node, int64_t row) {
             return out + (static_cast<int64_t>(node) * rows + row) * d;
           });
    z_rows += rows * heads.size() * state.config.value_width();
  }

  float* sums_rows = scratch(sums, whole() * d);
  for (const StepState::WholeRun& run : state.whole_runs()) {
    const int64_t first = run.home.begin - wide(), rows = run.home.size();
    const int64_t heads = state.config.heads;
    const void* values =
        run.expands ? values_operand.of(state.parallel, state.weights.dtype,
                                        values_whole.data() + first * heads * state.config.value,
                                        rows * heads * state.config.value)
                    : ends->head_outputs(w, z_whole.data() + first * heads * state.config.value_width(), rows,
                                         all_heads());
    output(w, values, rows, all_heads(), {0, kv::kShards},
           [&](size_t, int64_t row) { return sums_rows + (first + row) * d; });
  }
  float* shared_rows = outbox + attention_sums_row(state.layout, state.rank, groups.size()) * d;
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
  const auto& groups = state.layout.wide_groups();
  for (size_t i = 0; i < groups.size(); ++i) {
    const WideGroup& group = groups[i];
    const PublishedSums published{group.ranks, group.rows,
                                  [&](int rank) { return attention_sums_row(state.layout, rank, i); }};
    add_sums(
        state, published, presence, w.o_bias, {group.first, group.first + group.rows},
        [&](int64_t home) { return home - group.first; },
        [&](int64_t home) {
          kernels::rms_norm(state.x.data() + home * d, d, w.post_attention_norm, state.config.rms_eps, 1, d,
                            normed + state.home()[static_cast<size_t>(home)].global * d, d);
        });
  }
  const auto row_bytes = d * static_cast<int64_t>(sizeof(float));
  for (int from = 0; from < state.rank_count; ++from) {
    const float* rows = state.inbox(from) + attention_sums_row(state.layout, from, groups.size()) * d;
    const auto& home = state.layout.home(from);
    for (int64_t i = wide(); i < std::ssize(home); ++i) {
      const HomeRow& row = home[static_cast<size_t>(i)];
      std::memcpy(normed + row.global * d, rows + (i - wide()) * d, static_cast<size_t>(row_bytes));
      if (from != state.rank) state.count(row.span, kv::CrossKind::kRows, row_bytes);
    }
  }
  for (const SpanRoute& span : state.layout.spans()) {
    if (!span.wide) continue;
    state.count(span.index, kv::CrossKind::kRows,
                span.rows * remote_sum_bytes(state, span.grouping, presence));
  }
}

AttentionPhase::AttentionPhase(StepState& state) : work_(std::make_unique<Work>(state)) {}
AttentionPhase::~AttentionPhase() = default;

void AttentionPhase::begin_step() {
  work_->state.query_offsets.clear();
  work_->selection.reset();
  work_->partials.begin_step();
  work_->pass_query.begin_step();
}

Result<void> AttentionPhase::run(int64_t layer) {
  Work& work = *work_;
  StepState& state = work.state;
  const LayerWeights& w = state.weights.layers[static_cast<size_t>(layer)];
  const Indexer indexer = state.config.layers[static_cast<size_t>(layer)].indexer;
  const auto point = static_cast<int>(layer);
  // Keys of an index in parts are scored before the exchange point; all else is read after it.
  const bool offers = indexer == Indexer::kFull && state.layout.split_count() > 0;
  if (offers) TRY_VOID(state.await_loads(layer));
  work.ends->project(layer);
  state.ended(Stage::kProject);
  if (!offers) TRY_VOID(state.await_loads(layer));
  if (state.layout.passes_entries(indexer)) {
    work.publish_queries();
    work.pass_query.publish(work.ends->whole_query());
    TRY_VOID(state.exchange.pass(ExchangePoint::kEntries, point));
  }
  state.ended(Stage::kEntries);
  work.ends->choose(layer);
  state.ended(Stage::kChoose);
  work.attend_wide(layer);
  work.attend_whole(layer);
  work.pass_query.attend(layer, work.ends->whole_query());
  work.attend_expanded(layer);
  state.ended(Stage::kAttend);
  TRY_VOID(work.partials.exchange(
      point, [&](const SpanRoute& span) { return work.z_of(span); },
      [&] { work.pass_query.finish(work.z_whole.data()); }));
  state.ended(Stage::kPartials);
  work.outputs(w);
  state.ended(Stage::kOutput);
  if (state.layout.passes_sums()) TRY_VOID(state.exchange.pass(ExchangePoint::kAttentionSums, point));
  work.share(w);
  state.ended(Stage::kAttentionSums);
  return {};
}

}  // namespace weft::worker
