// A point on the monotonic clock to wait until, in the milliseconds that poll() takes.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "proto/vocab/clock.h"

namespace weft::client {

class Deadline {
 public:
  explicit Deadline(Duration timeout)
      : forever_(timeout == Duration::max()), end_(forever_ ? Time{} : monotonic_now() + timeout) {}
  bool passed() const { return !forever_ && monotonic_now() >= end_; }
  // -1: forever. Rounded up, so that a wait never ends before the deadline and spins.
  int poll_ms() const {
    if (forever_) return -1;
    const int64_t left = (end_ - monotonic_now()).count();
    return static_cast<int>(std::clamp<int64_t>((left + 999'999) / 1'000'000, 0, INT_MAX));
  }
  Duration left() const {
    return forever_ ? Duration::max() : std::max(Duration::zero(), end_ - monotonic_now());
  }

 private:
  bool forever_;
  Time end_;
};

}  // namespace weft::client
