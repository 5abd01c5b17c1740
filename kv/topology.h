// The ranks that compute, and their places.
//
// A *rank* is a worker's number for good: its process, page pool and mailbox. The *topology* is the set of
// ranks that take part in steps now, in order; a rank's *place* is its index in it. All layout arithmetic
// (layout.h: patterns, groupings, segments, heads, origins) counts places 0 … count − 1; pools, page tables,
// mailboxes and masks of holders count ranks. With all ranks taking part, places are ranks. A value; pure.
#pragma once

#include <array>
#include <string>

#include "proto/vocab/check.h"
#include "proto/vocab/ids.h"

namespace weft::kv {

class Topology {
 public:
  Topology() = default;  // nobody
  explicit Topology(RankMask ranks) : ranks_(ranks) {
    CHECK_LT(ranks, RankMask{1} << kMaxRanks);
    place_.fill(-1);
    for (RankMask left = ranks; left != 0; left &= left - 1) {
      place_[static_cast<size_t>(lowest_rank(left))] = count_;
      rank_[static_cast<size_t>(count_++)] = lowest_rank(left);
    }
  }
  // Ranks 0 … rank_count − 1.
  static Topology of_all(int rank_count) { return Topology(all_ranks(rank_count)); }

  int count() const { return count_; }
  RankMask ranks() const { return ranks_; }
  bool contains(int rank) const { return holds(ranks_, rank); }
  int rank(int place) const {
    CHECK(place >= 0 && place < count_, "place ", place);
    return rank_[static_cast<size_t>(place)];
  }
  int place(int rank) const {
    CHECK(contains(rank), "rank ", rank, " takes no part");
    return place_[static_cast<size_t>(rank)];
  }
  // The ranks at these places.
  RankMask ranks_at(RankMask places) const {
    if (ranks_ == all_ranks(count_)) return places;
    RankMask out = 0;
    for (RankMask left = places; left != 0; left &= left - 1) out |= mask_of(rank(lowest_rank(left)));
    return out;
  }
  // "0, 1, 3"
  std::string text() const {
    std::string out;
    for (int place = 0; place < count_; ++place) {
      out += (place == 0 ? "" : ", ") + std::to_string(rank(place));
    }
    return out;
  }
  friend bool operator==(const Topology& a, const Topology& b) { return a.ranks_ == b.ranks_; }

 private:
  RankMask ranks_ = 0;
  int count_ = 0;
  std::array<int, kMaxRanks> place_{}, rank_{};
};

}  // namespace weft::kv
