#include "daemon/start_progress.h"

#include <algorithm>

namespace weft::daemon {

void StartProgress::update(std::span<const TensorCount> ranks) {
  uint64_t most = 0;
  for (const TensorCount& rank : ranks) most = std::max(most, rank.total);
  TensorCount now;
  for (const TensorCount& rank : ranks) {
    now.done += rank.done;
    now.total += rank.total > 0 ? rank.total : most;
  }
  // Fractions, multiplied out: tensors are thousands.
  if (shown_.total == 0 || now.done * shown_.total > shown_.done * now.total) shown_ = now;
}

}  // namespace weft::daemon
