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

// The spinning of one thread at one kind of wait.
class Spinner {
 public:
  explicit Spinner(Duration limit) : limit_(limit), now_(limit) {}

  // Spins until `done()`, at most as long as has paid off lately; the last answer of done().
  template <typename Done>
  bool until(Done done) {
    if (done()) return true;
    if (limit_ <= Duration::zero()) return false;
    const bool probe =
        ++waits_ % kProbe == 0;  // a full spin now and then, to find out that times have changed
    const bool met = spin_until(probe ? limit_ : now_, done);
    if (met) {
      now_ = probe ? limit_ : std::min(2 * now_, limit_);
    } else {
      now_ = std::max(now_ / 2, std::min(kShortest, limit_));
    }
    return met;
  }
  Duration now() const { return now_; }

 private:
  static constexpr uint32_t kProbe = 64;
  static constexpr Duration kShortest = std::chrono::microseconds(1);
  Duration limit_, now_;
  uint32_t waits_ = 0;
};

}  // namespace weft::worker
