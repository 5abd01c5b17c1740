// Exchange points between real processes: latency of an empty one, and an all-gather's rate beside memcpy.
//
// Forks one process per rank (tests/bench/rank_turns.h). Rates in GB/s of the bytes that all ranks copy.
#pragma once

#include <cstddef>
#include <vector>

#include "tests/bench/rank_turns.h"

namespace weft::bench {

// One pass() with nothing to copy.
Turns empty_exchange(int ranks, int rounds, double seconds);

// Every rank copies `bytes` into its outbox and the other ranks' outboxes out. The memcpy beside it, which
// alternates with it in rounds, is the same number of processes copying as much without exchange points:
// equal rates mean that waiting is free.
struct AllGather {
  std::vector<double> gbs, memcpy_gbs;  // by round
};
AllGather all_gather(int ranks, size_t bytes, int rounds, double seconds);

}  // namespace weft::bench
