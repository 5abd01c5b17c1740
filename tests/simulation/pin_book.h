// Which contexts are pinned, from outside, and that they are found.
//
// Checker "pins": a request that comes in finds all that it shares with a pinned context, for as long as that
// is pinned; one whose context lies on the host, what of it is pinned there from its beginning on. A pin
// becomes shorter only by what a failed request had computed, and by what a device lost. A request may come
// in without what is cached where nobody else runs and that costs more room than it saves.
#pragma once

#include <map>
#include <set>

#include "tests/simulation/core.h"

namespace weft::simulation {

class PinBook {
 public:
  explicit PinBook(Core& core) : core_(core) {}

  void look();  // after every act

 private:
  struct Pin {
    const Truth* truth = nullptr;
    int64_t blocks = 0;  // now
    int64_t host = 0;    // of one that has none: copies on the host
    int64_t least = 0;   // that there must be
    Time since{};
  };
  int64_t shared_blocks(const Truth& a, const Truth& b) const;
  void take_failures();
  void follow_pins();
  void check_admitted(RequestId id);
  bool came_in_alone(const RequestSnapshot& snapshot) const;

  Core& core_;
  std::map<uint64_t, Pin> pins_;
  std::set<RequestId> seen_;  // that have been found admitted
  int64_t lost_blocks_ = 0;
};

}  // namespace weft::simulation
