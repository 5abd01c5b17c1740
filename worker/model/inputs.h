// What the rows of a step start from: tokens, their embeddings, and the angles of their positions.
//
// Belongs to the thread that runs the step.
#pragma once

#include "worker/model/step_state.h"

namespace weft::worker {

// The token that a step's sample drew, as soon as its sampler has written it. kCancelled: the epoch was
// aborted; kDeadlineExceeded; kInvalidArgument: a token outside the vocabulary.
Result<uint32_t> drawn_token(StepState& state, StepId step, uint32_t sample_index);
// The input token of every home row: a literal, or what another step drew. Fills state.tokens.
Result<void> take_tokens(StepState& state, const wire::StepPlan& plan);
// One token's embedding, [hidden].
void embed(const StepState& state, uint32_t token, float* out);
// Cosines and sines of every home row, in double, so that position 10^6 is as exact as position 1.
void turn_angles(StepState& state);

}  // namespace weft::worker
