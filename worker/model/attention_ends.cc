#include "worker/model/attention_ends.h"

#include "kernels/elementwise.h"

namespace weft::worker {

const void* AttentionEnds::norm_residual(const LayerWeights& w) {
  const int64_t n = state.home_count(), d = state.config.hidden;
  scratch(normed_, n * d);
  for_rows(state.parallel, n, 16, [&](int64_t begin, int64_t end) {
    kernels::rms_norm(state.x.data() + begin * d, d, w.input_norm, state.config.rms_eps, end - begin, d,
                      normed_.data() + begin * d, d);
  });
  return normed_operand_.of(state.parallel, state.weights.dtype, normed_.data(), n * d);
}

std::byte* AttentionEnds::wide_query_room() {
  const auto head_bytes =
      state.config.key_width() * static_cast<int64_t>(dtype_bytes(state.setup.cache_dtype));
  return scratch(wide_query_, wide() * state.own_heads().size() * head_bytes);
}

std::byte* AttentionEnds::whole_query_room() {
  const auto head_bytes =
      state.config.key_width() * static_cast<int64_t>(dtype_bytes(state.setup.cache_dtype));
  return scratch(whole_query_, whole() * state.config.heads * head_bytes);
}

void AttentionEnds::product(const kernels::PackedMatrix& weights, const void* x, int64_t x_stride,
                            int64_t rows, float* y, int64_t y_stride, kv::Range groups) {
  if (rows == 0) return;
  kernels::Gemm p;
  p.weights = weights;
  p.group_begin = groups.begin;
  p.group_end = groups.end < 0 ? weights.groups : groups.end;
  p.rows = rows;
  p.x = x;
  p.x_stride = x_stride;
  p.y = y;
  p.y_stride = y_stride;
  kernels::gemm(p, state.parallel);
}

}  // namespace weft::worker
