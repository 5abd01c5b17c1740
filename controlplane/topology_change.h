// A change of the ranks that compute, while it is under way.
//
// Stages: *quiet*, no plan is made until those in flight are acknowledged; then every running sequence is
// priced and its room reserved under the new topology, or the change is refused; *moving*, plans that only
// copy, carried out by the ranks of the old topology (or, where one has left already, by the others); then,
// with nothing in flight, the new one comes into force and pages that nobody needs there are dropped. Until
// then the old topology is in force and every page of it is kept: a change that fails at any stage leaves
// nothing behind. Plain values; control_plane_topology.cc is the code.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "controlplane/event.h"
#include "controlplane/page_counts.h"
#include "controlplane/placement.h"
#include "controlplane/plan.h"
#include "kv/topology.h"

namespace weft::controlplane {

struct TopologyChange {
  enum class Stage : uint8_t { kQuiet, kMoving };
  // What a sequence had before, to go back to.
  struct Before {
    RequestId request{};
    std::optional<Placement> next;
    bool needs_switch = false, trim = false;
    bool staged = false;  // its copies are in a plan
  };
  // A block that somebody uses, or keeps, and where its pages were, by part.
  struct Held {
    BlockId block{};
    uint64_t serial = 0;
    std::vector<RankMask> holders;
  };
  // A block of the prefix cache of which something lies on leaving ranks alone.
  struct Stray {
    BlockId block{};
    uint64_t serial = 0;
    int64_t index = 0;
  };

  uint64_t command = 0;
  kv::Topology before, after;
  kv::Topology movers;  // carry out the copies: the old ranks, or those of them that are left
  Stage stage = Stage::kQuiet;
  std::vector<Before> sequences;
  std::vector<Held> held;
  std::vector<Stray> strays;
  size_t strays_done = 0;
  std::optional<Plan> plan;  // made, not taken yet
  int64_t bytes_moved = 0, sequences_moved = 0, blocks_moved = 0, blocks_dropped = 0;
  std::vector<std::variant<RegroupRequested, PinRequested>> deferred;  // that came meanwhile
};

}  // namespace weft::controlplane
