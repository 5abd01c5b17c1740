// Who may come in, and with which pages.
//
// A request that could not run even alone is refused at once. One that fits waits until the room for its
// whole prompt and answer is there; then that room is reserved, so that it never lacks a page while it runs.
// Pages of prefix blocks that nobody uses count as room. Blocks that are only on the host count as cached,
// and need their pages.
#pragma once

#include <utility>

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

// Whether try_admit() would succeed now.
bool can_admit(const Sequence& sequence, const Memory& memory, bool use_hits, int turn);

// Where it would go now, room or not.
std::pair<Placement, int> likely_placement(const Sequence& sequence, const Memory& memory, int turn);

// Chooses placement and origin, takes what the prefix cache has and reserves the rest. False, and nothing
// changes, if there is no room now. `turn` breaks ties between origins, so that equal chains spread over the
// ranks.
bool try_admit(Sequence& sequence, Memory& memory, bool use_hits, int turn);

}  // namespace weft::controlplane
