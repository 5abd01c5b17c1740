#include "worker/model/weight_plan.h"

#include <xxhash.h>

#include <utility>

#include "proto/vocab/units.h"

namespace weft::worker {

namespace {

class Planner {
 public:
  Planner(const ModelConfig& config, DType dtype, ModelWeights& weights)
      : c_(config), dtype_(dtype), weights_(weights) {}

  std::vector<WeightPlace> run() {
    weights_.dtype = dtype_;
    weights_.layers.assign(c_.layers.size(), {});
    places_.push_back({.form = WeightForm::kRows,
                       .dtype = dtype_,
                       .outputs = c_.vocabulary,
                       .k = c_.hidden,
                       .source = whole("model.embed_tokens.weight", c_.vocabulary, c_.hidden),
                       .view = &weights_.embedding});
    for (size_t layer = 0; layer < c_.layers.size(); ++layer) {
      LayerWeights& w = weights_.layers[layer];
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      vector(w.input_norm, prefix + "input_layernorm.weight", c_.hidden);
      vector(w.post_attention_norm, prefix + "post_attention_layernorm.weight", c_.hidden);
      attention(w, c_.layers[layer].indexer, prefix + "self_attn.");
      if (c_.layers[layer].feed_forward == FeedForward::kDense) {
        mlp(w.dense, prefix + "mlp.", c_.dense_width);
        if (c_.mlp_bias) {
          vector(w.dense.gate_bias, prefix + "mlp.gate_proj.bias", c_.dense_width);
          vector(w.dense.up_bias, prefix + "mlp.up_proj.bias", c_.dense_width);
          vector(w.dense.down_bias, prefix + "mlp.down_proj.bias", c_.hidden);
        }
      } else {
        mixture(w, prefix + "mlp.");
      }
    }
    vector(weights_.final_norm, "model.norm.weight", c_.hidden);
    plain_matrix(weights_.head, dtype_, c_.tied_embeddings ? "model.embed_tokens.weight" : "lm_head.weight",
                 c_.vocabulary, c_.hidden);
    weights_.draft.assign(static_cast<size_t>(c_.draft_layers), {});
    for (int64_t i = 0; i < c_.draft_layers; ++i) {
      draft(weights_.draft[static_cast<size_t>(i)],
            "model.layers." + std::to_string(c_.main_layers() + i) + ".");
    }
    return std::move(places_);
  }

 private:
  static WeightSource whole(std::string name, int64_t outputs, int64_t k) {
    return {.name = std::move(name), .shape = {outputs, k}, .output_stride = k};
  }

  void vector(const float*& view, std::string name, int64_t width) {
    places_.push_back({.form = WeightForm::kVector,
                       .k = width,
                       .source = {.name = std::move(name), .shape = {width}},
                       .view = &view});
  }

  WeightPlace& packed(kernels::PackedMatrix& view, DType dtype, int64_t groups, int64_t outputs, int64_t k,
                      WeightSource source) {
    places_.push_back({.dtype = dtype,
                       .groups = groups,
                       .outputs = outputs,
                       .k = k,
                       .source = std::move(source),
                       .view = &view});
    return places_.back();
  }

  void draft(DraftWeights& w, const std::string& p) {
    vector(w.embedding_norm, p + "enorm.weight", c_.hidden);
    vector(w.hidden_norm, p + "hnorm.weight", c_.hidden);
    // Quantised or not, whatever config.json says of linear layers: that differs from release to release.
    WeightSource plain = whole(p + "eh_proj.weight", c_.hidden, 2 * c_.hidden);
    WeightPlace& combine = packed(w.combine, dtype_, 1, c_.hidden, 2 * c_.hidden, plain);
    if (quantise(combine, /*stays=*/false).coding != WeightCoding::kNone) combine.plain = std::move(plain);
    vector(w.norm, p + "shared_head.norm.weight", c_.hidden);
  }

  // A matrix that is never quantised.
  void plain_matrix(kernels::PackedMatrix& view, DType dtype, std::string name, int64_t outputs, int64_t k) {
    packed(view, dtype, 1, outputs, k, whole(std::move(name), outputs, k));
  }

  // A linear layer, which may be.
  WeightPlace& matrix(kernels::PackedMatrix& view, std::string name, int64_t outputs, int64_t k) {
    return quantise(packed(view, dtype_, 1, outputs, k, whole(std::move(name), outputs, k)));
  }

  // If config.json says that the place's module is quantised, its tensors are others, and it stays quantised
  // in memory; only a matrix that is packed in another order than it is stored does not.
  WeightPlace& quantise(WeightPlace& place, bool stays = true) {
    const std::string module = place.source.name.substr(0, place.source.name.rfind('.'));
    if (!c_.quantisation.quantises(module)) return place;
    place.coding = c_.quantisation.coding;
    const int64_t outputs = place.source.shape[0], k = place.source.shape[1];
    const std::string scale = module + ".weight_scale";
    switch (place.coding) {
      case WeightCoding::kNone:
        return place;
      case WeightCoding::kFp8:
        place.scales = {{.name = scale + "_inv", .shape = {ceil_div(outputs, 128), ceil_div(k, 128)}}};
        if (stays) place.format = kernels::PanelFormat::kFp8;
        return place;
      case WeightCoding::kNvfp4Modelopt:
        place.scales = {{.name = scale, .shape = {outputs, k / 16}}, {.name = scale + "_2"}};
        break;
      case WeightCoding::kNvfp4CompressedTensors:
        place.source.name = module + ".weight_packed";
        place.scales = {{.name = scale, .shape = {outputs, k / 16}},
                        {.name = module + ".weight_global_scale"}};
        break;
    }
    place.source.shape = {outputs, k / 2};
    if (stays) place.format = kernels::PanelFormat::kFp4;
    return place;
  }

  // A matrix whose outputs come head by head.
  void by_head(kernels::PackedMatrix& view, std::string name, int64_t heads, int64_t outputs, int64_t k) {
    WeightSource source = whole(std::move(name), heads * outputs, k);
    source.group_stride = outputs * k;
    quantise(packed(view, dtype_, heads, outputs, k, std::move(source)));
  }

  void attention(LayerWeights& w, Indexer kind, const std::string& p) {
    if (c_.hash) {
      matrix(w.o, p + "o_proj.weight", c_.hidden, c_.heads * c_.value);
      return;
    }
    c_.attention == AttentionKind::kMla ? mla(w, p) : grouped(w, p);
    if (kind == Indexer::kFull) indexer(w, p + "indexer.");
  }

  void mla(LayerWeights& w, const std::string& p) {
    if (c_.q_lora_rank == 0) {
      by_head(w.q_b, p + "q_proj.weight", c_.heads, c_.nope + c_.rope, c_.hidden);
    } else {
      matrix(w.q_a, p + "q_a_proj.weight", c_.q_lora_rank, c_.hidden);
      vector(w.q_a_norm, p + "q_a_layernorm.weight", c_.q_lora_rank);
      by_head(w.q_b, p + "q_b_proj.weight", c_.heads, c_.nope + c_.rope, c_.q_lora_rank);
    }
    matrix(w.kv_a, p + "kv_a_proj_with_mqa.weight", c_.latent + c_.rope, c_.hidden);
    vector(w.kv_a_norm, p + "kv_a_layernorm.weight", c_.latent);

    // kv_b_proj is [heads][nope + value][latent]: the nope rows are W_UK, used transposed, the value rows
    // W_UV.
    WeightSource uk = whole(p + "kv_b_proj.weight", c_.heads * (c_.nope + c_.value), c_.latent);
    uk.group_stride = (c_.nope + c_.value) * c_.latent;
    WeightSource uv = uk;
    uk.output_stride = 1;
    uk.k_stride = c_.latent;
    uv.offset = c_.nope * c_.latent;
    quantise(packed(w.w_uk, dtype_, c_.heads, c_.latent, c_.nope, std::move(uk)), /*stays=*/false);
    quantise(packed(w.w_uv, dtype_, c_.heads, c_.value, c_.latent, std::move(uv)), /*stays=*/false);

    matrix(w.o, p + "o_proj.weight", c_.hidden, c_.heads * c_.value);
  }

  void grouped(LayerWeights& w, const std::string& p) {
    const int64_t width = c_.head_width;
    by_head(w.q, p + "q_proj.weight", c_.heads, width, c_.hidden);
    by_head(w.k, p + "k_proj.weight", c_.kv_heads, width, c_.hidden);
    by_head(w.v, p + "v_proj.weight", c_.kv_heads, width, c_.hidden);
    if (c_.qkv_bias) {
      vector(w.q_bias, p + "q_proj.bias", c_.heads * width);
      vector(w.k_bias, p + "k_proj.bias", c_.kv_heads * width);
      vector(w.v_bias, p + "v_proj.bias", c_.kv_heads * width);
    }
    if (c_.normed_heads) {
      vector(w.q_norm, p + "q_norm.weight", width);
      vector(w.k_norm, p + "k_norm.weight", width);
    }
    matrix(w.o, p + "o_proj.weight", c_.hidden, c_.heads * width);
    if (c_.output_bias) vector(w.o_bias, p + "o_proj.bias", c_.hidden);
  }

  void indexer(LayerWeights& w, const std::string& p) {
    by_head(w.index_q, p + "wq_b.weight", c_.index_heads, c_.index_width, c_.q_lora_rank);
    matrix(w.index_k, p + "wk.weight", c_.index_width, c_.hidden);
    vector(w.index_k_norm, p + "k_norm.weight", c_.index_width);
    vector(w.index_k_norm_bias, p + "k_norm.bias", c_.index_width);
    plain_matrix(w.index_weights, DType::kF32, p + "weights_proj.weight", c_.index_heads, c_.hidden);
  }

  void mlp(Mlp& w, const std::string& p, int64_t width) {
    matrix(w.gate, p + "gate_proj.weight", width, c_.hidden);
    matrix(w.up, p + "up_proj.weight", width, c_.hidden);
    matrix(w.down, p + "down_proj.weight", c_.hidden, width);
  }

  void mixture(LayerWeights& w, const std::string& p) {
    plain_matrix(w.router, DType::kF32, p + "gate.weight", c_.experts, c_.hidden);
    if (c_.expert_bias) vector(w.router_bias, p + "gate.e_score_correction_bias", c_.experts);
    w.experts.assign(static_cast<size_t>(c_.experts), {});
    const int64_t width = c_.expert_width;
    const int64_t size = width * c_.hidden;
    for (int64_t e = 0; e < c_.experts; ++e) {
      Mlp& expert = w.experts[static_cast<size_t>(e)];
      const std::string own = p + "experts." + std::to_string(e) + ".";
      // Fused: gate_up_proj [experts][gate rows, then up rows][hidden]; down_proj [experts][hidden][width].
      const auto fused = [&](const char* name, int64_t rows, int64_t columns, int64_t offset) {
        return WeightSource{.name = p + "experts." + name,
                            .shape = {c_.experts, rows, columns},
                            .offset = offset,
                            .output_stride = columns};
      };
      matrix(expert.gate, own + "gate_proj.weight", width, c_.hidden).fused =
          fused("gate_up_proj", 2 * width, c_.hidden, e * 2 * size);
      matrix(expert.up, own + "up_proj.weight", width, c_.hidden).fused =
          fused("gate_up_proj", 2 * width, c_.hidden, e * 2 * size + size);
      matrix(expert.down, own + "down_proj.weight", c_.hidden, width).fused =
          fused("down_proj", c_.hidden, width, e * size);
    }
    if (c_.shared_width > 0) mlp(w.shared, p + "shared_experts.", c_.shared_width);
  }

  const ModelConfig& c_;
  DType dtype_;
  ModelWeights& weights_;
  std::vector<WeightPlace> places_;
};

int64_t place_bytes(const WeightPlace& place) {
  switch (place.form) {
    case WeightForm::kPacked:
      return static_cast<int64_t>(
          kernels::packed_bytes(place.dtype, place.groups, place.outputs, place.k, place.format));
    case WeightForm::kRows:
      return place.outputs * place.k * static_cast<int64_t>(dtype_bytes(place.dtype));
    case WeightForm::kVector:
      return place.k * static_cast<int64_t>(dtype_bytes(DType::kF32));
  }
  return 0;
}

}  // namespace

WeightPlan plan_weights(const ModelConfig& config, DType dtype, ModelWeights& weights) {
  WeightPlan plan;
  plan.places = Planner(config, dtype, weights).run();
  const auto count = static_cast<int64_t>(plan.places.size());
  int64_t at =
      round_up(kDirectoryHeaderBytes + count * static_cast<int64_t>(sizeof(uint64_t)), kWeightAlignment);
  std::string shape;
  for (WeightPlace& place : plan.places) {
    place.offset = at;
    place.bytes = place_bytes(place);
    at += round_up(place.bytes, kWeightAlignment);
    shape += place.source.name + " " + dtype_name(place.dtype);
    for (const int64_t size :
         {static_cast<int64_t>(place.format), place.groups, place.outputs, place.k, place.offset})
      shape += " " + std::to_string(size);
    shape += "\n";
  }
  plan.arena_bytes = at;
  plan.fingerprint = XXH3_64bits(shape.data(), shape.size()) | 1;
  return plan;
}

void set_views(const WeightPlan& plan, const std::byte* arena) {
  for (const WeightPlace& place : plan.places) {
    const std::byte* data = arena + place.offset;
    if (auto* const* matrix = std::get_if<kernels::PackedMatrix*>(&place.view)) {
      **matrix = {.dtype = place.dtype,
                  .groups = place.groups,
                  .group_outputs = place.outputs,
                  .k = place.k,
                  .data = data,
                  .format = place.format};
    } else if (auto* const* vector = std::get_if<const float**>(&place.view)) {
      **vector = reinterpret_cast<const float*>(data);
    } else {
      **std::get_if<const std::byte**>(&place.view) = data;
    }
  }
}

}  // namespace weft::worker
