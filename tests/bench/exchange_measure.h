// Exchange points between real processes: latency of an empty one, and an all-gather's rate beside memcpy.
//
// Forks one process per rank, which die with the caller; the caller runs no other threads meanwhile. Rates in
// GB/s of the bytes that all ranks copy, times in microseconds, both by the wall.
#pragma once

#include <cstddef>

namespace weft::bench {

// Of one pass() with nothing to copy.
double exchange_microseconds(int ranks, int repeats);

// Every rank copies `bytes` into its outbox and the other ranks' outboxes out. The memcpy beside it is the
// same number of processes copying as much without exchange points: equal rates mean that waiting is free.
struct AllGather {
  double gbs = 0, memcpy_gbs = 0;
};
AllGather all_gather(int ranks, size_t bytes, int repeats);

// How often to repeat an all-gather so that about `volume` bytes are copied into outboxes.
int all_gather_repeats(int ranks, size_t bytes, size_t volume);

}  // namespace weft::bench
