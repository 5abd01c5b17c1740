#include "worker/model/feed_forward.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <vector>

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

// A SwiGLU over some of its columns for some rows: out = down(silu(gate x) · up x).
struct SwigluJob {
  const Mlp* mlp;
  kv::Range columns;
  const void* x;  // [rows][hidden], in the weights' dtype
  int64_t rows;
  float* out;  // [rows][hidden]
};

// An expert and the rows of the batch that chose it; their inputs lie together, and so do their outputs.
struct ChosenExpert {
  int64_t expert;
  kv::Range columns;
  size_t leaf;  // index into the owned segments
  std::vector<int64_t> rows;
  std::vector<float> factors;
  int64_t first;  // of its inputs and outputs
};

}  // namespace

struct FeedForwardPhase::Work {
  explicit Work(StepState& s) : state(s), segments(kv::owned_segments(s.rank, s.rank_count)) {}

  StepState& state;
  const kv::Range segments;
  Operand input_operand, inner_operand;
  std::vector<float> gate, up, router_logits, outputs;
  std::vector<std::byte> gathered;
  std::vector<int32_t> chosen;
  std::vector<float> chosen_weights;
  std::vector<Gemm> products;

  int segment(size_t leaf) const { return static_cast<int>(segments.begin + static_cast<int64_t>(leaf)); }
  int64_t row_bytes() const {
    return state.config.hidden * static_cast<int64_t>(dtype_bytes(state.weights.dtype));
  }
  const std::byte* rows_at(const void* x, int64_t row) const {
    return static_cast<const std::byte*>(x) + row * row_bytes();
  }

  void swiglu(std::span<const SwigluJob> jobs);
  void route(const LayerWeights& w, int64_t rows);
  void dense_leaves(const LayerWeights& w, const std::byte* x, int64_t rows, std::span<float* const> sums);
  void expert_leaves(const LayerWeights& w, const std::byte* x, int64_t row_begin, int64_t row_count,
                     std::span<float* const> sums);
  std::vector<ChosenExpert> chosen_experts(int64_t row_begin, int64_t row_count,
                                           std::span<float* const> sums) const;
  void gather(std::span<const ChosenExpert> experts, const std::byte* x);
  void add_residual(const SegmentPresence& presence, const float* bias);
};

// All at once, so that a step with few rows keeps every thread busy.
void FeedForwardPhase::Work::swiglu(std::span<const SwigluJob> jobs) {
  const int64_t d = state.config.hidden;
  std::vector<int64_t> first(jobs.size() + 1, 0);  // of each job in gate and up
  for (size_t i = 0; i < jobs.size(); ++i) first[i + 1] = first[i] + jobs[i].rows * jobs[i].columns.size();
  scratch(gate, first.back());
  scratch(up, first.back());
  products.clear();
  for (size_t i = 0; i < jobs.size(); ++i) {
    const SwigluJob& job = jobs[i];
    products.push_back(columns(job.mlp->gate, job.columns, job.x, d, job.rows, gate.data() + first[i]));
    products.push_back(columns(job.mlp->up, job.columns, job.x, d, job.rows, up.data() + first[i]));
  }
  kernels::gemm(products, state.parallel);

  constexpr int64_t kRows = 16;
  std::vector<int64_t> tasks(jobs.size() + 1, 0);  // before each job
  for (size_t i = 0; i < jobs.size(); ++i) tasks[i + 1] = tasks[i] + (jobs[i].rows + kRows - 1) / kRows;
  state.parallel.run(tasks.back(), [&](int64_t task, int) {
    const auto i =
        static_cast<size_t>(std::upper_bound(tasks.begin(), tasks.end(), task) - tasks.begin()) - 1;
    const SwigluJob& job = jobs[i];
    const int64_t width = job.columns.size(), row = (task - tasks[i]) * kRows;
    const int64_t count = std::min(kRows, job.rows - row);
    float* g = gate.data() + first[i] + row * width;
    float* u = up.data() + first[i] + row * width;
    for (int64_t r = 0; r < count && job.mlp->gate_bias != nullptr; ++r) {
      kernels::add(g + r * width, job.mlp->gate_bias + job.columns.begin, width);
      kernels::add(u + r * width, job.mlp->up_bias + job.columns.begin, width);
    }
    kernels::swiglu(g, width, u, width, count, width, g, width);
  });

  const auto* inner = static_cast<const std::byte*>(
      inner_operand.of(state.parallel, state.weights.dtype, gate.data(), first.back()));
  products.clear();
  for (size_t i = 0; i < jobs.size(); ++i) {
    Gemm down;
    down.weights = jobs[i].mlp->down;
    down.k_begin = jobs[i].columns.begin;
    down.k_end = jobs[i].columns.end;
    down.rows = jobs[i].rows;
    down.x = inner + first[i] * static_cast<int64_t>(dtype_bytes(state.weights.dtype));
    down.x_stride = jobs[i].columns.size();
    down.y = jobs[i].out;
    down.y_stride = d;
    products.push_back(down);
  }
  kernels::gemm(products, state.parallel);
}

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

void FeedForwardPhase::Work::dense_leaves(const LayerWeights& w, const std::byte* x, int64_t rows,
                                          std::span<float* const> sums) {
  std::vector<SwigluJob> jobs;
  for (size_t leaf = 0; leaf < sums.size(); ++leaf) {
    if (sums[leaf] == nullptr) continue;
    const kv::Range columns = kv::segment_columns(segment(leaf), state.config.dense_width);
    jobs.push_back({&w.dense, columns, x, rows, sums[leaf]});
  }
  swiglu(jobs);
}

// By leaf, in each experts ascending.
std::vector<ChosenExpert> FeedForwardPhase::Work::chosen_experts(int64_t row_begin, int64_t row_count,
                                                                 std::span<float* const> sums) const {
  const int64_t k = state.config.experts_per_token;
  std::vector<ChosenExpert> out;
  int64_t first = 0;
  for (size_t leaf = 0; leaf < sums.size(); ++leaf) {
    const ExpertSlice slice = expert_slice(state.config, segment(leaf));
    if (sums[leaf] == nullptr || slice.empty()) continue;
    for (int64_t expert = slice.experts.begin; expert < slice.experts.end; ++expert) {
      ChosenExpert one{.expert = expert,
                       .columns = slice.columns,
                       .leaf = leaf,
                       .rows = {},
                       .factors = {},
                       .first = first};
      for (int64_t row = 0; row < row_count; ++row) {
        const int32_t* ids = chosen.data() + (row_begin + row) * k;
        const int32_t* found = std::lower_bound(ids, ids + k, static_cast<int32_t>(expert));
        if (found == ids + k || *found != expert) continue;
        one.rows.push_back(row);
        one.factors.push_back(chosen_weights[static_cast<size_t>((row_begin + row) * k + (found - ids))]);
      }
      if (one.rows.empty()) continue;
      first += std::ssize(one.rows);
      out.push_back(std::move(one));
    }
  }
  return out;
}

void FeedForwardPhase::Work::gather(std::span<const ChosenExpert> experts, const std::byte* x) {
  const int64_t bytes = row_bytes();
  const int64_t count = experts.empty() ? 0 : experts.back().first + std::ssize(experts.back().rows);
  scratch(gathered, count * bytes);
  state.parallel.run(std::ssize(experts), [&](int64_t task, int) {
    const ChosenExpert& expert = experts[static_cast<size_t>(task)];
    std::byte* to = gathered.data() + expert.first * bytes;
    for (const int64_t row : expert.rows) {
      std::memcpy(to, x + row * bytes, static_cast<size_t>(bytes));
      to += bytes;
    }
  });
}

// The leaves of the mixture: its experts ascending, each weighted output by fused multiply-add, then the
// segment of the shared expert.
void FeedForwardPhase::Work::expert_leaves(const LayerWeights& w, const std::byte* x, int64_t row_begin,
                                           int64_t row_count, std::span<float* const> sums) {
  const int64_t d = state.config.hidden;
  const std::vector<ChosenExpert> experts = chosen_experts(row_begin, row_count, sums);
  gather(experts, x);
  std::vector<SwigluJob> jobs;
  int64_t rows = 0;
  const auto add_job = [&](const Mlp& mlp, kv::Range columns, const std::byte* in, int64_t count) {
    jobs.push_back({&mlp, columns, in, count, nullptr});
    rows += count;
  };
  for (const ChosenExpert& expert : experts) {
    add_job(w.experts[static_cast<size_t>(expert.expert)], expert.columns,
            gathered.data() + expert.first * row_bytes(), std::ssize(expert.rows));
  }
  std::array<int64_t, kv::kShards> shared_first = {};
  for (size_t leaf = 0; leaf < sums.size(); ++leaf) {
    const kv::Range columns = kv::segment_columns(segment(leaf), state.config.shared_width);
    shared_first[leaf] = columns.empty() || sums[leaf] == nullptr ? -1 : rows;
    if (shared_first[leaf] >= 0) add_job(w.shared, columns, x, row_count);
  }
  scratch(outputs, rows * d);
  float* out = outputs.data();
  for (SwigluJob& job : jobs) {
    job.out = out;
    out += job.rows * d;
  }
  swiglu(jobs);

  state.parallel.run(std::ssize(sums), [&](int64_t task, int) {
    const auto leaf = static_cast<size_t>(task);
    if (sums[leaf] == nullptr) return;
    std::fill(sums[leaf], sums[leaf] + row_count * d, 0.0f);
    for (const ChosenExpert& expert : experts) {
      if (expert.leaf != leaf) continue;
      const float* y = outputs.data() + expert.first * d;
      for (size_t i = 0; i < expert.rows.size(); ++i) {
        kernels::axpy(expert.factors[i], y + static_cast<int64_t>(i) * d, sums[leaf] + expert.rows[i] * d, d);
      }
    }
    if (shared_first[leaf] >= 0)
      kernels::add(sums[leaf], outputs.data() + shared_first[leaf] * d, row_count * d);
  });
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
      [&](int64_t row_begin, int64_t row_count, std::span<float* const> sums) {
        const std::byte* batch = work.rows_at(x, row_begin);
        dense ? work.dense_leaves(w, batch, row_count, sums)
              : work.expert_leaves(w, batch, row_begin, row_count, sums);
      },
      [&](size_t node, int64_t row) { return outbox + (static_cast<int64_t>(node) * rows + row) * d; });
  if (state.layout.passes_sums()) {
    TRY_VOID(state.exchange.pass(ExchangePoint::kFeedForwardSums, static_cast<int>(layer)));
  }
  work.add_residual(presence, dense ? w.dense.down_bias : nullptr);
  return {};
}

}  // namespace weft::worker
