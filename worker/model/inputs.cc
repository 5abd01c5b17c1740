#include "worker/model/inputs.h"

#include <cmath>

#include "kernels/elementwise.h"

namespace weft::worker {
namespace {

Result<uint32_t> in_vocabulary(const StepState& state, uint32_t token) {
  if (static_cast<int64_t>(token) < state.config.vocabulary) return token;
  return error(ErrorCode::kInvalidArgument, "token " + std::to_string(token) + " is outside the vocabulary",
               "plan");
}

}  // namespace

Result<uint32_t> drawn_token(StepState& state, StepId step, uint32_t sample_index) {
  const auto token =
      state.setup.control->wait_token(step, sample_index, state.epoch, state.exchange.deadline());
  if (token) return in_vocabulary(state, *token);
  if (state.setup.control->aborted(state.epoch)) return error(ErrorCode::kCancelled, "the epoch was aborted");
  return error(ErrorCode::kDeadlineExceeded, "token " + std::to_string(sample_index) + " of step " +
                                                 std::to_string(number(step)) + " did not appear");
}

Result<void> take_tokens(StepState& state, const wire::StepPlan& plan) {
  state.tokens.resize(static_cast<size_t>(state.home_count()));
  for (int64_t i = 0; i < state.home_count(); ++i) {
    const HomeRow& row = state.home()[static_cast<size_t>(i)];
    const wire::Span& span = plan.spans(row.span);
    uint32_t& token = state.tokens[static_cast<size_t>(i)];
    if (span.tokens_size() > 0) {
      TRY(token, in_vocabulary(state, span.tokens(static_cast<int>(row.row))));
    } else {
      TRY(token, drawn_token(state, StepId{span.input().step()}, span.input().sample_index()));
    }
  }
  return {};
}

void embed(const StepState& state, uint32_t token, float* out) {
  const int64_t d = state.config.hidden;
  const auto row_bytes = d * static_cast<int64_t>(dtype_bytes(state.weights.dtype));
  kernels::convert_to_f32(state.weights.embedding + token * row_bytes, state.weights.dtype, d, out);
}

void turn_angles(StepState& state) {
  const int64_t half = state.config.rope / 2;
  scratch(state.cosine, state.home_count() * half);
  scratch(state.sine, state.home_count() * half);
  for (int64_t i = 0; i < state.home_count(); ++i) {
    const auto position = static_cast<double>(state.home()[static_cast<size_t>(i)].position);
    for (int64_t j = 0; j < half; ++j) {
      const double angle = position * state.config.inverse_frequency[static_cast<size_t>(j)];
      state.cosine[static_cast<size_t>(i * half + j)] =
          static_cast<float>(std::cos(angle) * state.config.rope_factor);
      state.sine[static_cast<size_t>(i * half + j)] =
          static_cast<float>(std::sin(angle) * state.config.rope_factor);
    }
  }
}

}  // namespace weft::worker
