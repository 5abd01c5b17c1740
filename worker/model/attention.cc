#include "worker/model/attention.h"

#include <cmath>
#include <cstring>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "worker/model/attend.h"
#include "worker/model/cache_view.h"
#include "worker/model/residual.h"
#include "worker/model/tree_sum.h"

namespace weft::worker {

using kernels::Gemm;
using kernels::PackedMatrix;

struct AttentionPhase::Work {
  explicit Work(StepState& s) : state(s), selection(s), presence(attention_segments(s.config)) {}

  StepState& state;
  Selection selection;
  const SegmentPresence presence;
  Operand hidden_operand, latent_operand, nope_operand, value_operand, output_operand;
  std::vector<float> h, q_latent, kv_row, index_key, index_query, index_weights, q, absorbed, heads_out, sums;
  std::vector<float> z_wide, z_whole;  // [row][heads][latent]
  std::vector<float> own_partials;     // [dcp rows][own heads][latent + 2]
  std::vector<std::byte> wide_query, whole_query, index_query_stored;

  // A gemm over `rows` rows; x in the weights' dtype.
  void product(const PackedMatrix& weights, const void* x, int64_t x_stride, int64_t rows, float* y,
               int64_t y_stride, int64_t group_begin = 0, int64_t group_end = -1) {
    if (rows == 0) return;
    Gemm p;
    p.weights = weights;
    p.group_begin = group_begin;
    p.group_end = group_end < 0 ? weights.groups : group_end;
    p.rows = rows;
    p.x = x;
    p.x_stride = x_stride;
    p.y = y;
    p.y_stride = y_stride;
    kernels::gemm(p, state.parallel);
  }

  const float* cosine(int64_t home) const { return state.cosine.data() + home * (state.config.rope / 2); }
  const float* sine(int64_t home) const { return state.sine.data() + home * (state.config.rope / 2); }

  void project(int64_t layer);
  void index_projections(const LayerWeights& w, int64_t index_layer, const float* normed_h,
                         const void* latent);
  void absorb(const LayerWeights& w, const void* q_in, int64_t q_in_stride, int64_t home_begin, int64_t rows,
              kv::Range heads, std::byte* out);
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
  int64_t index_layer_of(int64_t layer) const {
    int64_t count = 0;
    for (int64_t i = 0; i < layer; ++i)
      count += state.config.layers[static_cast<size_t>(i)].indexer == Indexer::kFull;
    return count;
  }
  const std::byte* queries_of(int member) const { return state.exchange.inbox(member).data(); }
  int64_t nodes_of(int rank) const {
    return std::ssize(kv::tree_nodes(kv::owned_segments(rank, state.rank_count)));
  }
  int64_t group_heads(int rank) const {
    return kv::owned_heads(rank, state.rank_count, state.config.heads).size();
  }
};

// Queries, entries and index projections of the home rows; entries and index keys go into pages.
void AttentionPhase::Work::project(int64_t layer) {
  const ModelConfig& config = state.config;
  const LayerWeights& w = state.weights.layers[static_cast<size_t>(layer)];
  const int64_t n = state.home_count();
  const int64_t d = config.hidden;
  scratch(h, n * d);
  for_rows(state.parallel, n, 16, [&](int64_t begin, int64_t end) {
    kernels::rms_norm(state.x.data() + begin * d, d, w.input_norm, config.rms_eps, end - begin, d,
                      h.data() + begin * d, d);
  });
  const void* hx = hidden_operand.of(state.parallel, state.weights.dtype, h.data(), n * d);

  const void* q_in = hx;
  int64_t q_in_stride = d;
  if (config.q_lora_rank > 0) {
    const int64_t r = config.q_lora_rank;
    scratch(q_latent, n * r);
    product(w.q_a, hx, d, n, q_latent.data(), r);
    for_rows(state.parallel, n, 16, [&](int64_t begin, int64_t end) {
      float* rows = q_latent.data() + begin * r;
      kernels::rms_norm(rows, r, w.q_a_norm, config.latent_eps, end - begin, r, rows, r);
    });
    q_in = latent_operand.of(state.parallel, state.weights.dtype, q_latent.data(), n * r);
    q_in_stride = r;
  }

  const int64_t width = config.entry_width();
  scratch(kv_row, n * width);
  product(w.kv_a, hx, d, n, kv_row.data(), width);
  for_rows(state.parallel, n, 16, [&](int64_t begin, int64_t end) {
    kernels::rms_norm(kv_row.data() + begin * width, width, w.kv_a_norm, config.latent_eps, end - begin,
                      config.latent, kv_row.data() + begin * width, width);
    for (int64_t i = begin; i < end; ++i) {
      kernels::rope(kv_row.data() + i * width + config.latent, config.rope, cosine(i), sine(i),
                    config.rope_layout);
    }
  });
  store_entries(state, layer, {0, 0, n, kv_row.data(), width});

  if (config.layers[static_cast<size_t>(layer)].indexer == Indexer::kFull) {
    index_projections(w, index_layer_of(layer), h.data(), q_in);
  }

  const auto query_bytes = static_cast<int64_t>(dtype_bytes(state.setup.cache_dtype));
  const kv::Range own = state.own_heads();
  std::byte* wide_out = scratch(wide_query, wide() * own.size() * width * query_bytes);
  std::byte* whole_out = scratch(whole_query, whole() * config.heads * width * query_bytes);
  absorb(w, q_in, q_in_stride, 0, wide(), own, wide_out);
  absorb(w, q_in, q_in_stride, wide(), whole(), all_heads(), whole_out);
}

void AttentionPhase::Work::index_projections(const LayerWeights& w, int64_t index_layer,
                                             const float* normed_h, const void* latent) {
  const ModelConfig& config = state.config;
  const int64_t n = state.home_count();
  const int64_t heads = config.index_heads, width = config.index_width;
  const void* hx = hidden_operand.of(state.parallel, state.weights.dtype, normed_h, n * config.hidden);
  scratch(index_key, n * width);
  product(w.index_k, hx, config.hidden, n, index_key.data(), width);
  scratch(index_query, n * heads * width);
  product(w.index_q, latent, config.q_lora_rank, n, index_query.data(), heads * width);
  scratch(index_weights, n * heads);
  product(w.index_weights, normed_h, config.hidden, n, index_weights.data(), heads);
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(heads * width)));
  constexpr float kIndexEps = 1e-6f;
  for_rows(state.parallel, n, 16, [&](int64_t begin, int64_t end) {
    float* keys = index_key.data() + begin * width;
    kernels::layer_norm(keys, width, w.index_k_norm, w.index_k_norm_bias, kIndexEps, end - begin, width, keys,
                        width);
    kernels::scale(index_weights.data() + begin * heads, factor, (end - begin) * heads);
    for (int64_t i = begin; i < end; ++i) {
      kernels::rope(index_key.data() + i * width, config.rope, cosine(i), sine(i), config.index_rope_layout);
      for (int64_t head = 0; head < heads; ++head) {
        kernels::rope(index_query.data() + (i * heads + head) * width, config.rope, cosine(i), sine(i),
                      config.index_rope_layout);
      }
    }
  });
  store_index_keys(state, index_layer, index_key.data());
  const DType dtype = state.setup.cache_dtype;
  std::byte* stored =
      scratch(index_query_stored, n * heads * width * static_cast<int64_t>(dtype_bytes(dtype)));
  kernels::convert(index_query.data(), n * heads * width, dtype, stored);
  selection.offer(index_layer, stored, index_weights.data());
}

// q̃ = W_UKᵀ q_nope ‖ rope(q_pe) for some heads of consecutive home rows, in cache dtype.
void AttentionPhase::Work::absorb(const LayerWeights& w, const void* q_in, int64_t q_in_stride,
                                  int64_t home_begin, int64_t rows, kv::Range heads, std::byte* out) {
  const ModelConfig& config = state.config;
  if (rows == 0 || heads.empty()) return;
  const DType dtype = state.weights.dtype;
  const auto bytes = static_cast<int64_t>(dtype_bytes(dtype));
  const int64_t head_width = config.nope + config.rope, width = config.entry_width();
  const int64_t q_stride = heads.size() * head_width, out_stride = heads.size() * width;
  scratch(q, rows * q_stride);
  product(w.q_b, static_cast<const std::byte*>(q_in) + home_begin * q_in_stride * bytes, q_in_stride, rows,
          q.data(), q_stride, heads.begin, heads.end);
  const auto* nope =
      static_cast<const std::byte*>(nope_operand.of(state.parallel, dtype, q.data(), rows * q_stride));
  scratch(absorbed, rows * out_stride);
  for (int64_t head = 0; head < heads.size(); ++head) {
    product(w.w_uk, nope + head * head_width * bytes, q_stride, rows, absorbed.data() + head * width,
            out_stride, heads.begin + head, heads.begin + head + 1);
  }
  for_rows(state.parallel, rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t head = 0; head < heads.size(); ++head) {
        float* target = absorbed.data() + i * out_stride + head * width + config.latent;
        std::memcpy(target, q.data() + i * q_stride + head * head_width + config.nope,
                    static_cast<size_t>(config.rope) * sizeof(float));
        kernels::rope(target, config.rope, cosine(home_begin + i), sine(home_begin + i), config.rope_layout);
      }
    }
    const auto cache_bytes = static_cast<int64_t>(dtype_bytes(state.setup.cache_dtype));
    kernels::convert(absorbed.data() + begin * out_stride, (end - begin) * out_stride,
                     state.setup.cache_dtype, out + begin * out_stride * cache_bytes);
  });
}

void AttentionPhase::Work::publish_queries() {
  const auto row_bytes = static_cast<size_t>(state.own_heads().size() * state.config.entry_width()) *
                         dtype_bytes(state.setup.cache_dtype);
  std::byte* outbox = state.exchange.outbox().data();
  for (const SpanRoute& span : state.layout.spans()) {
    if (!span.dcp()) continue;
    std::memcpy(outbox + static_cast<size_t>(span.first_dcp) * row_bytes,
                wide_query.data() + static_cast<size_t>(span.first_wide) * row_bytes,
                static_cast<size_t>(span.rows) * row_bytes);
  }
}

// Wide rows: tp rows finish here; dcp rows leave their own partials in own_partials and the others' in the
// outbox.
void AttentionPhase::Work::attend_wide(int64_t layer) {
  const ModelConfig& config = state.config;
  const int64_t words = kernels::partial_words(config.latent);
  const auto query_bytes = config.entry_width() * static_cast<int64_t>(dtype_bytes(state.setup.cache_dtype));
  const int64_t own = state.own_heads().size();
  float* z_rows = scratch(z_wide, wide() * own * config.latent);
  float* own_rows = scratch(own_partials, state.layout.dcp_count() * own * words);
  std::vector<AttendJob> jobs;
  for (const SpanRoute& span : state.layout.spans()) {
    if (!span.wide) continue;
    const int first = group_first(state.rank, span.grouping.c);
    for (int member = first; member < first + span.grouping.c; ++member) {
      for (int64_t row = 0; row < span.rows; ++row) {
        const int64_t home = span.first_wide + row;
        AttendJob job;
        job.home = home;
        job.heads = group_heads(member);
        if (job.heads == 0) continue;
        if (member == state.rank) {
          job.query = wide_query.data() + home * own * query_bytes;
          if (span.dcp()) {
            job.partials = own_rows + (span.first_dcp + row) * own * words;
          } else {
            job.finished = z_rows + home * own * config.latent;
          }
        } else {
          job.query = queries_of(member) + (span.first_dcp + row) * job.heads * query_bytes;
          job.partials = state.outbox() + partials_offset(state.layout, config, span, state.rank, member) +
                         row * job.heads * words;
          state.count(span.index, kv::CrossKind::kQueries, job.heads * query_bytes);
        }
        jobs.push_back(job);
      }
    }
  }
  attend(state, layer, jobs);
}

void AttentionPhase::Work::attend_whole(int64_t layer) {
  const ModelConfig& config = state.config;
  const auto row_bytes =
      config.heads * config.entry_width() * static_cast<int64_t>(dtype_bytes(state.setup.cache_dtype));
  float* z_rows = scratch(z_whole, whole() * config.heads * config.latent);
  std::vector<AttendJob> jobs(static_cast<size_t>(whole()));
  for (int64_t i = 0; i < whole(); ++i) {
    AttendJob& job = jobs[static_cast<size_t>(i)];
    job.home = wide() + i;
    job.query = whole_query.data() + i * row_bytes;
    job.heads = config.heads;
    job.finished = z_rows + i * config.heads * config.latent;
  }
  attend(state, layer, jobs);
}

// After exchange point kPartials: the partials of this rank's head slice, by residue class, down the upper
// tree.
void AttentionPhase::Work::merge_dcp() {
  const ModelConfig& config = state.config;
  const int64_t words = kernels::partial_words(config.latent);
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
        float* out = z_wide.data() + (span.first_wide + row) * own * config.latent;
        for (int64_t head = 0; head < own; ++head) {
          kernels::merge_partials(classes.data() + head * words, c, own * words, config.latent);
          kernels::finish_partial(classes.data() + head * words, config.latent, out + head * config.latent);
        }
      }
    });
    state.count(span.index, kv::CrossKind::kPartials,
                span.rows * (c - 1) * own * words * static_cast<int64_t>(sizeof(float)));
  }
}

// W_UV and o_proj of some heads of `rows` rows; node sums of the owned segments go where `place` says.
void AttentionPhase::Work::output(const LayerWeights& w, const float* z_rows, int64_t rows, kv::Range heads,
                                  kv::Range segments,
                                  const std::function<float*(size_t node, int64_t row)>& place) {
  const ModelConfig& config = state.config;
  if (rows == 0) return;
  const DType dtype = state.weights.dtype;
  const auto bytes = static_cast<int64_t>(dtype_bytes(dtype));
  const int64_t z_stride = heads.size() * config.latent, out_stride = heads.size() * config.value;
  const auto* zx =
      static_cast<const std::byte*>(value_operand.of(state.parallel, dtype, z_rows, rows * z_stride));
  scratch(heads_out, rows * out_stride);
  for (int64_t head = 0; head < heads.size(); ++head) {
    product(w.w_uv, zx + head * config.latent * bytes, z_stride, rows, heads_out.data() + head * config.value,
            out_stride, heads.begin + head, heads.begin + head + 1);
  }
  const auto* ox = static_cast<const std::byte*>(
      output_operand.of(state.parallel, dtype, heads_out.data(), rows * out_stride));
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
      add_to_residual(sums_rows + i * d, residual, d);
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
      state, presence, wide(), wide(), [](int64_t home) { return home; },
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
  work.project(layer);
  if (state.layout.passes_entries(indexer)) {
    work.publish_queries();
    TRY_VOID(state.exchange.pass(ExchangePoint::kEntries, point));
  }
  if (indexer == Indexer::kFull) {
    work.selection.choose(work.index_layer_of(layer), work.index_query_stored.data(),
                          work.index_weights.data());
  }
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
