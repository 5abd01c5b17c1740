// Attention partials of many rows: lists the entries each row reads, spreads (row, shard) over threads,
// merges.
//
// Reads pages of this rank and, for whole rows, of others; counts the latter, each entry once per span, part
// and layer however many rows read it. Called by the thread that runs the step.
#pragma once

#include "kernels/attention.h"
#include "worker/model/step_state.h"

namespace weft::worker {

// Query heads of one row that read the same part, against the entries of that row which this rank reads.
struct AttendJob {
  int span = 0;
  int64_t position = 0;
  int64_t home = -1;            // home row, for what it selected; −1: of another rank, and dense
  int part = 0;                 // of the entries
  const void* query = nullptr;  // [heads][key width], query dtype
  int64_t heads = 0;
  // Out, merged over the shards this rank reads; one of:
  float* partials = nullptr;  // [heads][value width + 2]
  float* finished = nullptr;  // [heads][value width]: o / l, for rows whose every shard is read here
};

// Runs all jobs for one layer. Jobs of one span and part are consecutive: they share its lists of entries.
void attend(StepState& state, int64_t layer, std::span<const AttendJob> jobs);

// ---- for both ways to reach entries on other ranks: attend.cc reads them in place, attend_streamed.cc
// copies

// Shards in the order in which the tree merges them: after the i-th of them, counting from 1, as many
// neighbours merge as i has trailing zeros. So few partials of a row are alive at once: one for each bit of
// the count.
inline constexpr std::array<int, kv::kShards> kTreeOrder = {0, 4, 2, 6, 1, 5, 3, 7};
inline constexpr int64_t kTreeLevels = 4;

// Reads all that it may see, and selects nothing.
bool is_dense(const StepState& state, const AttendJob& job);
// Jobs of one span and part, cut into kernel calls: consecutive dense jobs of as many heads go together, for
// the later row's list begins with the earlier one's, so that they share the reading of entries.
std::vector<std::span<const AttendJob>> attend_calls(const StepState& state, std::span<const AttendJob> jobs);
// One such call over the entries of one shard; `next`: what the same thread will probably read after it.
void attend_rows(const StepState& state, int64_t heads, std::span<const kernels::AttentionRow> rows,
                 const void* const* entries, std::span<const void* const> next = {});

}  // namespace weft::worker
