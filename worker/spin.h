// How long a wait may spin before it sleeps.
//
// Spinning saves the few microseconds of a futex round trip, but on a machine with more busy threads than
// cores it takes the core from the very thread that is waited for.
#pragma once

#include "proto/vocab/clock.h"

namespace weft::worker {

// Cores this process may run on.
int usable_cores();

// 50 µs if `busy_threads` threads (all ranks on this machine together) have a core each, else 0.
Duration spin_time(int busy_threads);

// Tells the core that this is a spin loop.
void pause_core();

// Spins until `done()`, at most `limit`; the last answer of done().
template <typename Done>
bool spin_until(Duration limit, Done done) {
  if (done()) return true;
  if (limit <= Duration::zero()) return false;
  const Time start = monotonic_now();
  do {
    for (int i = 0; i < 32; ++i) {
      pause_core();
      if (done()) return true;
    }
  } while (monotonic_now() - start < limit);
  return done();
}

}  // namespace weft::worker
