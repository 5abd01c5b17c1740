// Time as a value. Code that decides takes a Time; only shells read a clock.
#pragma once

#include <chrono>
#include <cstdint>

namespace weft {

using Duration = std::chrono::nanoseconds;

// Nanoseconds on the monotonic clock of the process that read it.
struct Time {
  int64_t ns = 0;
  friend constexpr auto operator<=>(Time, Time) = default;
  friend constexpr Duration operator-(Time a, Time b) { return Duration(a.ns - b.ns); }
  friend constexpr Time operator+(Time a, Duration d) { return Time{a.ns + d.count()}; }
};

inline Time monotonic_now() {
  return Time{
      std::chrono::duration_cast<Duration>(std::chrono::steady_clock::now().time_since_epoch()).count()};
}

constexpr double seconds(Duration d) { return static_cast<double>(d.count()) * 1e-9; }

}  // namespace weft
