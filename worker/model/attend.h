// Attention partials of many rows: lists the entries each row reads, spreads (row, shard) over threads,
// merges.
//
// Reads pages of this rank and, for whole rows, of others; counts the latter, each entry once per span, part
// and layer however many rows read it. Called by the thread that runs the step.
#pragma once

#include "worker/model/step_state.h"

namespace weft::worker {

// Query heads of one row that read the same part, against the entries of that row which this rank reads.
struct AttendJob {
  int64_t home = 0;             // home row
  int part = 0;                 // of the entries
  const void* query = nullptr;  // [heads][entry width], cache dtype
  int64_t heads = 0;
  // Out, merged over the shards this rank reads; one of:
  float* partials = nullptr;  // [heads][value width + 2]
  float* finished = nullptr;  // [heads][value width]: o / l, for rows whose every shard is read here
};

// Runs all jobs for one layer. Jobs of one span and part are consecutive: they share its lists of entries.
void attend(StepState& state, int64_t layer, std::span<const AttendJob> jobs);

}  // namespace weft::worker
