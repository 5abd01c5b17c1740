#include "kernels/reference/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace weft::kernels::reference {
namespace {

// Indices of the `count` largest, larger first, ties to the lower index; lowers `margin` to the gap behind
// them.
std::vector<size_t> largest(const std::vector<double>& values, int64_t count, double& margin) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] > values[b]; });
  const size_t kept = static_cast<size_t>(count);
  if (kept < order.size()) margin = std::min(margin, values[order[kept - 1]] - values[order[kept]]);
  order.resize(kept);
  return order;
}

std::vector<double> scores_of(const Router& p, const float* logits) {
  std::vector<double> out;
  double largest = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t e = 0; e < p.experts; ++e) largest = std::max(largest, static_cast<double>(logits[e]));
  for (int64_t e = 0; e < p.experts; ++e) {
    const double x = logits[e];
    out.push_back(p.score == RouterScore::kSigmoid ? 1 / (1 + std::exp(-x)) : std::exp(x - largest));
    sum += out.back();
  }
  if (p.score == RouterScore::kSoftmax) {
    for (double& score : out) score /= sum;
  }
  return out;
}

}  // namespace

Route route(const Router& p, const float* logits) {
  const size_t experts = static_cast<size_t>(p.experts), groups = static_cast<size_t>(p.groups);
  const size_t group_size = experts / groups;
  const std::vector<double> scores = scores_of(p, logits);
  std::vector<double> biased;
  for (size_t e = 0; e < experts; ++e) {
    biased.push_back(scores[e] + (p.bias == nullptr ? 0.0 : static_cast<double>(p.bias[e])));
  }
  Route out;
  out.margin = std::numeric_limits<double>::infinity();
  std::vector<double> group_scores;
  for (size_t g = 0; g < groups; ++g) {
    std::vector<double> members(biased.begin() + static_cast<std::ptrdiff_t>(g * group_size),
                                biased.begin() + static_cast<std::ptrdiff_t>((g + 1) * group_size));
    std::sort(members.begin(), members.end(), std::greater<>());
    group_scores.push_back(members[0] +
                           (p.score == RouterScore::kSigmoid && members.size() > 1 ? members[1] : 0.0));
  }
  std::vector<double> open(experts, -std::numeric_limits<double>::infinity());
  for (size_t g : largest(group_scores, p.top_groups, out.margin)) {
    for (size_t e = g * group_size; e < (g + 1) * group_size; ++e) open[e] = biased[e];
  }
  for (size_t e : largest(open, p.top_k, out.margin)) out.ids.push_back(static_cast<int32_t>(e));
  std::sort(out.ids.begin(), out.ids.end());
  double sum = 0;
  for (int32_t id : out.ids) sum += scores[static_cast<size_t>(id)];
  for (int32_t id : out.ids) {
    out.weights.push_back(scores[static_cast<size_t>(id)] / (p.normalise ? sum + 1e-20 : 1.0) *
                          static_cast<double>(p.scale));
  }
  return out;
}

}  // namespace weft::kernels::reference
