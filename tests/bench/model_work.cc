#include "tests/bench/model_work.h"

#include <algorithm>

#include "worker/model/weight_plan.h"

namespace weft::bench {
namespace {

using worker::ModelConfig;

struct TokenWork {
  Work body, head;
};

TokenWork token_work(const ModelConfig& config, DType dtype) {
  worker::ModelWeights weights;
  const worker::WeightPlan plan = worker::plan_weights(config, dtype, weights);
  TokenWork out;
  for (const worker::WeightPlace& place : plan.places) {
    if (place.form != worker::WeightForm::kPacked) continue;
    const auto* view = std::get<kernels::PackedMatrix*>(place.view);
    // Fused sources are given for routed experts alone.
    const bool expert = !place.source.name.empty() && !place.fused.name.empty();
    const double met =
        expert ? static_cast<double>(config.experts_per_token) / static_cast<double>(config.experts) : 1.0;
    Work& work = view == &weights.head ? out.head : out.body;
    work.operations += met * 2.0 * static_cast<double>(place.groups * place.outputs * place.k);
    work.bytes += met * static_cast<double>(place.bytes);
  }
  return out;
}

// Keys that the row at `position` scores in an index layer, and entries that it attends in a layer.
int64_t scored(const ModelConfig& config, int64_t position) {
  return config.index_topk > 0 && position + 1 > config.index_topk ? position + 1 : 0;
}
int64_t attended(const ModelConfig& config, int64_t position) {
  return config.index_topk > 0 ? std::min(position + 1, config.index_topk) : position + 1;
}

double score_operations(const ModelConfig& config, double pairs) {
  return pairs * 2.0 * static_cast<double>(config.index_layers() * config.index_heads * config.index_width);
}
double attention_operations(const ModelConfig& config, double entries) {
  return entries * 2.0 *
         static_cast<double>(std::ssize(config.layers) * config.heads * (2 * config.latent + config.rope));
}

}  // namespace

Work prefill_work(const ModelConfig& config, int64_t tokens) {
  double pairs = 0, entries = 0;
  for (int64_t position = 0; position < tokens; ++position) {
    pairs += static_cast<double>(scored(config, position));
    entries += static_cast<double>(attended(config, position));
  }
  const TokenWork token = token_work(config, DType::kF32);
  return {static_cast<double>(tokens) * token.body.operations + token.head.operations +
              score_operations(config, pairs) + attention_operations(config, entries),
          0};
}

Work decode_work(const ModelConfig& config, DType weights, const CacheFormat& cache, int64_t context) {
  const TokenWork token = token_work(config, weights);
  const auto pairs = static_cast<double>(scored(config, context));
  const auto entries = static_cast<double>(attended(config, context));
  const kv::CacheGeometry geometry = config.cache_geometry(cache, 64);
  return {token.body.operations + token.head.operations + score_operations(config, pairs) +
              attention_operations(config, entries),
          token.body.bytes + token.head.bytes +
              pairs * static_cast<double>(geometry.stream(kv::Stream::kIndexKeys).token_bytes()) +
              entries * static_cast<double>(geometry.stream(kv::Stream::kEntries).token_bytes())};
}

}  // namespace weft::bench
