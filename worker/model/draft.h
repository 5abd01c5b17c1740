// The draft layers: guesses of the tokens that follow the one a step has just drawn (multi-token prediction).
//
// The *lead* row of a span is the last one whose input holds: drafts before it equal what was drawn. Rounds
// 0 … K − 1 run one draft layer each over all rows of the step, whoever asks for guesses, so that its entries
// are there for every position and blocks can be shared. In round k row t reads what came out of the layer
// before (h_t of the model, after its norm) and the embedding of token t + 1 + k, which is literal, was drawn
// by this very step, or is a guess of an earlier round; the lead row's logits guess the token after that.
// Each further round runs the last layer on one row for each span that wants more guesses, at the next
// position, on the last guess and the hidden state behind it.
//
// What a round writes beyond the lead row is written again by the step that computes those rows. With K > 1,
// entries of the last K − 1 rows were made with guesses, and stay as they are if these do not hold. Which row
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
  // After the head of a model whose draft layers are loaded; state.x holds the residual of the home rows.
  // Leaves layout, views and state.x as the last round had them, and all bytes counted by the plan's spans.
  Result<void> run(const wire::StepPlan& plan, wire::StepResult& result);

 private:
  struct Lead {
    int span = 0;                 // in the plan
    int64_t first = 0;            // position of the lead row
    int64_t position = 0;         // of the row whose logits give the guess
    HeadRow row;                  // in the present layout
    uint32_t guess = 0;           // of the round before
    std::vector<float> hidden;    // behind it, normed; where the row is at home
    std::vector<int32_t> chosen;  // keys that the lead row chose, if further rows are to read the same
    bool chose = false;
  };

  // Finds the leads, and the tokens that follow each row of the spans that need them here.
  Result<void> find_leads(const wire::StepPlan& plan);
  Result<int64_t> lead_of(const wire::StepPlan& plan, const SpanRoute& route);
  Result<void> start_all_rows(int64_t layer);
  Result<void> start_leads(const wire::StepPlan& plan);
  // x := eh_proj [RMSNorm(E[token]) ‖ RMSNorm(hidden)] for the home rows; `hidden` is [home rows][hidden].
  void combine(int64_t layer, const std::vector<uint32_t>& tokens, const float* hidden);
  Result<void> run_layer(int64_t layer);
  Result<void> guess(const wire::StepPlan& plan, int64_t round, wire::StepResult& result);
  void keep(Lead& lead, int64_t home, const float* norm);

  int64_t layers() const { return state_.config.draft_layers; }
  const DraftWeights& weights(int64_t layer) const {
    return state_.weights.draft[static_cast<size_t>(layer)];
  }

  StepState& state_;
  AttentionPhase& attention_;
  FeedForwardPhase& feed_forward_;
  Head& head_;
  std::vector<Lead> leads_;  // of the spans that want a guess in this round
  // By span of the plan: the known tokens from the one after its first row on, guesses last.
  std::vector<std::vector<uint32_t>> following_;
  std::vector<float> hidden_, both_;
  Operand operand_;
};

}  // namespace weft::worker
