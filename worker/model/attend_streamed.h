// Attention over a context whose remote part is copied in shard by shard, one ahead: for devices that cannot
// read each other's pages in place.
//
// While one shard is computed, the entries of the next one that lie on other ranks are copied into the other
// of two buffers. Shards come in the order in which the tree merges them, so that few partials of a row are
// alive. Same bits as reading in place; more bytes where rows select
// entries or see a window only, since shards are copied whole.
#pragma once

#include "worker/model/attend.h"

namespace weft::worker {

// The jobs of one span and part, some of whose entries are on other ranks.
void attend_streamed(StepState& state, int64_t layer, std::span<const AttendJob> jobs);

}  // namespace weft::worker
