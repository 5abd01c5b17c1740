#include "kernels/sample.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/cpu/row_max.h"
#include "kernels/elementwise.h"
#include "proto/vocab/check.h"
#include "proto/vocab/random.h"

namespace weft::kernels {
namespace {

// A uniform number in [0, 1) of 53 bits.
double draw(uint64_t seed, uint64_t position) {
  const auto words =
      philox4x32({static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0},
                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint64_t bits = (uint64_t{words[0]} << 32) | words[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

struct Candidates {
  std::vector<uint32_t> ids;   // those that may be drawn, ascending
  std::vector<float> weights;  // by id: 2^((logit − largest) · log2 e / temperature)
};

// The total order of candidates.
struct Better {
  const float* logits;
  bool operator()(uint32_t a, uint32_t b) const {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  }
};

auto at(std::vector<uint32_t>& ids, size_t i) { return ids.begin() + static_cast<std::ptrdiff_t>(i); }

double sum_of(const Candidates& c) {
  double sum = 0;
  for (uint32_t id : c.ids) sum += static_cast<double>(c.weights[id]);
  return sum;
}

void keep_first(size_t count, Candidates& c) {
  c.ids.resize(count);
  std::sort(c.ids.begin(), c.ids.end());
}

void cut_by_count(const Better& better, size_t count, Candidates& c) {
  if (count >= c.ids.size()) return;
  std::nth_element(c.ids.begin(), at(c.ids, count - 1), c.ids.end(), better);
  keep_first(count, c);
}

// The shortest prefix, in the total order, that holds `top_p` of the weight. Sorting grows until the prefix
// is found: a vocabulary is long and the prefix nearly always short.
void cut_by_probability(const Better& better, double top_p, Candidates& c) {
  const double wanted = top_p * sum_of(c);
  size_t sorted = 0;
  double sum = 0;
  for (size_t i = 0; i < c.ids.size(); ++i) {
    if (i == sorted) {
      sorted = std::min(c.ids.size(), std::max<size_t>(64, sorted * 8));
      std::partial_sort(c.ids.begin(), at(c.ids, sorted), c.ids.end(), better);
    }
    sum += static_cast<double>(c.weights[c.ids[i]]);
    if (sum >= wanted) return keep_first(i + 1, c);
  }
  keep_first(c.ids.size(), c);  // rounding kept the sum below: all
}

uint32_t pick(const Candidates& c, double uniform) {
  const double wanted = uniform * sum_of(c);
  double sum = 0;
  uint32_t last = c.ids[0];
  for (uint32_t id : c.ids) {
    if (c.weights[id] == 0) continue;
    last = id;
    sum += static_cast<double>(c.weights[id]);
    if (sum > wanted) break;
  }
  return last;
}

}  // namespace

uint32_t sample(const Sampler& p, const float* logits, int64_t vocabulary, uint64_t position) {
  CHECK_GT(vocabulary, 0);
  CHECK(p.temperature >= 0, "temperature ", p.temperature);
  const auto best = static_cast<uint32_t>(first_largest(logits, vocabulary));
  const float steepness = 0x1.715476p+0f / p.temperature;
  // So cold that only the best can be drawn: also where the division overflowed.
  if (p.temperature == 0 || !std::isfinite(steepness) || p.top_k == 1 || p.top_p <= 0) return best;

  Candidates c;
  c.ids.resize(static_cast<size_t>(vocabulary));
  std::iota(c.ids.begin(), c.ids.end(), 0u);
  c.weights.resize(c.ids.size());
  for (size_t i = 0; i < c.ids.size(); ++i) c.weights[i] = (logits[i] - logits[best]) * steepness;
  exp2(c.weights.data(), c.weights.data(), vocabulary);
  const Better better{logits};
  if (p.top_k > 0) cut_by_count(better, p.top_k, c);
  if (p.top_p < 1) cut_by_probability(better, static_cast<double>(p.top_p), c);
  return pick(c, draw(p.seed, position));
}

}  // namespace weft::kernels
