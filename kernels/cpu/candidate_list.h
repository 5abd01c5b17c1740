// The best top_k of a stream of scores, exactly, in memory proportional to top_k.
//
// Newest first: positions must be offered in descending order, since recent keys tend to score high and a
// high threshold found early keeps the rest out. Keeps the candidates that may still be among the best,
// descending in position, and a floor that a new score must reach. An older position wins every tie, and is
// offered later, so ties need no comparison of positions anywhere. Scores count as score + 0.0, NaN as
// −infinity (never met in a sound model; it keeps the order total).
//
// When the list is full (1.5 top_k + 256) it is cut: bisection on the bits of the threshold finds one that
// leaves between top_k and 1.125 top_k candidates, a few passes of vector compares over the list. Only take()
// needs exactly top_k. Scores in random order thus write about 1.25 · top_k · (1 + ln(n / top_k)) candidates;
// the worst orders (older keys always better, or all equal) write every key, in the same memory. (An
// nth_element over (score, position) pairs cost more than the scoring of 2 heads × 64.)
//
// One thread at a time, flush-to-zero on or off. No errors.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/indexer.h"

namespace weft::kernels {

// The k-th largest of `count` scores, and how many are larger. 1 ≤ k ≤ count; no NaN.
struct Kth {
  float score = 0;
  int64_t above = 0;
};
Kth kth_largest(const float* scores, int64_t count, int64_t k);

class CandidateList {
 public:
  // Empties the list; memory is kept.
  void reset(int64_t top_k);

  // scores[i] belongs to position first_position + i; all are older than what was offered before.
  void offer(const float* scores, int64_t count, int64_t first_position);
  // Already chosen elsewhere, ascending in position; all older than what was offered before.
  void offer(const Candidate* candidates, int64_t count);
  // How many candidates were written into the list since reset().
  int64_t written() const { return written_; }

  // Writes the best top_k (or all, if fewer were offered) ascending in position; returns how many. Ends the
  // stream.
  int64_t take(Candidate* out);

 private:
  void make_room(int64_t count);
  // Keeps the best `wanted`, or up to `most` if a threshold that separates them is found sooner.
  void cut(int64_t wanted, int64_t most);

  int64_t top_k_ = 0;
  int64_t count_ = 0;
  int64_t written_ = 0;
  float floor_ = 0;  // a later score below it is not among the best; −infinity: every score enters
  std::vector<float> scores_;       // [capacity + padding]
  std::vector<int32_t> positions_;  // likewise
};

}  // namespace weft::kernels
