// How both halves of a layer end: the sums that the ranks published, added to the residual of the home rows.
#pragma once

#include <cstdint>
#include <functional>

#include "worker/model/step_state.h"
#include "worker/model/tree_sum.h"

namespace weft::worker {

// residual = (sum + bias) + residual, the left operand first; `bias` may be null. `sum` is overwritten.
void add_to_residual(float* sum, const float* bias, float* residual, int64_t width);

// Sums of the same rows that the ranks of a group published at an exchange point.
struct PublishedSums {
  kv::Grouping ranks;
  int64_t rows = 0;  // of each node
  std::function<int64_t(int rank)> first =
      nullptr;  // rows of `hidden` floats before its sums in a rank's outbox
};

// For the home rows in a range: the tree sum of row `outbox_row(home)` of all nodes, and the bias (or null),
// is added to the residual, and done(home) is called. Threads share the rows.
void add_sums(StepState& state, const PublishedSums& sums, const SegmentPresence& presence, const float* bias,
              kv::Range home, const std::function<int64_t(int64_t home)>& outbox_row,
              const std::function<void(int64_t home)>& done);

// Bytes of one row's sums that the other ranks of a group publish: what the meter charges for it.
int64_t remote_sum_bytes(const StepState& state, const kv::Grouping& ranks, const SegmentPresence& presence);

}  // namespace weft::worker
