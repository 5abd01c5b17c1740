#include "kernels/sample.h"

#include <algorithm>
#include <array>
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

// The total order of candidates.
struct Better {
  const float* logits;
  bool operator()(uint32_t a, uint32_t b) const {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  }
};

// The best `count` ids, ascending. One pass that keeps up to twice as many as asked for and drops what the
// worst of the best so far excludes: most of a vocabulary costs one comparison.
std::vector<uint32_t> best_ids(const Better& better, uint32_t vocabulary, size_t count) {
  std::vector<uint32_t> ids;
  const auto cut = [&] {
    const auto last = ids.begin() + static_cast<std::ptrdiff_t>(count - 1);
    std::nth_element(ids.begin(), last, ids.end(), better);
    ids.resize(count);
  };
  float bar = better.logits[0];
  for (uint32_t id = 0; id < vocabulary; ++id) {
    // An equal logit with a higher id than all seen so far does not beat the worst of a full set.
    if (ids.size() >= count && better.logits[id] <= bar) continue;
    if (ids.size() < count) bar = std::min(bar, better.logits[id]);
    ids.push_back(id);
    if (ids.size() == 2 * count) {
      cut();
      bar = better.logits[ids.back()];
    }
  }
  if (ids.size() > count) cut();
  std::sort(ids.begin(), ids.end());
  return ids;
}

struct Candidates {
  std::vector<uint32_t> ids;     // ascending
  std::vector<float> exponents;  // (logit − largest) · (log2 e / temperature), ≤ 0
  std::vector<float> weights;    // 2^exponent
};

double sum_of(const std::vector<float>& weights) {
  double sum = 0;
  for (float w : weights) sum += static_cast<double>(w);
  return sum;
}

// Sixteenths of an octave below the largest weight. Monotone in the logit, so whole bins are prefixes of the
// order.
constexpr size_t kBins = 2048;  // weights below 2^−126 are 0: the last bin
size_t bin_of(float exponent) {
  return exponent > -127.0f ? static_cast<size_t>(-exponent * 16.0f) : kBins - 1;
}

// The worst candidate of the shortest prefix that holds `wanted`: only the bin that reaches it is sorted, for
// the prefix may be most of a vocabulary.
uint32_t last_of_prefix(const Better& better, double wanted, const Candidates& c) {
  std::array<double, kBins> sums{};
  for (size_t i = 0; i < c.ids.size(); ++i) sums[bin_of(c.exponents[i])] += static_cast<double>(c.weights[i]);
  size_t bin = 0;
  double before = 0;
  while (bin + 1 < kBins && before + sums[bin] < wanted) before += sums[bin++];

  std::vector<size_t> inside;  // indices into c
  for (size_t i = 0; i < c.ids.size(); ++i) {
    if (bin_of(c.exponents[i]) == bin) inside.push_back(i);
  }
  std::sort(inside.begin(), inside.end(), [&](size_t a, size_t b) { return better(c.ids[a], c.ids[b]); });
  for (size_t i : inside) {
    before += static_cast<double>(c.weights[i]);
    if (before >= wanted) return c.ids[i];
  }
  // Rounding kept the sum just below: everything stays.
  return *std::max_element(c.ids.begin(), c.ids.end(), better);
}

void cut_by_probability(const Better& better, double top_p, Candidates& c) {
  const uint32_t last = last_of_prefix(better, top_p * sum_of(c.weights), c);
  size_t kept = 0;
  for (size_t i = 0; i < c.ids.size(); ++i) {
    if (better(last, c.ids[i])) continue;
    c.ids[kept] = c.ids[i];
    c.weights[kept++] = c.weights[i];
  }
  c.ids.resize(kept);
  c.weights.resize(kept);
}

uint32_t pick(const Candidates& c, double uniform) {
  const double wanted = uniform * sum_of(c.weights);
  double sum = 0;
  uint32_t last = c.ids[0];
  for (size_t i = 0; i < c.ids.size(); ++i) {
    if (c.weights[i] == 0) continue;
    last = c.ids[i];
    sum += static_cast<double>(c.weights[i]);
    if (sum > wanted) break;
  }
  return last;
}

}  // namespace

uint32_t sample(const Sampler& p, const float* logits, int64_t vocabulary, uint64_t position) {
  CHECK(vocabulary > 0 && vocabulary <= UINT32_MAX, "vocabulary ", vocabulary);
  CHECK(p.temperature >= 0, "temperature ", p.temperature);
  const auto best = static_cast<uint32_t>(first_largest(logits, vocabulary));
  const float steepness = 0x1.715476p+0f / p.temperature;
  // So cold that only the best can be drawn: also where the division overflowed.
  if (p.temperature == 0 || !std::isfinite(steepness) || p.top_k == 1 || p.top_p <= 0) return best;

  const Better better{logits};
  Candidates c;
  if (p.top_k > 0 && p.top_k < vocabulary) {
    c.ids = best_ids(better, static_cast<uint32_t>(vocabulary), p.top_k);
  } else {
    c.ids.resize(static_cast<size_t>(vocabulary));
    std::iota(c.ids.begin(), c.ids.end(), 0u);
  }
  c.exponents.resize(c.ids.size());
  for (size_t i = 0; i < c.ids.size(); ++i) c.exponents[i] = (logits[c.ids[i]] - logits[best]) * steepness;
  c.weights.resize(c.ids.size());
  exp2(c.exponents.data(), c.weights.data(), static_cast<int64_t>(c.ids.size()));
  if (p.top_p < 1) cut_by_probability(better, static_cast<double>(p.top_p), c);
  return pick(c, draw(p.seed, position));
}

}  // namespace weft::kernels
