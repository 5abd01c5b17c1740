// What decides which unused chain makes room, where that is not plain LRU: a number for each chain, the
// smallest goes first. Implementations are pure and deterministic: time comes with the calls and does not go
// back.
#pragma once

#include <array>
#include <cstdint>

#include "proto/vocab/clock.h"

namespace weft::controlplane {

// The chain of a request that gave its blocks back: since when, and what is known of it, in the policy's own
// words. `begun`: the request has not ended. Not `known`: nothing is known of it.
struct Unused {
  Time since{};
  std::array<uint8_t, 10> steps{};
  bool known = false;
  bool begun = false;
};

class EvictionPolicy {
 public:
  virtual ~EvictionPolicy() = default;
  virtual double worth(const Unused& unused, Time now) = 0;
  // When age alone changes the worth next; after now.
  virtual Time next_change(const Unused& unused, Time now) const = 0;
};

}  // namespace weft::controlplane
