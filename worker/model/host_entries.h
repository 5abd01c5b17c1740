// Entries of host blocks that decode rows select: fetched into the hot buffer, once for all rows of a span.
//
// Called by the thread that runs the step; what is fetched is counted as `host`, what was there as hits.
#pragma once

#include "worker/model/attend.h"

namespace weft::worker {

// Brings what these jobs of one span and part select of host blocks, as far as the hot buffer has room for
// it.
void fetch_selected(StepState& state, int64_t layer, std::span<const AttendJob> jobs);
// Where the hot buffer has an entry of this layer; nullptr: nowhere.
const std::byte* hot_entry(const StepState& state, const CacheView& view, int64_t layer, int32_t position);

}  // namespace weft::worker
