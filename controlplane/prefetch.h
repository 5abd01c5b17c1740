// Blocks that are loaded from the host for a request that still waits.
//
// A prefetch takes room beyond what is reserved, so nobody lacks it; when its plan is acknowledged the
// blocks are registered and left to the prefix cache, where the request finds them as any other would. Plain
// values; control_plane.h owns them.
#pragma once

#include <vector>

#include "controlplane/memory.h"

namespace weft::controlplane {

struct Prefetch {
  RequestId request{};
  StepId step{};                      // of the plan with its loads
  BlockPath path;                     // the registered beginning, then the blocks that are loaded
  std::vector<kv::BlockHash> hashes;  // of the latter
  kv::Residency residency;
};

}  // namespace weft::controlplane
