// The best top_k of a stream of scores, exactly, in memory proportional to top_k.
//
// Keeps the candidates that may still be among the best, ascending in position, and a threshold that a new
// score must exceed. Positions must be offered in ascending order; a later position therefore loses every
// tie, and ties need no comparison of positions anywhere. Scores count as score + 0.0, NaN as −infinity
// (never met in a sound model; it keeps the order total).
//
// When the list is full it is cut: bisection on the bits of the threshold finds one that leaves between top_k
// and 1.25 top_k candidates, a few passes of vector compares over the list. Only take() needs exactly top_k.
// (An nth_element over (score, position) pairs cost more than the scoring of 2 heads × 64.)
//
// One thread at a time, flush-to-zero on or off. No errors.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/indexer.h"

namespace weft::kernels {

class CandidateList {
 public:
  // Empties the list; memory is kept.
  void reset(int64_t top_k);

  // scores[i] belongs to position first_position + i.
  void offer(const float* scores, int64_t count, int64_t first_position);
  // Already chosen elsewhere, ascending.
  void offer(const Candidate* candidates, int64_t count);

  // Writes the best top_k (or all, if fewer were offered) ascending in position; returns how many. Ends the
  // stream.
  int64_t take(Candidate* out);

 private:
  void make_room(int64_t count);
  // Keeps the best `wanted`, or up to `most` if a threshold that separates them is found sooner.
  void cut(int64_t wanted, int64_t most);

  int64_t top_k_ = 0;
  int64_t count_ = 0;
  bool open_ = true;     // no threshold yet: every score enters
  float threshold_ = 0;  // at least top_k kept or once kept candidates rank before any later score ≤ this
  std::vector<float> scores_;       // [capacity + padding]
  std::vector<int32_t> positions_;  // likewise
};

}  // namespace weft::kernels
