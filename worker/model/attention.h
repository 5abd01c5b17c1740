// The attention half of a layer on one rank: from the residual of its home rows to the residual after o_proj.
//
// One path for every phase and kind of attention (attention_ends.h has what differs). Owned rows and rows of
// dp groups are whole: all heads, all shards, nothing sent. Wide rows compute this rank's head slice; under
// dcp the queries of the c-group come in, partials of own shards go out, and the owner of each head slice
// merges.
#pragma once

#include <memory>

#include "worker/model/selection.h"
#include "worker/model/step_state.h"

namespace weft::worker {

class AttentionPhase {
 public:
  explicit AttentionPhase(StepState& state);
  ~AttentionPhase();
  // Runs layer `layer` up to and including exchange point kAttentionSums; leaves the new residual in state.x
  // and the normed rows of the whole step in state.normed.
  Result<void> run(int64_t layer);
  void begin_step();  // when the step's layout is there, before its first layer

 private:
  struct Work;
  std::unique_ptr<Work> work_;
};

}  // namespace weft::worker
