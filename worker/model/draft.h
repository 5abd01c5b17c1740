// The draft layer: guesses of the tokens that follow the one a step has just drawn (multi-token prediction).
//
// Round 0 runs the layer over all rows of the step, whoever asks for guesses, so that its entries are there
// for every position and blocks can be shared: row t reads h_t (after the model's norm) and the embedding of
// token t + 1, which is literal or was drawn by this very step. The *lead* row of a span is the last one
// whose input holds: drafts before it equal what was drawn. Its logits guess the token after the drawn one.
// Each further round runs one row for each span that wants more guesses, at the next position, on the last
// guess and the hidden state behind it.
//
// What a round writes beyond the lead row is written again by the step that computes those rows. Which row
// leads follows from the plan and the token table alone, so all ranks agree. Guesses only ever decide how
// many steps an answer takes. Belongs to the thread that runs the step.
#pragma once

#include "worker/model/attention.h"
#include "worker/model/feed_forward.h"
#include "worker/model/head.h"

namespace weft::worker {

class DraftPhase {
 public:
  DraftPhase(StepState& state, AttentionPhase& attention, FeedForwardPhase& feed_forward, Head& head)
      : state_(state), attention_(attention), feed_forward_(feed_forward), head_(head) {}
  // After the head of a model whose draft layer is loaded; state.x holds the residual of the home rows.
  // Leaves layout, views and state.x as the last round had them, and all bytes counted by the plan's spans.
  Result<void> run(const wire::StepPlan& plan, wire::StepResult& result);

 private:
  struct Lead {
    int span = 0;               // in the plan
    int64_t position = 0;       // of the row whose logits give the guess
    HeadRow row;                // in the present layout
    uint32_t guess = 0;         // of the round before
    std::vector<float> hidden;  // behind it, normed; where the row is at home
  };

  // The token after a row of round 0.
  Result<uint32_t> next_token(const wire::StepPlan& plan, const HomeRow& row);
  Result<void> start_all_rows(const wire::StepPlan& plan);
  Result<void> find_leads(const wire::StepPlan& plan);
  Result<void> start_leads(const wire::StepPlan& plan);
  // x := eh_proj [RMSNorm(E[token]) ‖ RMSNorm(hidden)] for the home rows; `hidden` is [home rows][hidden].
  void combine(const std::vector<uint32_t>& tokens, const float* hidden);
  Result<void> run_layer();
  Result<void> guess(const wire::StepPlan& plan, int64_t round, wire::StepResult& result);

  StepState& state_;
  AttentionPhase& attention_;
  FeedForwardPhase& feed_forward_;
  Head& head_;
  std::vector<Lead> leads_;  // of the spans that want a guess in this round
  std::vector<float> hidden_, both_;
  Operand operand_;
};

}  // namespace weft::worker
