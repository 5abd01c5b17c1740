#include "worker/model/draft.h"

#include <algorithm>
#include <utility>

#include "kernels/elementwise.h"
#include "worker/model/cache_view.h"
#include "worker/model/inputs.h"

namespace weft::worker {

Result<void> DraftPhase::run(const wire::StepPlan& plan, wire::StepResult& result) {
  TRY_VOID(start_all_rows(plan));
  TRY_VOID(run_layer());
  TRY_VOID(find_leads(plan));
  std::vector<kv::CrossedBytes> crossed;  // by span of the plan
  for (int64_t round = 0;; ++round) {
    std::erase_if(leads_, [&](const Lead& lead) { return plan.spans(lead.span).draft_tokens() <= round; });
    if (leads_.empty()) break;
    if (round > 0) {
      if (round == 1) crossed = std::move(state_.crossed);
      TRY_VOID(start_leads(plan));
      TRY_VOID(run_layer());
    }
    TRY_VOID(guess(plan, round, result));
    if (round == 0) continue;
    for (size_t i = 0; i < leads_.size(); ++i)
      crossed[static_cast<size_t>(leads_[i].span)] += state_.crossed[i];
  }
  if (!crossed.empty()) state_.crossed = std::move(crossed);
  return {};
}

Result<void> DraftPhase::run_layer() {
  const int64_t layer = state_.config.main_layers();
  attention_.begin_step();
  TRY_VOID(attention_.run(layer));
  return feed_forward_.run(layer);
}

void DraftPhase::combine(const std::vector<uint32_t>& tokens, const float* hidden) {
  const ModelConfig& config = state_.config;
  const DraftWeights& w = state_.weights.draft;
  const int64_t d = config.hidden, n = state_.home_count();
  scratch(both_, n * 2 * d);
  for_rows(state_.parallel, n, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* row = both_.data() + i * 2 * d;
      embed(state_, tokens[static_cast<size_t>(i)], row);
      kernels::rms_norm(row, d, w.embedding_norm, config.rms_eps, 1, d, row, d);
      kernels::rms_norm(hidden + i * d, d, w.hidden_norm, config.rms_eps, 1, d, row + d, d);
    }
  });
  scratch(state_.x, n * d);
  if (n == 0) return;
  kernels::Gemm p;
  p.weights = w.combine;
  p.rows = n;
  p.x = operand_.of(state_.parallel, p.weights.dtype, both_.data(), n * 2 * d);
  p.x_stride = 2 * d;
  p.y = state_.x.data();
  p.y_stride = d;
  kernels::gemm(p, state_.parallel);
}

// ---- round 0 ------------------------------------------------------------------------------------------

Result<uint32_t> DraftPhase::next_token(const wire::StepPlan& plan, const HomeRow& row) {
  const wire::Span& span = plan.spans(row.span);
  const int64_t sampled = row.row - (int64_t{span.rows()} - span.sample_rows());
  if (sampled >= 0)
    return drawn_token(state_, StepId{plan.step()}, span.sample_index() + static_cast<uint32_t>(sampled));
  if (row.row + 1 < span.tokens_size()) return span.tokens(static_cast<int>(row.row + 1));
  return span.next_token();
}

Result<void> DraftPhase::start_all_rows(const wire::StepPlan& plan) {
  const int64_t d = state_.config.hidden, n = state_.home_count();
  std::vector<uint32_t> tokens;
  for (const HomeRow& row : state_.home()) {
    TRY(const uint32_t token, next_token(plan, row));
    if (static_cast<int64_t>(token) >= state_.config.vocabulary) {
      return error(ErrorCode::kInvalidArgument,
                   "token " + std::to_string(token) + " is outside the vocabulary", "plan");
    }
    tokens.push_back(token);
  }
  scratch(hidden_, n * d);
  for_rows(state_.parallel, n, 16, [&](int64_t begin, int64_t end) {
    kernels::rms_norm(state_.x.data() + begin * d, d, state_.weights.final_norm, state_.config.rms_eps,
                      end - begin, d, hidden_.data() + begin * d, d);
  });
  combine(tokens, hidden_.data());
  return {};
}

Result<void> DraftPhase::find_leads(const wire::StepPlan& plan) {
  leads_.clear();
  for (const SpanRoute& route : state_.layout.spans()) {
    const wire::Span& span = plan.spans(route.index);
    if (span.draft_tokens() == 0) continue;
    int64_t row = 0;
    if (span.prefill()) {
      row = route.rows - 1;
    } else {
      for (; row + 1 < route.rows; ++row) {
        TRY(const uint32_t drawn,
            drawn_token(state_, StepId{plan.step()}, span.sample_index() + static_cast<uint32_t>(row)));
        if (drawn != span.tokens(static_cast<int>(row + 1))) break;
      }
    }
    Lead lead;
    lead.span = route.index;
    lead.position = route.start + row;
    lead.row = head_row(route, row, static_cast<int>(span.sampler_rank()), state_.rank_count);
    leads_.push_back(std::move(lead));
  }
  return {};
}

// ---- further rounds -----------------------------------------------------------------------------------

// One row for each lead, as a plan of its own, from which layout and views follow as for any step.
Result<void> DraftPhase::start_leads(const wire::StepPlan& plan) {
  wire::StepPlan round;
  round.set_step(plan.step());
  for (Lead& lead : leads_) {
    wire::Span* span = round.add_spans();
    *span = plan.spans(lead.span);
    span->set_start(static_cast<uint64_t>(++lead.position));
    span->set_rows(1);
    span->set_sample_rows(0);
    span->set_digest(false);
    span->clear_input();
    span->clear_tokens();
    span->add_tokens(lead.guess);
  }
  TRY(state_.layout, StepLayout::make(round, state_.config.index_topk, state_.rank_count));
  state_.crossed.assign(leads_.size(), {});
  TRY_VOID(make_views(state_, round));
  TRY_VOID(take_tokens(state_, round));
  turn_angles(state_);
  const int64_t d = state_.config.hidden;
  scratch(hidden_, state_.home_count() * d);
  for (int64_t i = 0; i < state_.home_count(); ++i) {
    const Lead& lead = leads_[static_cast<size_t>(state_.home()[static_cast<size_t>(i)].span)];
    CHECK_EQ(std::ssize(lead.hidden), d);
    std::copy(lead.hidden.begin(), lead.hidden.end(), hidden_.begin() + i * d);
  }
  combine(state_.tokens, hidden_.data());
  for (size_t i = 0; i < leads_.size(); ++i) {
    Lead& lead = leads_[i];
    lead.row = head_row(state_.layout.spans()[i], 0, lead.row.sampler, state_.rank_count);
  }
  return {};
}

// ---- guesses ------------------------------------------------------------------------------------------

// Draws every lead's guess with the counters that its target will be drawn with, so that sampled guesses hold
// as often as they can; and keeps what the next round starts from.
Result<void> DraftPhase::guess(const wire::StepPlan& plan, int64_t round, wire::StepResult& result) {
  const int64_t d = state_.config.hidden;
  for (int64_t i = 0; i < state_.home_count(); ++i) {
    const HomeRow& row = state_.home()[static_cast<size_t>(i)];
    for (Lead& lead : leads_) {
      if (lead.row.global != row.global) continue;
      lead.hidden.resize(static_cast<size_t>(d));
      kernels::rms_norm(state_.x.data() + i * d, d, state_.weights.draft.norm, state_.config.rms_eps, 1, d,
                        lead.hidden.data(), d);
    }
  }
  std::vector<HeadRow> rows;
  for (const Lead& lead : leads_) rows.push_back(lead.row);
  const auto cell = [&](const wire::Span& span) {
    return span.sample_index() + span.sample_rows() + static_cast<uint32_t>(round);
  };
  TRY_VOID(head_.run(rows, state_.weights.draft.norm, [&](int64_t i, const float* logits) {
    const Lead& lead = leads_[static_cast<size_t>(i)];
    const wire::Span& span = plan.spans(lead.span);
    if (state_.setup.on_guess) {
      state_.setup.on_guess(span.request(), lead.position - round, round,
                            {logits, static_cast<size_t>(state_.config.vocabulary)});
    }
    head_.draw(plan, lead.span, cell(span), lead.position + 1, logits, result);
  }));
  for (Lead& lead : leads_) {
    const wire::Span& span = plan.spans(lead.span);
    if (span.draft_tokens() <= round + 1) continue;
    TRY(lead.guess, drawn_token(state_, StepId{plan.step()}, cell(span)));
  }
  return {};
}

}  // namespace weft::worker
