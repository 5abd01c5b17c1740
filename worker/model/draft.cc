#include "worker/model/draft.h"

#include <algorithm>
#include <utility>

#include "kernels/elementwise.h"
#include "worker/model/cache_view.h"
#include "worker/model/inputs.h"

namespace weft::worker {

Result<void> DraftPhase::run(const wire::StepPlan& plan, wire::StepResult& result) {
  TRY_VOID(find_leads(plan));
  std::vector<kv::CrossedBytes> crossed;  // by span of the plan
  std::vector<StepState::HotCount> hot;   // the same
  for (int64_t round = 0;; ++round) {
    std::erase_if(leads_, [&](const Lead& lead) { return plan.spans(lead.span).draft_tokens() <= round; });
    if (round < layers()) {
      TRY_VOID(start_all_rows(round));
    } else {
      if (leads_.empty()) break;
      if (round == layers()) {
        crossed = std::move(state_.crossed);
        hot = std::move(state_.hot_counts);
      }
      TRY_VOID(start_leads(plan));
    }
    TRY_VOID(run_layer(std::min(round, layers() - 1)));
    if (leads_.empty()) continue;
    TRY_VOID(guess(plan, round, result));
    for (size_t i = 0; round >= layers() && i < leads_.size(); ++i) {
      const auto span = static_cast<size_t>(leads_[i].span);
      crossed[span] += state_.crossed[i];
      hot[span] += state_.hot_counts[i];
    }
  }
  if (!crossed.empty()) {
    state_.crossed = std::move(crossed);
    state_.hot_counts = std::move(hot);
  }
  return {};
}

Result<void> DraftPhase::run_layer(int64_t layer) {
  TRY_VOID(attention_.run(state_.config.main_layers() + layer));
  return feed_forward_.run(state_.config.main_layers() + layer);
}

void DraftPhase::combine(int64_t layer, const std::vector<uint32_t>& tokens, const float* hidden) {
  const ModelConfig& config = state_.config;
  const DraftWeights& w = weights(layer);
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

// ---- rounds over all rows -----------------------------------------------------------------------------

// The last row of a span whose input holds.
Result<int64_t> DraftPhase::lead_of(const wire::StepPlan& plan, const SpanRoute& route) {
  const wire::Span& span = plan.spans(route.index);
  if (span.prefill()) return route.rows - 1;
  int64_t row = 0;
  for (; row + 1 < route.rows; ++row) {
    TRY(const uint32_t drawn,
        drawn_token(state_, StepId{plan.step()}, span.sample_index() + static_cast<uint32_t>(row)));
    if (drawn != span.tokens(static_cast<int>(row + 1))) break;
  }
  return row;
}

Result<void> DraftPhase::find_leads(const wire::StepPlan& plan) {
  leads_.clear();
  following_.assign(state_.layout.spans().size(), {});
  std::vector<uint8_t> at_home(following_.size(), 0);
  for (const HomeRow& row : state_.home()) at_home[static_cast<size_t>(row.span)] = 1;
  for (const SpanRoute& route : state_.layout.spans()) {
    const wire::Span& span = plan.spans(route.index);
    if (span.draft_tokens() == 0 && at_home[static_cast<size_t>(route.index)] == 0) continue;
    TRY(const int64_t row, lead_of(plan, route));
    std::vector<uint32_t>& following = following_[static_cast<size_t>(route.index)];
    for (int64_t i = 1; i <= row; ++i) following.push_back(span.tokens(static_cast<int>(i)));
    const int64_t sampled = row - (route.rows - span.sample_rows());
    if (sampled >= 0) {
      TRY(const uint32_t drawn,
          drawn_token(state_, StepId{plan.step()}, span.sample_index() + static_cast<uint32_t>(sampled)));
      following.push_back(drawn);
    }
    following.insert(following.end(), span.next_tokens().begin(), span.next_tokens().end());
    if (following.empty()) return error(ErrorCode::kInvalidArgument, "no token follows a span", "plan");
    if (span.draft_tokens() == 0) continue;
    Lead lead;
    lead.span = route.index;
    lead.first = lead.position = route.start + row;
    lead.row = head_row(route, row, static_cast<int>(span.sampler_rank()), state_.rank_count);
    leads_.push_back(std::move(lead));
  }
  return {};
}

// Rows beyond the lead one, and rows whose token is not even guessed, read the last token that is known.
Result<void> DraftPhase::start_all_rows(int64_t layer) {
  const int64_t d = state_.config.hidden, n = state_.home_count();
  std::vector<uint32_t> tokens;
  for (const HomeRow& row : state_.home()) {
    const std::vector<uint32_t>& following = following_[static_cast<size_t>(row.span)];
    const uint32_t token =
        following[static_cast<size_t>(std::min(row.row + layer, std::ssize(following) - 1))];
    if (static_cast<int64_t>(token) >= state_.config.vocabulary) {
      return error(ErrorCode::kInvalidArgument,
                   "token " + std::to_string(token) + " is outside the vocabulary", "plan");
    }
    tokens.push_back(token);
  }
  const float* norm = layer == 0 ? state_.weights.final_norm : weights(layer - 1).norm;
  scratch(hidden_, n * d);
  for_rows(state_.parallel, n, 16, [&](int64_t begin, int64_t end) {
    kernels::rms_norm(state_.x.data() + begin * d, d, norm, state_.config.rms_eps, end - begin, d,
                      hidden_.data() + begin * d, d);
  });
  combine(layer, tokens, hidden_.data());
  attention_.begin_step();
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
  state_.hot_counts.assign(leads_.size(), {});
  TRY_VOID(make_views(state_, round));
  TRY_VOID(take_tokens(state_, round));
  turn_angles(state_);
  attention_.begin_step();
  state_.selection_given.assign(leads_.size(), 0);
  for (size_t i = 0; i < leads_.size(); ++i) state_.selection_given[i] = leads_[i].chose ? 1 : 0;
  const int64_t d = state_.config.hidden, k = state_.config.index_topk;
  scratch(hidden_, state_.home_count() * d);
  for (int64_t i = 0; i < state_.home_count(); ++i) {
    const Lead& lead = leads_[static_cast<size_t>(state_.home()[static_cast<size_t>(i)].span)];
    CHECK_EQ(std::ssize(lead.hidden), d);
    std::copy(lead.hidden.begin(), lead.hidden.end(), hidden_.begin() + i * d);
    if (!lead.chose) continue;
    std::copy(lead.chosen.begin(), lead.chosen.end(), state_.selected.begin() + i * k);
    state_.selected_count[static_cast<size_t>(i)] = static_cast<int32_t>(lead.chosen.size());
  }
  combine(layers() - 1, state_.tokens, hidden_.data());
  for (size_t i = 0; i < leads_.size(); ++i) {
    Lead& lead = leads_[i];
    lead.row = head_row(state_.layout.spans()[i], 0, lead.row.sampler, state_.rank_count);
  }
  return {};
}

// ---- guesses ------------------------------------------------------------------------------------------

// What a further round starts from: the hidden state, and the selection if it is kept. A row that saw no more
// keys than an indexer chooses read them all, and the next one chooses for itself.
void DraftPhase::keep(Lead& lead, int64_t home, const float* norm) {
  const int64_t d = state_.config.hidden;
  lead.hidden.resize(static_cast<size_t>(d));
  kernels::rms_norm(state_.x.data() + home * d, d, norm, state_.config.rms_eps, 1, d, lead.hidden.data(), d);
  if (!lead.chose) return;
  const int32_t* chosen = state_.selected.data() + home * state_.config.index_topk;
  lead.chosen.assign(chosen, chosen + std::max(state_.selected_count[static_cast<size_t>(home)], 0));
}

// Draws every lead's guess with the counters that its target will be drawn with, so that sampled guesses hold
// as often as they can; and keeps what the next round starts from.
Result<void> DraftPhase::guess(const wire::StepPlan& plan, int64_t round, wire::StepResult& result) {
  const float* norm = weights(std::min(round, layers() - 1)).norm;
  for (Lead& lead : leads_) {
    lead.chose = state_.config.draft_keeps_selection && lead.first + 1 > state_.config.index_topk;
    for (int64_t i = 0; i < state_.home_count(); ++i) {
      if (lead.row.global == state_.home()[static_cast<size_t>(i)].global) keep(lead, i, norm);
    }
  }
  std::vector<HeadRow> rows;
  for (const Lead& lead : leads_) rows.push_back(lead.row);
  const auto cell = [&](const wire::Span& span) {
    return span.sample_index() + span.sample_rows() + static_cast<uint32_t>(round);
  };
  TRY_VOID(head_.run(rows, norm, [&](int64_t i, const float* logits) {
    const Lead& lead = leads_[static_cast<size_t>(i)];
    const wire::Span& span = plan.spans(lead.span);
    if (state_.setup.on_guess) {
      state_.setup.on_guess(span.request(), lead.first, round,
                            {logits, static_cast<size_t>(state_.config.vocabulary)});
    }
    head_.draw(plan, lead.span, cell(span), lead.first + round + 1, logits, result);
  }));
  for (Lead& lead : leads_) {
    const wire::Span& span = plan.spans(lead.span);
    if (span.draft_tokens() <= round + 1 && round + 1 >= layers()) continue;
    TRY(lead.guess, drawn_token(state_, StepId{plan.step()}, cell(span)));
    following_[static_cast<size_t>(lead.span)].push_back(lead.guess);
  }
  return {};
}

}  // namespace weft::worker
