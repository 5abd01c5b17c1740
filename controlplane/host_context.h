// Sequences whose context lies in the host pool: their full blocks keep only index keys on devices, and each
// row reads from the host the entries that it selects. So a context may be larger than all device pools.
//
// Blocks of such a sequence are its own. One whose rows all ranks have acknowledged is spilled under its
// identity, by promise: room for all its blocks was reserved in the host pool when it came in. When the spill
// is acknowledged the copy is locked, the block is a *host block*, and its entries' pages are given back; the
// plan says how many of the first blocks are host blocks (Span::host_blocks), and plans in flight that count
// fewer of them still find the pages. What a spill that was abandoned was to bring stays on devices.
//
// On devices it takes index keys of the whole length, entries of a *window* of blocks (those being computed,
// and those on their way to the host), and a hot buffer. Pure arithmetic and small steps on sequence.h;
// counts are blocks and pages.
#pragma once

#include "controlplane/memory.h"
#include "controlplane/sequence.h"

namespace weft::controlplane {

// Full blocks that a request of so many rows ever has.
inline int64_t full_blocks(const Limits& limits, int64_t rows) { return rows / limits.geometry.block_tokens; }

// Pages of one sequence under a residency: of index keys for all of its blocks, of entries for a window and
// the hot buffer.
PageCounts host_context_pages(const Limits& limits, const kv::Residency& residency, int origin,
                              int64_t block_count, int64_t window);
// Pages that its hot buffer has on each rank, where the sequence has so many blocks.
PageCounts hot_buffer_pages(const Limits& limits, const kv::Residency& residency, int origin,
                            int64_t block_count);

// Whether this model and these pools can have contexts on the host at all. kFailedPrecondition or
// kUnsupported, field "context".
Result<void> check_host_contexts(const Limits& limits);

// Of a running one: the entries' pages that it still has to take under a residency, into `need`.
void count_host_context_entries(const Sequence& sequence, const Memory& memory,
                                const kv::Residency& residency, PageCounts& need);

// Those that a sequence would lock now or later beside what is locked already. `use_hits`: it begins with the
// copies that are there.
int64_t copies_to_lock(const Sequence& sequence, const Memory& memory, bool use_hits);
// It comes in, with blocks for the copies that it counts on (Sequence::load_blocks), which are locked: they
// are host blocks at once. Of the others it is promised room.
void enter_host(Sequence& sequence, Memory& memory);

// The copy of its first block on a device is there: it is locked, and the block is a host block. False, and
// nothing changes: it is not there (any more).
bool begin_host_block(Sequence& sequence, Memory& memory, const kv::BlockHash& copy);

// Gives back everything that it has in the host pool, and its hot buffer.
void leave_host(Sequence& sequence, Memory& memory);

// The identities of its first so many blocks, whose tokens are known.
void extend_identities(Sequence& sequence, int64_t blocks, int64_t block_tokens);

// Under which name the copy of a block is kept: its identity; or, where that is a copy which is not trusted
// but still in use, and behind such a one, a name of its own that nobody else looks for.
kv::BlockHash host_copy_name(const Sequence& sequence, const Memory& memory, int64_t block);
// The name of the copy before it, there or on its way.
kv::BlockHash host_copy_before(const Sequence& sequence, const Memory& memory, int64_t block);

}  // namespace weft::controlplane
