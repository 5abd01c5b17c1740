// Things whose speeds are compared take turns, A B C, A B C, …: whatever else the machine does meets them
// alike.
//
// A turn begins with one run that does not count: it warms the caches, and the threads of whoever ran before
// go to sleep meanwhile. One thread is timed by its CPU clock, more by the wall (ceilings.h).
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

namespace weft::bench {

struct Contender {
  std::string what;
  double work = 0;  // of one run: operations, or bytes
  std::function<void()> run;
};

// Work in 10⁹ per second, [contender][round]. A turn counts as many runs as took about `seconds` in the first
// round, at least one.
std::vector<std::vector<double>> take_turns(std::span<const Contender> contenders, int rounds, int threads,
                                            double seconds);

}  // namespace weft::bench
