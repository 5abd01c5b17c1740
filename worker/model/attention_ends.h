// The two ends of attention that depend on its kind: from the residual to queries and cached entries, and
// from the merged values of the heads to the left side of o_proj. What lies between (attention.cc) knows
// widths only.
//
// Queries lie as [row][heads][key width] in the dtype that the cache is computed with: of wide rows the heads
// of this rank (or of its c-group, where queries are replicated), of whole rows all heads. Rows that other
// groups attend to are left out. Belongs to the thread that runs the step; scratch grows and is kept.
#pragma once

#include <functional>
#include <memory>

#include "worker/model/selection.h"
#include "worker/model/step_state.h"

namespace weft::worker {

class AttentionEnds {
 public:
  explicit AttentionEnds(StepState& s) : state(s) {}
  virtual ~AttentionEnds() = default;

  // Queries and entries (MLA: also index keys and candidates) of the home rows; entries go into pages.
  virtual void project(int64_t layer) = 0;
  // After exchange point kEntries: what the rows attend to.
  virtual void choose(int64_t layer) = 0;
  // z [rows][heads][value width] → [rows][heads][ModelConfig::value], in the weights' dtype; valid until the
  // next call.
  virtual const void* head_outputs(const LayerWeights& w, const float* z, int64_t rows, kv::Range heads) = 0;

  // Of a wide span: which heads, and its first row.
  kv::Range query_heads(const SpanRoute& span) const;
  const std::byte* wide_query(const SpanRoute& span) const {
    return wide_query_.data() + wide_offset_[static_cast<size_t>(span.index)];
  }
  // Of whole rows that do not expand; of those that do, MLA's queries as projected, [row][head][nope + rope].
  const std::byte* whole_query() const { return whole_query_.data(); }
  const std::byte* plain_query() const { return plain_query_.data(); }

 protected:
  int64_t wide() const { return state.layout.wide_count(); }
  int64_t whole() const { return state.layout.whole_count(state.rank); }
  kv::Range all_heads() const { return {0, state.config.heads}; }
  const float* cosine(int64_t home) const { return state.cosine.data() + home * (state.config.rope / 2); }
  const float* sine(int64_t home) const { return state.sine.data() + home * (state.config.rope / 2); }

  // The normed residual of the attended home rows, in `normed_` and in the weights' dtype, by home row.
  const std::byte* norm_residual(const LayerWeights& w);
  // Calls make(home rows, heads, room for their queries) for all attended rows; rows with the same heads go
  // together.
  void for_queries(const std::function<void(kv::Range home, kv::Range heads, std::byte* out)>& make);
  // The same for the rows that expand, [row][all heads][width] in the cache's dtype.
  void for_plain_queries(int64_t width, const std::function<void(kv::Range home, std::byte* out)>& make);
  // A product over some groups of the weights; x in the weights' dtype. Products that are added run together,
  // in run_products().
  void add_product(const kernels::PackedMatrix& weights, const void* x, int64_t x_stride, int64_t rows,
                   float* y, int64_t y_stride, kv::Range groups = {0, -1});
  void run_products();
  void product(const kernels::PackedMatrix& weights, const void* x, int64_t x_stride, int64_t rows, float* y,
               int64_t y_stride, kv::Range groups = {0, -1}) {
    add_product(weights, x, x_stride, rows, y, y_stride, groups);
    run_products();
  }

  StepState& state;
  std::vector<float> normed_;  // [home rows][hidden]

 private:
  std::vector<kernels::Gemm> products_;
  Operand normed_operand_;
  std::vector<std::byte> wide_query_, whole_query_, plain_query_;
  std::vector<int64_t> wide_offset_;  // bytes, by span
};

std::unique_ptr<AttentionEnds> make_mla(StepState& state, Selection& selection);
std::unique_ptr<AttentionEnds> make_grouped(StepState& state);
std::unique_ptr<AttentionEnds> make_hash(StepState& state, Selection& selection);

}  // namespace weft::worker
