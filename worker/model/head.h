// The last part of a step: final norm, vocabulary slices, full rows of logits at the sampler, sampling,
// digests.
//
// Rows go through in batches of kHeadBatch, so that an outbox holds them whatever a step asks for. A row of
// logits with NaN or infinity gives no token; its cell of the token table gets 0, so that no later step
// waits.
#pragma once

#include "worker/model/step_state.h"

namespace weft::worker {

class Head {
 public:
  explicit Head(StepState& state) : state_(state) {}
  // Passes the head's exchange points and fills samples and digests of the rows whose sampler is this rank.
  Result<void> run(const wire::StepPlan& plan, wire::StepResult& result);

 private:
  Result<void> batch(int64_t index, const wire::StepPlan& plan, wire::StepResult& result);
  // The normed last hidden states of the batch's rows that this rank can give, and all of them after the
  // exchange.
  Result<void> gather(int64_t index, std::span<const HeadRow> rows);
  void finish_row(const HeadRow& row, const wire::StepPlan& plan, const float* logits,
                  wire::StepResult& result);

  StepState& state_;
  std::vector<float> hidden_, slice_, logits_;
  Operand operand_;
};

}  // namespace weft::worker
