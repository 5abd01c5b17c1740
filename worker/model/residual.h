// How both halves of a layer end: the sums that the ranks published, added to the residual of the home rows.
#pragma once

#include <cstdint>
#include <functional>

#include "worker/model/step_state.h"
#include "worker/model/tree_sum.h"

namespace weft::worker {

// residual = (sum + bias) + residual, the left operand first; `bias` may be null. `sum` is overwritten.
void add_to_residual(float* sum, const float* bias, float* residual, int64_t width);

// After an exchange point whose outboxes begin with [nodes][outbox_rows][hidden]: for each of the first
// `home_rows` home rows, the tree sum of its row `outbox_row(home)` of all nodes, and the bias (or null), is
// added to its residual, and done(home) is called. Threads share the rows.
void add_sums(StepState& state, const SegmentPresence& presence, const float* bias, int64_t outbox_rows,
              int64_t home_rows, const std::function<int64_t(int64_t home)>& outbox_row,
              const std::function<void(int64_t home)>& done);

// Bytes of one row's sums that other ranks publish: what the meter charges for it.
int64_t remote_sum_bytes(const StepState& state, const SegmentPresence& presence);

}  // namespace weft::worker
