#include "kernels/reference/indexer.h"

#include <algorithm>

namespace weft::kernels::reference {

double index_score(std::span<const double> query, std::span<const double> weights,
                   std::span<const double> key) {
  double score = 0;
  for (size_t h = 0; h < weights.size(); ++h) {
    double dot = 0;
    for (size_t i = 0; i < key.size(); ++i) dot += query[h * key.size() + i] * key[i];
    score += weights[h] * std::max(0.0, dot);
  }
  return score;
}

std::vector<Candidate> select(std::vector<Candidate> all, int64_t top_k) {
  std::sort(all.begin(), all.end(), ranks_before);
  if (static_cast<int64_t>(all.size()) > top_k) all.resize(static_cast<size_t>(top_k));
  std::sort(all.begin(), all.end(),
            [](const Candidate& a, const Candidate& b) { return a.position < b.position; });
  return all;
}

}  // namespace weft::kernels::reference
