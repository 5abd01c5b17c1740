// The last part of a step: final norm, vocabulary slices, full rows of logits at the sampler, sampling,
// digests.
//
// Rows go through in batches of kHeadBatch, so that an outbox holds them whatever a step asks for. A row of
// logits with NaN or infinity gives no token; its cell of the token table gets 0, so that no later step
// waits.
#pragma once

#include <functional>

#include "worker/model/step_state.h"

namespace weft::worker {

class Head {
 public:
  explicit Head(StepState& state) : state_(state) {}
  // The layout's head rows: passes the head's exchange points, fills samples and digests of those whose
  // sampler is this rank.
  Result<void> run(const wire::StepPlan& plan, wire::StepResult& result);
  // `take` gets the logits of every row (by number) whose sampler is this rank. `norm` comes before the head.
  using Take = std::function<void(int64_t row, const float* logits)>;
  Result<void> run(std::span<const HeadRow> rows, const float* norm, const Take& take);
  // Draws the token of a span of the plan that follows `position`, into a cell of the token table.
  void draw(const wire::StepPlan& plan, int span, uint32_t cell, int64_t position, const float* logits,
            wire::StepResult& result);

 private:
  Result<void> batch(std::span<const HeadRow> rows, const float* norm, const Take& take);
  // The normed last hidden states of the batch's rows that this rank can give, and all of them after the
  // exchange.
  Result<void> gather(std::span<const HeadRow> rows, const float* norm);
  // [rows][columns] of the logits, from the normed hidden states in hidden_.
  void slice(int64_t rows, kv::Range columns, float* out);
  void finish_row(const HeadRow& row, const wire::StepPlan& plan, const float* logits,
                  wire::StepResult& result);

  StepState& state_;
  std::vector<float> hidden_, slice_, logits_;
  Operand operand_;
};

}  // namespace weft::worker
