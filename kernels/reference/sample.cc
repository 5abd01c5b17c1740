#include "kernels/reference/sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace weft::kernels::reference {

std::vector<double> distribution(const Sampler& p, const float* logits, int64_t vocabulary) {
  const size_t count = static_cast<size_t>(vocabulary);
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  if (p.top_k > 0 && p.top_k < count) order.resize(p.top_k);

  const auto weight = [&](size_t id) {
    return std::exp((static_cast<double>(logits[id]) - static_cast<double>(logits[order[0]])) /
                    static_cast<double>(p.temperature));
  };
  double total = 0;
  for (size_t id : order) total += weight(id);
  if (p.top_p < 1) {
    double sum = 0;
    size_t kept = 0;
    while (kept < order.size() && (kept == 0 || sum < static_cast<double>(p.top_p) * total)) {
      sum += weight(order[kept++]);
    }
    order.resize(kept);
    total = sum;
  }
  std::vector<double> out(count, 0.0);
  for (size_t id : order) out[id] = weight(id) / total;
  return out;
}

}  // namespace weft::kernels::reference
