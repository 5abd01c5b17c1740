// Changing the placement of a running sequence.
//
// Decided at the event (price, room, refusal) and applied by a plan that runs the sequence: a new table,
// copies for the pages that the new readers lack, and, once that step is acknowledged by all ranks, pages
// outside the new residency are dropped. Blocks that other sequences use keep all their pages. Between
// decision and application the room for the missing pages is reserved, so an accepted change always happens.
//
// A change that copies more than a plan should (Limits::copy_plan_bytes) is spread while its sequence
// decodes: this goes on under its old placement, each of its plans copies some of the blocks that are
// complete, and the one that finds them all copied applies the change. That takes room for rows to come under
// both placements; where there is none, or another change is not over yet, the next plan copies everything.
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

// Accepts a price just computed. `at_once`: by the next plan, whatever it copies.
void accept_regroup(Sequence& sequence, Memory& memory, const RegroupPrice& price, bool at_once);

// The next plan applies a change that was spread over plans; room kept for the old placement is given back.
void apply_next(Sequence& sequence, Memory& memory);

// The step that applied the change is acknowledged: drops what the residency does not ask for.
void trim_blocks(const Sequence& sequence, Memory& memory);

}  // namespace weft::controlplane
