// Absorbed MLA: one latent entry c ‖ k_pe for all heads, queries q̃ = W_UKᵀ q_nope ‖ q_pe, heads' values W_UV
// z; and the projections of the indexer, which read the same rows.
#include <cmath>
#include <cstring>

#include "kernels/elementwise.h"
#include "worker/model/attention_ends.h"
#include "worker/model/cache_view.h"

namespace weft::worker {
namespace {

class Mla : public AttentionEnds {
 public:
  Mla(StepState& s, Selection& selection) : AttentionEnds(s), selection_(selection) {}

  void project(int64_t layer) override;
  void choose(int64_t layer) override;
  const void* head_outputs(const LayerWeights& w, const float* z, int64_t rows, kv::Range heads) override;

 private:
  const std::byte* project_latent(const LayerWeights& w, const std::byte* hidden);
  void project_entries(const LayerWeights& w, int64_t layer, const std::byte* hidden, kv::Range home);
  void index_projections(const LayerWeights& w, int64_t index_layer, const std::byte* hidden,
                         const std::byte* latent, kv::Range home);
  void finish_index_vector(float* vector, int64_t home) const;
  void offer(int64_t index_layer);
  void plain_queries(const LayerWeights& w, const std::byte* latent, kv::Range home, std::byte* out);
  void absorb(const LayerWeights& w, const std::byte* latent, kv::Range home, kv::Range heads,
              std::byte* out);
  int64_t weight_bytes() const { return static_cast<int64_t>(dtype_bytes(state.weights.dtype)); }
  bool owns_indexer(int64_t layer) const {
    return state.config.layers[static_cast<size_t>(layer)].indexer == Indexer::kFull;
  }
  int64_t index_layer_of(int64_t layer) const {
    int64_t count = 0;
    for (int64_t i = 0; i < layer; ++i) count += owns_indexer(i);
    return count;
  }

  Selection& selection_;
  Operand latent_operand_, nope_operand_, value_operand_, output_operand_;
  std::vector<float> q_latent_, kv_row_, index_key_, index_query_, index_weights_, q_, absorbed_, heads_out_;
};

// Queries, entries and index projections of the attended rows; entries and index keys go into pages.
void Mla::project(int64_t layer) {
  const LayerWeights& w = state.weights.layers[static_cast<size_t>(layer)];
  const std::byte* hidden = norm_residual(w);
  const std::byte* latent = project_latent(w, hidden);
  for (const kv::Range& rows : state.attended()) project_entries(w, layer, hidden, rows);
  if (owns_indexer(layer)) {
    for (const kv::Range& rows : state.attended())
      index_projections(w, index_layer_of(layer), hidden, latent, rows);
    offer(index_layer_of(layer));
  }
  for_queries([&](kv::Range home, kv::Range heads, std::byte* out) { absorb(w, latent, home, heads, out); });
  for_plain_queries(state.config.nope + state.config.rope,
                    [&](kv::Range home, std::byte* out) { plain_queries(w, latent, home, out); });
}

// What queries are projected from, by home row: the normed query latent, or the normed residual itself.
const std::byte* Mla::project_latent(const LayerWeights& w, const std::byte* hidden) {
  const ModelConfig& config = state.config;
  const int64_t r = config.q_lora_rank, n = state.home_count();
  if (r == 0) return hidden;
  scratch(q_latent_, n * r);
  for (const kv::Range& rows : state.attended()) {
    product(w.q_a, hidden + rows.begin * config.hidden * weight_bytes(), config.hidden, rows.size(),
            q_latent_.data() + rows.begin * r, r);
    for_rows(state.parallel, rows.size(), 16, [&](int64_t begin, int64_t end) {
      float* first = q_latent_.data() + (rows.begin + begin) * r;
      kernels::rms_norm(first, r, w.q_a_norm, config.latent_eps, end - begin, r, first, r);
    });
  }
  return static_cast<const std::byte*>(
      latent_operand_.of(state.parallel, state.weights.dtype, q_latent_.data(), n * r));
}

void Mla::project_entries(const LayerWeights& w, int64_t layer, const std::byte* hidden, kv::Range home) {
  const ModelConfig& config = state.config;
  const int64_t n = home.size(), d = config.hidden, width = config.entry_width();
  scratch(kv_row_, n * width);
  product(w.kv_a, hidden + home.begin * d * weight_bytes(), d, n, kv_row_.data(), width);
  for_rows(state.parallel, n, 16, [&](int64_t begin, int64_t end) {
    kernels::rms_norm(kv_row_.data() + begin * width, width, w.kv_a_norm, config.latent_eps, end - begin,
                      config.latent, kv_row_.data() + begin * width, width);
    for (int64_t i = begin; i < end; ++i) {
      kernels::rope(kv_row_.data() + i * width + config.latent, config.rope, cosine(home.begin + i),
                    sine(home.begin + i), config.rope_layout);
    }
  });
  store_entries(state, layer, {0, home.begin, n, kv_row_.data(), width});
}

void Mla::index_projections(const LayerWeights& w, int64_t index_layer, const std::byte* hidden,
                            const std::byte* latent, kv::Range home) {
  const ModelConfig& config = state.config;
  const int64_t n = state.home_count(), rows = home.size();
  const int64_t heads = config.index_heads, width = config.index_width;
  float* key = scratch(index_key_, n * width) + home.begin * width;
  float* query = scratch(index_query_, n * heads * width) + home.begin * heads * width;
  float* weight = scratch(index_weights_, n * heads) + home.begin * heads;
  add_product(w.index_k, hidden + home.begin * config.hidden * weight_bytes(), config.hidden, rows, key,
              width);
  add_product(w.index_q, latent + home.begin * config.q_lora_rank * weight_bytes(), config.q_lora_rank, rows,
              query, heads * width);
  add_product(w.index_weights, normed_.data() + home.begin * config.hidden, config.hidden, rows, weight,
              heads);
  run_products();
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(heads * width)));
  constexpr float kIndexEps = 1e-6f;
  for_rows(state.parallel, rows, 16, [&](int64_t begin, int64_t end) {
    kernels::layer_norm(key + begin * width, width, w.index_k_norm, w.index_k_norm_bias, kIndexEps,
                        end - begin, width, key + begin * width, width);
    kernels::scale(weight + begin * heads, factor, (end - begin) * heads);
    for (int64_t i = begin; i < end; ++i) {
      finish_index_vector(key + i * width, home.begin + i);
      for (int64_t head = 0; head < heads; ++head) {
        finish_index_vector(query + (i * heads + head) * width, home.begin + i);
      }
    }
  });
  store_index_keys(state, index_layer, home, index_key_.data());
}

void Mla::offer(int64_t index_layer) {
  // Of rows that others attend to there is nothing in these two.
  scratch(index_query_, state.home_count() * state.config.index_heads * state.config.index_width);
  scratch(index_weights_, state.home_count() * state.config.index_heads);
  selection_.offer(index_layer, index_query_.data(), index_weights_.data());
}

// The last steps of an index query or key of a home row, in place.
void Mla::finish_index_vector(float* vector, int64_t home) const {
  const ModelConfig& config = state.config;
  kernels::rope(vector, config.rope, cosine(home), sine(home), config.index_rope_layout);
  if (state.setup.cache.index_hadamard) kernels::hadamard(vector, config.index_width);
}

// q_nope ‖ rope(q_pe) for all heads, in the dtype of queries.
void Mla::plain_queries(const LayerWeights& w, const std::byte* latent, kv::Range home, std::byte* out) {
  const ModelConfig& config = state.config;
  const int64_t head_width = config.nope + config.rope, stride = config.heads * head_width;
  const int64_t latent_width = config.q_lora_rank > 0 ? config.q_lora_rank : config.hidden;
  const DType dtype = state.setup.cache.query_dtype();
  scratch(q_, home.size() * stride);
  product(w.q_b, latent + home.begin * latent_width * weight_bytes(), latent_width, home.size(), q_.data(),
          stride, all_heads());
  for_rows(state.parallel, home.size(), 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t head = 0; head < config.heads; ++head) {
        kernels::rope(q_.data() + i * stride + head * head_width + config.nope, config.rope,
                      cosine(home.begin + i), sine(home.begin + i), config.rope_layout);
      }
    }
    kernels::convert(q_.data() + begin * stride, (end - begin) * stride, dtype,
                     out + begin * stride * static_cast<int64_t>(dtype_bytes(dtype)));
  });
}

// q̃ = W_UKᵀ q_nope ‖ rope(q_pe) for some heads of consecutive home rows, in cache dtype.
void Mla::absorb(const LayerWeights& w, const std::byte* latent, kv::Range home, kv::Range heads,
                 std::byte* out) {
  const ModelConfig& config = state.config;
  const int64_t rows = home.size();
  const DType dtype = state.weights.dtype;
  const int64_t bytes = weight_bytes();
  const int64_t latent_width = config.q_lora_rank > 0 ? config.q_lora_rank : config.hidden;
  const int64_t head_width = config.nope + config.rope, width = config.entry_width();
  const int64_t q_stride = heads.size() * head_width, out_stride = heads.size() * width;
  scratch(q_, rows * q_stride);
  product(w.q_b, latent + home.begin * latent_width * bytes, latent_width, rows, q_.data(), q_stride, heads);
  const auto* nope =
      static_cast<const std::byte*>(nope_operand_.of(state.parallel, dtype, q_.data(), rows * q_stride));
  scratch(absorbed_, rows * out_stride);
  for (int64_t head = 0; head < heads.size(); ++head) {
    add_product(w.w_uk, nope + head * head_width * bytes, q_stride, rows, absorbed_.data() + head * width,
                out_stride, {heads.begin + head, heads.begin + head + 1});
  }
  run_products();
  for_rows(state.parallel, rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t head = 0; head < heads.size(); ++head) {
        float* target = absorbed_.data() + i * out_stride + head * width + config.latent;
        std::memcpy(target, q_.data() + i * q_stride + head * head_width + config.nope,
                    static_cast<size_t>(config.rope) * sizeof(float));
        kernels::rope(target, config.rope, cosine(home.begin + i), sine(home.begin + i), config.rope_layout);
      }
    }
    const DType query_dtype = state.setup.cache.query_dtype();
    kernels::convert(absorbed_.data() + begin * out_stride, (end - begin) * out_stride, query_dtype,
                     out + begin * out_stride * static_cast<int64_t>(dtype_bytes(query_dtype)));
  });
}

void Mla::choose(int64_t layer) {
  if (!owns_indexer(layer)) return;
  selection_.choose(index_layer_of(layer));
}

// W_UV, head by head.
const void* Mla::head_outputs(const LayerWeights& w, const float* z, int64_t rows, kv::Range heads) {
  const ModelConfig& config = state.config;
  const DType dtype = state.weights.dtype;
  const auto bytes = static_cast<int64_t>(dtype_bytes(dtype));
  const int64_t z_stride = heads.size() * config.latent, out_stride = heads.size() * config.value;
  const auto* zx =
      static_cast<const std::byte*>(value_operand_.of(state.parallel, dtype, z, rows * z_stride));
  scratch(heads_out_, rows * out_stride);
  for (int64_t head = 0; head < heads.size(); ++head) {
    add_product(w.w_uv, zx + head * config.latent * bytes, z_stride, rows,
                heads_out_.data() + head * config.value, out_stride,
                {heads.begin + head, heads.begin + head + 1});
  }
  run_products();
  return output_operand_.of(state.parallel, dtype, heads_out_.data(), rows * out_stride);
}

}  // namespace

std::unique_ptr<AttentionEnds> make_mla(StepState& state, Selection& selection) {
  return std::make_unique<Mla>(state, selection);
}

}  // namespace weft::worker
