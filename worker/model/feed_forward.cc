#include "worker/model/feed_forward.h"

#include <algorithm>
#include <cstring>

#include "kernels/elementwise.h"
#include "kernels/router.h"
#include "worker/model/residual.h"
#include "worker/model/tree_sum.h"

namespace weft::worker {

using kernels::Gemm;
using kernels::PackedMatrix;

namespace {

// Column ranges of a SwiGLU's intermediate width.
Gemm columns(const PackedMatrix& weights, kv::Range range, const void* x, int64_t x_stride, int64_t rows,
             float* y) {
  Gemm p;
  p.weights = weights;
  p.output_begin = range.begin;
  p.output_end = range.end;
  p.rows = rows;
  p.x = x;
  p.x_stride = x_stride;
  p.y = y;
  p.y_stride = range.size();
  return p;
}

}  // namespace

struct FeedForwardPhase::Work {
  explicit Work(StepState& s) : state(s), segments(kv::owned_segments(s.rank, s.rank_count)) {}

  StepState& state;
  const kv::Range segments;
  Operand input_operand, inner_operand, gathered_operand;
  std::vector<float> gate, up, router_logits, gathered, expert_out;
  std::vector<int32_t> chosen;
  std::vector<float> chosen_weights;

  // rows × SwiGLU columns `range` → out[rows][hidden] = down over those columns.
  void swiglu_columns(const Mlp& mlp, kv::Range range, const void* x, int64_t rows, float* out) {
    const int64_t d = state.config.hidden;
    float* g = scratch(gate, rows * range.size());
    float* u = scratch(up, rows * range.size());
    kernels::gemm(columns(mlp.gate, range, x, d, rows, g), state.parallel);
    kernels::gemm(columns(mlp.up, range, x, d, rows, u), state.parallel);
    for_rows(state.parallel, rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end && mlp.gate_bias != nullptr; ++row) {
        kernels::add(g + row * range.size(), mlp.gate_bias + range.begin, range.size());
        kernels::add(u + row * range.size(), mlp.up_bias + range.begin, range.size());
      }
      kernels::swiglu(g + begin * range.size(), range.size(), u + begin * range.size(), range.size(),
                      end - begin, range.size(), g + begin * range.size(), range.size());
    });
    Gemm down;
    down.weights = mlp.down;
    down.k_begin = range.begin;
    down.k_end = range.end;
    down.rows = rows;
    down.x = inner_operand.of(state.parallel, state.weights.dtype, g, rows * range.size());
    down.x_stride = range.size();
    down.y = out;
    down.y_stride = d;
    kernels::gemm(down, state.parallel);
  }

  const void* rows_at(const void* x, int64_t row) const {
    return static_cast<const std::byte*>(x) +
           row * state.config.hidden * static_cast<int64_t>(dtype_bytes(state.weights.dtype));
  }

  void route(const LayerWeights& w, int64_t rows);
  void expert_leaf(const LayerWeights& w, int segment, const void* x, int64_t row_begin, int64_t row_count,
                   float* out);
  void add_residual(const SegmentPresence& presence, const float* bias);
};

// Chosen experts and weights of every row, by every rank alike.
void FeedForwardPhase::Work::route(const LayerWeights& w, int64_t rows) {
  const ModelConfig& config = state.config;
  const int64_t k = config.experts_per_token;
  scratch(router_logits, rows * config.experts);
  Gemm p;
  p.weights = w.router;
  p.rows = rows;
  p.x = state.normed.data();
  p.x_stride = config.hidden;
  p.y = router_logits.data();
  p.y_stride = config.experts;
  kernels::gemm(p, state.parallel);
  scratch(chosen, rows * k);
  scratch(chosen_weights, rows * k);
  kernels::Router router;
  router.score = config.expert_score;
  router.experts = config.experts;
  router.groups = config.expert_groups;
  router.top_groups = config.top_expert_groups;
  router.top_k = k;
  router.normalise = config.normalise_experts;
  router.scale = config.expert_scale;
  router.bias = w.router_bias;
  for_rows(state.parallel, rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      kernels::route(router, router_logits.data() + row * config.experts, chosen.data() + row * k,
                     chosen_weights.data() + row * k);
    }
  });
}

// Leaf `segment` of the mixture: its experts ascending, each weighted output by fused multiply-add, then the
// segment of the shared expert.
void FeedForwardPhase::Work::expert_leaf(const LayerWeights& w, int segment, const void* x, int64_t row_begin,
                                         int64_t row_count, float* out) {
  const ModelConfig& config = state.config;
  const int64_t d = config.hidden, k = config.experts_per_token;
  std::fill(out, out + row_count * d, 0.0f);
  const ExpertSlice slice = expert_slice(config, segment);
  std::vector<int64_t> rows;
  std::vector<float> factors;
  for (int64_t expert = slice.experts.begin; expert < slice.experts.end && !slice.empty(); ++expert) {
    rows.clear();
    factors.clear();
    for (int64_t row = 0; row < row_count; ++row) {
      const int32_t* ids = chosen.data() + (row_begin + row) * k;
      const int32_t* found = std::lower_bound(ids, ids + k, static_cast<int32_t>(expert));
      if (found == ids + k || *found != expert) continue;
      rows.push_back(row);
      factors.push_back(chosen_weights[static_cast<size_t>((row_begin + row) * k + (found - ids))]);
    }
    if (rows.empty()) continue;
    float* in = scratch(gathered, std::ssize(rows) * d);
    for (size_t i = 0; i < rows.size(); ++i) {
      std::memcpy(in + static_cast<int64_t>(i) * d, state.normed.data() + (row_begin + rows[i]) * d,
                  static_cast<size_t>(d) * sizeof(float));
    }
    const void* gathered_x =
        gathered_operand.of(state.parallel, state.weights.dtype, in, std::ssize(rows) * d);
    float* y = scratch(expert_out, std::ssize(rows) * d);
    swiglu_columns(w.experts[static_cast<size_t>(expert)], slice.columns, gathered_x, std::ssize(rows), y);
    for (size_t i = 0; i < rows.size(); ++i) {
      kernels::axpy(factors[i], y + static_cast<int64_t>(i) * d, out + rows[i] * d, d);
    }
  }
  const kv::Range shared = kv::segment_columns(segment, config.shared_width);
  if (shared.empty()) return;
  float* y = scratch(expert_out, row_count * d);
  swiglu_columns(w.shared, shared, rows_at(x, row_begin), row_count, y);
  kernels::add(out, y, row_count * d);
}

// After the exchange: x = (tree sum of all ranks' nodes + bias) + x, for the home rows.
void FeedForwardPhase::Work::add_residual(const SegmentPresence& presence, const float* bias) {
  const PublishedSums sums{
      {0, state.rank_count, 1}, state.layout.row_count(), [](int) { return int64_t{0}; }};
  add_sums(
      state, sums, presence, bias, {0, state.home_count()},
      [&](int64_t home) { return state.home()[static_cast<size_t>(home)].global; }, [](int64_t) {});
  const int64_t sum_bytes = remote_sum_bytes(state, sums.ranks, presence);
  for (const HomeRow& row : state.home()) state.count(row.span, kv::CrossKind::kRows, sum_bytes);
}

FeedForwardPhase::FeedForwardPhase(StepState& state) : work_(std::make_unique<Work>(state)) {}
FeedForwardPhase::~FeedForwardPhase() = default;

Result<void> FeedForwardPhase::run(int64_t layer) {
  Work& work = *work_;
  StepState& state = work.state;
  const ModelConfig& config = state.config;
  const LayerConfig& layer_config = config.layers[static_cast<size_t>(layer)];
  const LayerWeights& w = state.weights.layers[static_cast<size_t>(layer)];
  const int64_t rows = state.layout.row_count();
  const int64_t d = config.hidden;
  const void* x = work.input_operand.of(state.parallel, state.weights.dtype, state.normed.data(), rows * d);
  const bool dense = layer_config.feed_forward == FeedForward::kDense;
  if (!dense) work.route(w, rows);
  const SegmentPresence presence = feed_forward_segments(config, layer_config.feed_forward);
  float* outbox = state.outbox();
  sum_segments(
      work.segments, presence, rows, d, state.parallel,
      [&](int segment, int64_t row_begin, int64_t row_count, float* out) {
        if (dense) {
          work.swiglu_columns(w.dense, kv::segment_columns(segment, config.dense_width),
                              work.rows_at(x, row_begin), row_count, out);
        } else {
          work.expert_leaf(w, segment, x, row_begin, row_count, out);
        }
      },
      [&](size_t node, int64_t row) { return outbox + (static_cast<int64_t>(node) * rows + row) * d; });
  if (state.layout.passes_sums()) {
    TRY_VOID(state.exchange.pass(ExchangePoint::kFeedForwardSums, static_cast<int>(layer)));
  }
  work.add_residual(presence, dense ? w.dense.down_bias : nullptr);
  return {};
}

}  // namespace weft::worker
