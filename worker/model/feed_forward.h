// The feed-forward half of a layer on one rank: its segments and experts for every row of the step.
//
// Reads state.normed (all rows), passes exchange point kFeedForwardSums, and adds the tree sum of all ranks
// to the residual of the home rows.
#pragma once

#include <memory>

#include "worker/model/step_state.h"

namespace weft::worker {

class FeedForwardPhase {
 public:
  explicit FeedForwardPhase(StepState& state);
  ~FeedForwardPhase();
  Result<void> run(int64_t layer);

 private:
  struct Work;
  std::unique_ptr<Work> work_;
};

}  // namespace weft::worker
