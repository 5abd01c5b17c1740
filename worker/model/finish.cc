#include "worker/model/finish.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/attention.h"

namespace weft::worker {
namespace {

void finish_sums(const float* partial, int64_t width, float* out) {
  int32_t m;
  std::memcpy(&m, partial + width + 1, sizeof m);
  if (m == kernels::kEmptyPartial) m = 0;
  for (int64_t i = 0; i < width; ++i) out[i] = std::ldexp(partial[i + (i + 1 == width ? 1 : 0)], m);
}

}  // namespace

void finish_head(const ModelConfig& config, const float* partial, float* out) {
  const int64_t width = config.value_width();
  config.hash ? finish_sums(partial, width, out) : kernels::finish_partial(partial, width, out);
}

void finish_head(const ModelConfig& config, std::span<const float* const> partials, float* out) {
  const int64_t width = config.value_width(), words = kernels::partial_words(width);
  if (!config.hash) return kernels::finish_partials(partials, width, out);
  static thread_local std::vector<float> merged;
  merged.clear();
  for (const float* partial : partials) merged.insert(merged.end(), partial, partial + words);
  kernels::merge_partials(merged.data(), std::ssize(partials), words, width);
  finish_sums(merged.data(), width, out);
}

}  // namespace weft::worker
