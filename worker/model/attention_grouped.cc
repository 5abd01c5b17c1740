// Grouped queries: K ‖ V of each KV head is an entry part of its own; queries and keys may be normed head by
// head before their first dimensions turn; o_proj reads the heads' values as they are.
#include <cstring>

#include "kernels/elementwise.h"
#include "worker/model/attention_ends.h"
#include "worker/model/cache_view.h"

namespace weft::worker {
namespace {

class Grouped : public AttentionEnds {
 public:
  explicit Grouped(StepState& s) : AttentionEnds(s) {}

  void project(int64_t layer) override;
  void choose(int64_t) override {}  // every row is dense
  const void* head_outputs(const LayerWeights&, const float* z, int64_t rows, kv::Range heads) override {
    return output_operand_.of(state.parallel, state.weights.dtype, z,
                              rows * heads.size() * state.config.value);
  }

 private:
  void add_queries(const LayerWeights& w, const std::byte* x, kv::Range home, kv::Range heads,
                   std::byte* out);
  void add_entries(const LayerWeights& w, int64_t layer, const std::byte* x, kv::Range home, kv::Range parts);
  void finish_heads(float* row, const float* bias, const float* norm, kv::Range heads, int64_t home) const;

  Operand output_operand_;
  std::vector<float> q_, k_, v_, entries_;
};

// Entries: of wide rows the parts that this rank stores, of whole rows all. Consecutive wide spans with the
// same parts go together.
void Grouped::project(int64_t layer) {
  const LayerWeights& w = state.weights.layers[static_cast<size_t>(layer)];
  const std::byte* x = norm_residual(w);
  for_queries([&](kv::Range home, kv::Range heads, std::byte* out) { add_queries(w, x, home, heads, out); });

  kv::Range home, parts;
  for (const int index : state.layout.wide_spans()) {
    const SpanRoute& span = state.layout.spans()[static_cast<size_t>(index)];
    if (state.parts_of(span) != parts) {
      add_entries(w, layer, x, home, parts);
      home.begin = home.end;
      parts = state.parts_of(span);
    }
    home.end += span.rows;
  }
  add_entries(w, layer, x, home, parts);
  add_entries(w, layer, x, {wide(), state.home_count()}, {0, state.config.kv_heads});
}

// One row's heads of queries or keys, in place: bias, norm, rope.
void Grouped::finish_heads(float* row, const float* bias, const float* norm, kv::Range heads,
                           int64_t home) const {
  const int64_t width = state.config.head_width;
  if (bias != nullptr) kernels::add(row, bias + heads.begin * width, heads.size() * width);
  if (norm != nullptr) {
    kernels::rms_norm(row, width, norm, state.config.rms_eps, heads.size(), width, row, width);
  }
  for (int64_t head = 0; head < heads.size(); ++head) {
    kernels::rope(row + head * width, state.config.rope, cosine(home), sine(home), state.config.rope_layout);
  }
}

void Grouped::add_queries(const LayerWeights& w, const std::byte* x, kv::Range home, kv::Range heads,
                          std::byte* out) {
  const int64_t rows = home.size();
  const int64_t d = state.config.hidden, stride = heads.size() * state.config.head_width;
  scratch(q_, rows * stride);
  product(w.q, x + home.begin * d * static_cast<int64_t>(dtype_bytes(state.weights.dtype)), d, rows,
          q_.data(), stride, heads);
  const DType dtype = state.setup.cache.query_dtype();
  for_rows(state.parallel, rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      finish_heads(q_.data() + i * stride, w.q_bias, w.q_norm, heads, home.begin + i);
    }
    kernels::convert(q_.data() + begin * stride, (end - begin) * stride, dtype,
                     out + begin * stride * static_cast<int64_t>(dtype_bytes(dtype)));
  });
}

void Grouped::add_entries(const LayerWeights& w, int64_t layer, const std::byte* x, kv::Range home,
                          kv::Range parts) {
  const int64_t rows = home.size();
  if (rows == 0 || parts.empty()) return;
  const int64_t d = state.config.hidden, width = state.config.head_width, stride = parts.size() * width;
  x += home.begin * d * static_cast<int64_t>(dtype_bytes(state.weights.dtype));
  scratch(k_, rows * stride);
  scratch(v_, rows * stride);
  scratch(entries_, 2 * rows * stride);
  add_product(w.k, x, d, rows, k_.data(), stride, parts);
  add_product(w.v, x, d, rows, v_.data(), stride, parts);
  run_products();
  for_rows(state.parallel, rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* key = k_.data() + i * stride;
      float* value = v_.data() + i * stride;
      finish_heads(key, w.k_bias, w.k_norm, parts, home.begin + i);
      if (w.v_bias != nullptr) kernels::add(value, w.v_bias + parts.begin * width, stride);
      for (int64_t at = 0; at < stride; at += width) {
        float* entry = entries_.data() + 2 * (i * stride + at);
        std::memcpy(entry, key + at, static_cast<size_t>(width) * sizeof(float));
        std::memcpy(entry + width, value + at, static_cast<size_t>(width) * sizeof(float));
      }
    }
  });
  for (int64_t part = parts.begin; part < parts.end; ++part) {
    store_entries(state, layer,
                  {.part = static_cast<int>(part),
                   .home_begin = home.begin,
                   .count = rows,
                   .entries = entries_.data() + 2 * (part - parts.begin) * width,
                   .stride = 2 * stride});
  }
}

}  // namespace

std::unique_ptr<AttentionEnds> make_grouped(StepState& state) { return std::make_unique<Grouped>(state); }

}  // namespace weft::worker
