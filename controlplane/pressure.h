// Who gives up room when a waiting request finds none, beyond cached blocks that nobody uses.
//
// *Thinning* a sequence takes away copies: it runs in the most striped form of its wish, with the same bits.
// What it takes must lie where the sequence has its pages already, so that nothing is moved. *Leaving* is
// giving back everything: the blocks stay in the prefix cache (and on the host) as long as nobody needs their
// room, and the sequence comes in again by hits, loads and, for what is gone, by computing it again.
//
// find_relief() chooses as few sequences as do, and nobody where all together would not: only what makes the
// waiting request fit is asked for. Its numbers are pages that surely become room; a block that others use,
// or that the waiting request counts on, is none. Pure; control_plane_pressure.cc carries out what it says.
#pragma once

#include <optional>
#include <vector>

#include "controlplane/memory.h"
#include "controlplane/sequence.h"

namespace weft::controlplane {

// The wish as fitted, with as few copies as leave the bits alone: a cache that is cut over as many ranks as
// divide V, index keys too. The same wish if there is nothing to give up.
GroupingWish thin_wish(const Limits& limits, const GroupingWish& wish);

// What a sequence is placed by now.
GroupingWish wish_in_force(const Limits& limits, const Sequence& sequence);

struct Relief {
  std::vector<Sequence*> thin, leave;
};

// Those of `running` that give up room so that `waiting` comes in as its thin wish. Nothing: not even all of
// them would do. Those who are about to change anyway, who cannot run, and suspects are left alone.
std::optional<Relief> find_relief(const Sequence& waiting, const std::vector<Sequence*>& running,
                                  const Memory& memory, int turn);

}  // namespace weft::controlplane
