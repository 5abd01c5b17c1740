// Who may come in, and with which pages.
//
// A request that could not run even alone is refused at once. One that fits waits until the room for its
// whole prompt and answer is there; then that room is reserved, so that it never lacks a page while it runs.
// Pages of prefix blocks that nobody uses count as room. Blocks that are only on the host count as cached,
// and need their pages.
#pragma once

#include "controlplane/memory.h"
#include "controlplane/sequence.h"

namespace weft::controlplane {

// Whether prompt and answer fit the context, and the pools when they are empty. kTooLarge names field and
// limit.
// `window`: 0, or that of a context that lies on the host (host_context.h); then the host pool must hold it,
// too.
Result<void> check_fits_alone(const Limits& limits, int64_t prompt, int64_t max_tokens,
                              const GroupingWish& wish, int64_t window = 0);
// What of that depends on no pool.
Result<void> check_shape(const Limits& limits, int64_t prompt, int64_t max_tokens, const GroupingWish& wish);

// Where a request would go now, room or not.
struct Entry {
  BlockPath hits;  // what the prefix cache has of it; no lock is held
  Placement placement;
  int origin = 0;
  PageCounts need, room;  // pages it would take; those it could have
  int64_t slack = 0;      // pages left in the tightest pool it uses; < 0: no room
};
// As this wish, which may be another one than its own, and with `more` room than there is. `turn` breaks ties
// between origins, so that equal chains spread over the ranks.
Entry entry_of(const Sequence& sequence, const GroupingWish& wish, const Memory& memory, bool use_hits,
               int turn, const PageCounts& more = {});

// Takes what the prefix cache has and reserves the rest. False, and nothing changes, if there is no room now.
bool try_admit(Sequence& sequence, const GroupingWish& wish, Memory& memory, bool use_hits, int turn);

// Pages left in the tightest pool that `need` takes from, or that is short without it.
int64_t slack_of(const PageCounts& room, const PageCounts& need, int rank_count);

}  // namespace weft::controlplane
