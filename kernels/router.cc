#include "kernels/router.h"

#include <algorithm>
#include <limits>
#include <numbers>
#include <vector>

#include "kernels/elementwise.h"
#include "proto/vocab/check.h"

namespace weft::kernels {
namespace {

// Marks the `count` largest of `values` among those with usable[i], ties to the lower index. A scan per
// choice: counts are small (at most 8 of 256), and a NaN cannot break it: it is chosen only when nothing else
// is left.
void choose_largest(const std::vector<float>& values, const std::vector<uint8_t>& usable, int64_t count,
                    std::vector<uint8_t>& chosen) {
  std::fill(chosen.begin(), chosen.end(), uint8_t{0});
  for (int64_t n = 0; n < count; ++n) {
    size_t best = values.size();
    for (size_t i = 0; i < values.size(); ++i) {
      if (usable[i] == 0 || chosen[i] != 0) continue;
      if (best == values.size() || values[i] > values[best] ||
          (values[best] != values[best] && values[i] == values[i])) {
        best = i;
      }
    }
    CHECK_LT(best, values.size());
    chosen[best] = 1;
  }
}

float two_largest_sum(const float* values, int64_t count) {
  if (count == 1) return values[0];
  float first = std::max(values[0], values[1]), second = std::min(values[0], values[1]);
  for (int64_t i = 2; i < count; ++i) {
    if (values[i] > first) {
      second = first;
      first = values[i];
    } else if (values[i] > second) {
      second = values[i];
    }
  }
  return first + second;
}

void softmax(const float* logits, std::vector<float>& scores) {
  float largest = -std::numeric_limits<float>::infinity();
  for (size_t e = 0; e < scores.size(); ++e) largest = std::max(largest, logits[e]);
  for (size_t e = 0; e < scores.size(); ++e) {
    scores[e] = (logits[e] - largest) * std::numbers::log2e_v<float>;
  }
  exp2(scores.data(), scores.data(), std::ssize(scores));
  float sum = 0;
  for (const float score : scores) sum += score;
  for (float& score : scores) score /= sum;
}

float group_score(RouterScore score, const float* biased, int64_t count) {
  return score == RouterScore::kSigmoid ? two_largest_sum(biased, count)
                                        : *std::max_element(biased, biased + count);
}

}  // namespace

void route(const Router& p, const float* logits, int32_t* ids, float* weights) {
  CHECK(p.experts > 0 && p.groups > 0 && p.experts % p.groups == 0, p.experts, " experts in ", p.groups,
        " groups");
  const int64_t group_size = p.experts / p.groups;
  CHECK(p.top_groups > 0 && p.top_groups <= p.groups && p.top_k > 0 && p.top_k <= p.top_groups * group_size,
        "top ", p.top_k, " of ", p.top_groups, " groups of ", group_size);
  const size_t experts = static_cast<size_t>(p.experts);
  std::vector<float> scores(experts), biased(experts);
  if (p.score == RouterScore::kSigmoid) {
    sigmoid(logits, scores.data(), p.experts);
  } else {
    softmax(logits, scores);
  }
  for (size_t e = 0; e < experts; ++e) biased[e] = p.bias == nullptr ? scores[e] : scores[e] + p.bias[e];

  std::vector<float> group_scores(static_cast<size_t>(p.groups));
  for (int64_t g = 0; g < p.groups; ++g) {
    group_scores[static_cast<size_t>(g)] = group_score(p.score, biased.data() + g * group_size, group_size);
  }
  std::vector<uint8_t> groups_chosen(group_scores.size()), usable(experts), chosen(experts);
  choose_largest(group_scores, std::vector<uint8_t>(group_scores.size(), 1), p.top_groups, groups_chosen);
  for (size_t e = 0; e < experts; ++e) usable[e] = groups_chosen[e / static_cast<size_t>(group_size)];
  choose_largest(biased, usable, p.top_k, chosen);

  float sum = 0;
  int64_t n = 0;
  for (size_t e = 0; e < experts; ++e) {
    if (chosen[e] == 0) continue;
    ids[n] = static_cast<int32_t>(e);
    weights[n] = scores[e];
    sum += scores[e];
    ++n;
  }
  const float divisor = p.normalise ? sum + 1e-20f : 1.0f;
  for (n = 0; n < p.top_k; ++n) weights[n] = weights[n] / divisor * p.scale;
}

}  // namespace weft::kernels
