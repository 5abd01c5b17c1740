// What can happen in a simulated world, one small value each: a run is a list of these.
//
// An act is a kind and a number from which it draws all that it needs (which request, which rank, how long),
// in the state that it meets; where it can do nothing it does nothing. So any part of a list is a list, which
// is what makes shrinking easy.
#pragma once

#include <array>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "proto/vocab/result.h"

namespace weft::simulation {

enum class ActKind : uint8_t {
  // ---- requests
  kArrive,
  kCancel,
  kPause,
  kResume,
  kRegroup,
  kPrice,  // a regroup that is only asked about
  kPin,
  kUnpin,
  kDeadline,  // time passes until the next deadline
  // ---- the daemon
  kPlan,     // a plan is made, and its tables written
  kPublish,  // it goes into the workers' ring
  kCollect,  // results of some ranks arrive
  kDeliver,  // acknowledgements reach the control plane, the oldest first
  kReorder,  // the same, in any order
  kDuplicate,
  kLate,   // one of a step long done
  kDrain,  // a rank is to take part no more
  kJoin,   // or again
  kWait,   // time passes
  // ---- workers
  kWork,         // one rank runs some phases
  kRush,         // all run as far as they get
  kLoad,         // a new process is ready
  kAbort,        // a survivor of a lost epoch leaves its step
  kReap,         // the daemon sees that a process has ended
  kStopWorker,   // of a rank that takes no part
  kStartWorker,  // the same
  // ---- their faults
  kKill,        // a process dies, perhaps in the middle of a phase
  kStall,       // a process does nothing for a while
  kSpawnFails,  // the next process does not start
  kLoseMemory,  // a process dies, and what lay in its rank's pool is gone
};
inline constexpr int kActKinds = 30;
const char* act_name(ActKind kind);

struct Act {
  ActKind kind{};
  uint64_t draw = 0;
  friend bool operator==(const Act&, const Act&) = default;
};

// A run on paper: "seed 17", then one act a line. It ends with its acts, or before, when so many of them did
// something.
struct Script {
  uint64_t seed = 0;
  int64_t events = int64_t{1} << 40;
  std::vector<Act> acts;
};
void write(std::ostream& out, const Script& script);
Result<Script> read_script(const std::string& path);

}  // namespace weft::simulation
