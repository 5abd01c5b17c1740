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
  void index_projections(const LayerWeights& w, int64_t index_layer, const void* hidden, const void* latent);
  void absorb(const LayerWeights& w, const void* q_in, int64_t q_in_stride, int64_t home_begin, int64_t rows,
              kv::Range heads, std::byte* out);
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
  std::vector<std::byte> index_query_stored_;
};

// Queries, entries and index projections of the home rows; entries and index keys go into pages.
void Mla::project(int64_t layer) {
  const ModelConfig& config = state.config;
  const LayerWeights& w = state.weights.layers[static_cast<size_t>(layer)];
  const int64_t n = state.home_count();
  const int64_t d = config.hidden;
  const void* hx = norm_residual(w);

  const void* q_in = hx;
  int64_t q_in_stride = d;
  if (config.q_lora_rank > 0) {
    const int64_t r = config.q_lora_rank;
    scratch(q_latent_, n * r);
    product(w.q_a, hx, d, n, q_latent_.data(), r);
    for_rows(state.parallel, n, 16, [&](int64_t begin, int64_t end) {
      float* rows = q_latent_.data() + begin * r;
      kernels::rms_norm(rows, r, w.q_a_norm, config.latent_eps, end - begin, r, rows, r);
    });
    q_in = latent_operand_.of(state.parallel, state.weights.dtype, q_latent_.data(), n * r);
    q_in_stride = r;
  }

  const int64_t width = config.entry_width();
  scratch(kv_row_, n * width);
  product(w.kv_a, hx, d, n, kv_row_.data(), width);
  for_rows(state.parallel, n, 16, [&](int64_t begin, int64_t end) {
    kernels::rms_norm(kv_row_.data() + begin * width, width, w.kv_a_norm, config.latent_eps, end - begin,
                      config.latent, kv_row_.data() + begin * width, width);
    for (int64_t i = begin; i < end; ++i) {
      kernels::rope(kv_row_.data() + i * width + config.latent, config.rope, cosine(i), sine(i),
                    config.rope_layout);
    }
  });
  store_entries(state, layer, {0, 0, n, kv_row_.data(), width});

  if (owns_indexer(layer)) index_projections(w, index_layer_of(layer), hx, q_in);

  absorb(w, q_in, q_in_stride, 0, wide(), state.own_heads(), wide_query_room());
  absorb(w, q_in, q_in_stride, wide(), whole(), all_heads(), whole_query_room());
}

void Mla::index_projections(const LayerWeights& w, int64_t index_layer, const void* hidden,
                            const void* latent) {
  const ModelConfig& config = state.config;
  const int64_t n = state.home_count();
  const int64_t heads = config.index_heads, width = config.index_width;
  scratch(index_key_, n * width);
  product(w.index_k, hidden, config.hidden, n, index_key_.data(), width);
  scratch(index_query_, n * heads * width);
  product(w.index_q, latent, config.q_lora_rank, n, index_query_.data(), heads * width);
  scratch(index_weights_, n * heads);
  product(w.index_weights, normed_.data(), config.hidden, n, index_weights_.data(), heads);
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(heads * width)));
  constexpr float kIndexEps = 1e-6f;
  for_rows(state.parallel, n, 16, [&](int64_t begin, int64_t end) {
    float* keys = index_key_.data() + begin * width;
    kernels::layer_norm(keys, width, w.index_k_norm, w.index_k_norm_bias, kIndexEps, end - begin, width, keys,
                        width);
    kernels::scale(index_weights_.data() + begin * heads, factor, (end - begin) * heads);
    for (int64_t i = begin; i < end; ++i) {
      kernels::rope(index_key_.data() + i * width, config.rope, cosine(i), sine(i), config.index_rope_layout);
      for (int64_t head = 0; head < heads; ++head) {
        kernels::rope(index_query_.data() + (i * heads + head) * width, config.rope, cosine(i), sine(i),
                      config.index_rope_layout);
      }
    }
  });
  store_index_keys(state, index_layer, index_key_.data());
  const DType dtype = state.setup.cache_dtype;
  std::byte* stored =
      scratch(index_query_stored_, n * heads * width * static_cast<int64_t>(dtype_bytes(dtype)));
  kernels::convert(index_query_.data(), n * heads * width, dtype, stored);
  selection_.offer(index_layer, stored, index_weights_.data());
}

// q̃ = W_UKᵀ q_nope ‖ rope(q_pe) for some heads of consecutive home rows, in cache dtype.
void Mla::absorb(const LayerWeights& w, const void* q_in, int64_t q_in_stride, int64_t home_begin,
                 int64_t rows, kv::Range heads, std::byte* out) {
  const ModelConfig& config = state.config;
  if (rows == 0 || heads.empty()) return;
  const DType dtype = state.weights.dtype;
  const auto bytes = static_cast<int64_t>(dtype_bytes(dtype));
  const int64_t head_width = config.nope + config.rope, width = config.entry_width();
  const int64_t q_stride = heads.size() * head_width, out_stride = heads.size() * width;
  scratch(q_, rows * q_stride);
  product(w.q_b, static_cast<const std::byte*>(q_in) + home_begin * q_in_stride * bytes, q_in_stride, rows,
          q_.data(), q_stride, heads);
  const auto* nope =
      static_cast<const std::byte*>(nope_operand_.of(state.parallel, dtype, q_.data(), rows * q_stride));
  scratch(absorbed_, rows * out_stride);
  for (int64_t head = 0; head < heads.size(); ++head) {
    product(w.w_uk, nope + head * head_width * bytes, q_stride, rows, absorbed_.data() + head * width,
            out_stride, {heads.begin + head, heads.begin + head + 1});
  }
  for_rows(state.parallel, rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t head = 0; head < heads.size(); ++head) {
        float* target = absorbed_.data() + i * out_stride + head * width + config.latent;
        std::memcpy(target, q_.data() + i * q_stride + head * head_width + config.nope,
                    static_cast<size_t>(config.rope) * sizeof(float));
        kernels::rope(target, config.rope, cosine(home_begin + i), sine(home_begin + i), config.rope_layout);
      }
    }
    const auto cache_bytes = static_cast<int64_t>(dtype_bytes(state.setup.cache_dtype));
    kernels::convert(absorbed_.data() + begin * out_stride, (end - begin) * out_stride,
                     state.setup.cache_dtype, out + begin * out_stride * cache_bytes);
  });
}

void Mla::choose(int64_t layer) {
  if (!owns_indexer(layer)) return;
  selection_.choose(index_layer_of(layer), index_query_stored_.data(), index_weights_.data());
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
    product(w.w_uv, zx + head * config.latent * bytes, z_stride, rows,
            heads_out_.data() + head * config.value, out_stride,
            {heads.begin + head, heads.begin + head + 1});
  }
  return output_operand_.of(state.parallel, dtype, heads_out_.data(), rows * out_stride);
}

}  // namespace

std::unique_ptr<AttentionEnds> make_mla(StepState& state, Selection& selection) {
  return std::make_unique<Mla>(state, selection);
}

}  // namespace weft::worker
