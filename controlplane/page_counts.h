// A number of pages for each pool (stream and rank): needs, reservations, room.
#pragma once

#include <array>
#include <cstdint>

#include "kv/layout.h"
#include "proto/vocab/ids.h"

namespace weft::controlplane {

struct PageCounts {
  std::array<std::array<int64_t, kMaxRanks>, kv::kStreams> pages{};

  int64_t& at(kv::Stream stream, int rank) {
    return pages[static_cast<size_t>(stream)][static_cast<size_t>(rank)];
  }
  int64_t at(kv::Stream stream, int rank) const {
    return pages[static_cast<size_t>(stream)][static_cast<size_t>(rank)];
  }
  PageCounts& operator+=(const PageCounts& other) {
    for (size_t s = 0; s < pages.size(); ++s) {
      for (size_t r = 0; r < pages[s].size(); ++r) pages[s][r] += other.pages[s][r];
    }
    return *this;
  }
  PageCounts& operator-=(const PageCounts& other) {
    for (size_t s = 0; s < pages.size(); ++s) {
      for (size_t r = 0; r < pages[s].size(); ++r) pages[s][r] -= other.pages[s][r];
    }
    return *this;
  }
  friend bool operator==(const PageCounts&, const PageCounts&) = default;
};

// Calls f(stream, rank) for every pool, streams outside, in ascending order.
template <typename F>
void for_each_pool(int rank_count, F f) {
  for (const kv::Stream stream : kv::kAllStreams) {
    for (int rank = 0; rank < rank_count; ++rank) f(stream, rank);
  }
}

// Calls f(rank) for every rank of a mask, ascending.
template <typename F>
void for_each_rank(RankMask mask, F f) {
  for (; mask != 0; mask &= mask - 1) f(lowest_rank(mask));
}

}  // namespace weft::controlplane
