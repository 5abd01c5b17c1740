// Changing the placement of a running sequence.
//
// Decided at the event (price, room, refusal) and applied by the next plan that runs the sequence: a new
// table, copies for the pages that the new readers lack, and, once that step is acknowledged by all ranks,
// pages outside the new residency are dropped. Blocks that other sequences use keep all their pages. Between
// decision and application the room for the missing pages is reserved, so an accepted change always happens.
#pragma once

#include <string>

#include "controlplane/memory.h"
#include "controlplane/sequence.h"

namespace weft::controlplane {

struct RegroupPrice {
  Placement target;
  PageCounts need;  // pages to take: for blocks there are, and for the rows to come
  int64_t bytes_moved = 0;
  int64_t pages_dropped = 0;
};

// Pages that the sequence still has to take under a residency: missing ones and those of rows to come.
PageCounts pages_to_take(const Sequence& sequence, const Memory& memory, const kv::Residency& residency);

// What a change to a wish would take and move now. For dp: in the group where most room is left; a
// sequence that is in such a group already stays there. kResourceExhausted names pages needed and free.
Result<RegroupPrice> price_regroup(const Sequence& sequence, const Memory& memory, const GroupingWish& wish);

// The same of the groups with these first ranks, for a wish that fits.
Result<RegroupPrice> price_placement(const Sequence& sequence, const Memory& memory, const GroupingWish& wish,
                                     const std::vector<int>& bases);

// Accepts a price just computed.
void accept_regroup(Sequence& sequence, Memory& memory, const RegroupPrice& price);

// The step that applied the change is acknowledged: drops what the residency does not ask for.
void thin_blocks(const Sequence& sequence, Memory& memory);

}  // namespace weft::controlplane
