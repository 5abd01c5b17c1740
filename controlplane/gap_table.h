// How long chains of one kind stay unused, learned from those that came back, and what keeping one is worth.
//
// Gaps are counted in quarter octaves of a second. Chains that have not come back so far are evidence too:
// they count as seen up to their age and unknown behind it (the product-limit estimate of Kaplan and Meier).
// A few imagined chains around `centre` stand in until there are real ones.
//
// The worth of a chain of some age is, of a block, the hits to be had less the price of the room taken,
// at the best time to give up waiting: max over h of P(back within h) − price · E[time kept, at most h].
// Seconds and 1/seconds. It depends on the numbers added alone, and is exact only up to `refresh()`'s
// laziness.
#pragma once

#include <array>
#include <cstdint>
#include <set>

#include "proto/vocab/clock.h"

namespace weft::controlplane {

class GapTable {
 public:
  static constexpr int kBuckets = 80;  // the last begins after ten days
  static int bucket(double seconds);
  static double begin(int bucket);  // in seconds

  explicit GapTable(double centre_seconds) : centre_(centre_seconds) {}

  // A chain begins to be unused; it came back; it is no longer followed.
  void opened(Time since) { open_.insert(since.ns); }
  void returned(Time since, Time now);
  void lost(Time since, Time now);

  // Recomputes the worths if enough has changed.
  void refresh(Time now, double price);
  double worth(int bucket) const { return worth_[static_cast<size_t>(bucket)]; }

 private:
  using Row = std::array<double, kBuckets + 1>;
  void close(Time since);
  Row survival(Time now) const;

  double centre_;
  std::array<double, kBuckets> returned_{}, lost_{};
  std::multiset<int64_t> open_;  // since when, in nanoseconds
  std::array<double, kBuckets> worth_{};
  int64_t events_ = 0, built_events_ = -1;
  double built_price_ = 0;
  Time built_at_{};
};

}  // namespace weft::controlplane
