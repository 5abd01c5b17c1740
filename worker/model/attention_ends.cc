#include "worker/model/attention_ends.h"

#include "kernels/elementwise.h"

namespace weft::worker {

const std::byte* AttentionEnds::norm_residual(const LayerWeights& w) {
  const int64_t n = state.home_count(), d = state.config.hidden;
  scratch(normed_, n * d);
  for (const kv::Range& rows : state.attended()) {
    for_rows(state.parallel, rows.size(), 16, [&](int64_t begin, int64_t end) {
      const int64_t at = (rows.begin + begin) * d;
      kernels::rms_norm(state.x.data() + at, d, w.input_norm, state.config.rms_eps, end - begin, d,
                        normed_.data() + at, d);
    });
  }
  return static_cast<const std::byte*>(
      normed_operand_.of(state.parallel, state.weights.dtype, normed_.data(), n * d));
}

kv::Range AttentionEnds::query_heads(const SpanRoute& span) const {
  return span.dcp() && span.replicate_query ? kv::group_heads(span.grouping, state.rank, state.config.heads)
                                            : kv::rank_heads(span.grouping, state.rank, state.config.heads);
}

void AttentionEnds::for_queries(
    const std::function<void(kv::Range home, kv::Range heads, std::byte* out)>& make) {
  const auto head_bytes =
      state.config.key_width() * static_cast<int64_t>(dtype_bytes(state.setup.cache.query_dtype()));
  struct Run {
    kv::Range home, heads;
    int64_t offset;
  };
  std::vector<Run> runs;
  wide_offset_.assign(state.layout.spans().size(), 0);
  int64_t bytes = 0;
  for (const int index : state.layout.wide_spans()) {
    const SpanRoute& span = state.layout.spans()[static_cast<size_t>(index)];
    wide_offset_[static_cast<size_t>(index)] = bytes;
    const kv::Range heads = query_heads(span);
    if (heads.empty()) continue;
    if (!runs.empty() && runs.back().heads == heads && runs.back().home.end == span.first_wide) {
      runs.back().home.end += span.rows;
    } else {
      runs.push_back({{span.first_wide, span.first_wide + span.rows}, heads, bytes});
    }
    bytes += span.rows * heads.size() * head_bytes;
  }
  scratch(wide_query_, bytes);
  for (const Run& run : runs) make(run.home, run.heads, wide_query_.data() + run.offset);
  const int64_t row_bytes = state.config.heads * head_bytes;
  scratch(whole_query_, whole() * row_bytes);
  for (const StepState::WholeRun& run : state.whole_runs()) {
    if (!run.expands)
      make(run.home, all_heads(), whole_query_.data() + (run.home.begin - wide()) * row_bytes);
  }
}

void AttentionEnds::for_plain_queries(int64_t width,
                                      const std::function<void(kv::Range home, std::byte* out)>& make) {
  const int64_t row_bytes =
      state.config.heads * width * static_cast<int64_t>(dtype_bytes(state.setup.cache.query_dtype()));
  for (const StepState::WholeRun& run : state.whole_runs()) {
    if (!run.expands) continue;
    scratch(plain_query_, whole() * row_bytes);
    make(run.home, plain_query_.data() + (run.home.begin - wide()) * row_bytes);
  }
}

void AttentionEnds::add_product(const kernels::PackedMatrix& weights, const void* x, int64_t x_stride,
                                int64_t rows, float* y, int64_t y_stride, kv::Range groups) {
  kernels::Gemm p;
  p.weights = weights;
  p.group_begin = groups.begin;
  p.group_end = groups.end < 0 ? weights.groups : groups.end;
  p.rows = rows;
  p.x = x;
  p.x_stride = x_stride;
  p.y = y;
  p.y_stride = y_stride;
  products_.push_back(p);
}

void AttentionEnds::run_products() {
  kernels::gemm(products_, state.parallel);
  products_.clear();
}

}  // namespace weft::worker
