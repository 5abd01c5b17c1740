// How often what happened, over all seeds. Plain numbers, so that processes can share and add them.
#pragma once

#include <array>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "daemon/supervisor.h"
#include "tests/simulation/act.h"

namespace weft::simulation {

enum class Fault : uint8_t {
  kDeath,
  kSlow,
  kDuplicate,
  kReordered,
  kLate,
  kAbandonment,
  kCancel,
  kPause,
  kRegroup,
  kDeadline,
  kDrain,  // or the return of a rank
  kGone,   // the drain of a rank whose worker is not there
  kMemoryLost,
};
inline constexpr int kFaults = 13;

// Of a plan. kApplied: none is in flight.
enum class PlanStage : uint8_t { kMade, kPublished, kHalfExecuted, kExecuted, kAllButOne, kApplied };
inline constexpr int kPlanStages = 6;

enum class RequestStage : uint8_t {
  kWaiting,
  kFirstChunk,
  kPrefill,
  kSwitch,
  kDecode,
  kDrafts,
  kEnding,
  kMoving
};
inline constexpr int kRequestStages = 8;

// Of a request whose context lies on the host: which of these is the first that holds.
enum class HostStage : uint8_t {
  kWaiting,
  kLoading,   // a plan in flight loads its index keys
  kSpilling,  // it has full blocks on devices, and a plan in flight spills
  kReading,   // a plan in flight reads its host blocks
  kResting,
};
inline constexpr int kHostStages = 5;

// What else must have happened.
enum class Mark : uint8_t {
  kFinished,
  kStopped,
  kHits,
  kFullHits,
  kEvictions,
  kCopies,
  kRegrouped,
  kRegroupMoved,
  kRegroupThinned,
  kRegroupRefused,
  kRefused,
  kCancelled,
  kInternal,
  kNumerical,
  kLateEnd,
  kPasses,
  kInputRefs,
  kOwnedSpans,
  kMixedSteps,
  kAllDraftsHold,
  kSomeDraftsHold,
  kNoDraftHolds,
  kDraftsEnd,
  kGuessesHold,
  kAbandoned,
  kEpochs,
  kRepeatedPlans,
  kPartialPhases,  // ended by a death in the middle
  kHung,
  kSpawnFailed,
  kTurns,           // that name a parent whose context is known
  kUnknownParents,  // refused
  kPinned,
  kPinsRefused,
  kPinsInTheWay,  // of a request that waited
  kPinsHit,       // by a request that came in
  kTopologyChanged,
  kTopologyMoved,  // bytes
  kTopologyRefused,
  kTopologyFailed,  // on the way
  kCopiesPriced,    // plans whose copies were compared with a price
  kCopiesSpread,    // plans with copies for a change that a later plan applied
  kStoredExactly,   // requests whose stored bytes were known to the byte
  kSpilled,         // pages
  kLoaded,
  kPrefetched,   // for a request that waits
  kHostHits,     // seeds in which the host had what devices had not
  kHostEvicted,  // copies that made room for others
  kSpillAbandoned,
  kLoadAbandoned,
  kLoadsBlamed,  // requests that failed alone, whose loads alone kill workers
  kThinned,
  kThickened,
  kPreempted,
  kLostBlocks,
  kReplayedRows,
  kGoneMoved,  // a rank whose worker was not there has left
  // ---- contexts on the host
  kOnHost,          // requests
  kAutoOnHost,      // that did not ask for it
  kContextRefused,  // where there can be none
  kHostFound,       // they found a beginning of theirs there
  kHostEnded,       // they got the whole answer
  kHostSpans,       // rows that read host blocks
  kHostFullHits,
  kHostDrafts,
  kHostOwned,   // rows of prompts on one rank each
  kHotHits,     // entries that the hot buffers had
  kHotFetched,  // that they took in
  kHotLeft,     // for which they had no room
  kHostRegrouped,
  kHostMoved,     // while ranks changed
  kHostReplayed,  // they came in again
  kHostPinned,    // pins of copies alone
  kHostPinsHit,
  kStoredOnHost,  // those whose stored bytes were known to the byte
};
inline constexpr int kMarks = 75;

struct Coverage {
  std::array<int64_t, kActKinds> acts{};
  std::array<std::array<int64_t, kPlanStages>, kFaults> plans{};
  std::array<std::array<int64_t, kRequestStages>, kFaults> requests{};
  std::array<std::array<int64_t, kHostStages>, kFaults> hosts{};
  std::array<std::array<int64_t, daemon::kWorkerEvents>, daemon::kWorkerStates> supervisor{};
  std::array<int64_t, kMarks> marks{};
  int64_t seeds = 0, short_seeds = 0;  // short: less events than asked for
  int64_t events = 0, plans_made = 0, rows = 0, slots = 0;

  int64_t& mark(Mark mark) { return marks[static_cast<size_t>(mark)]; }
  void operator+=(const Coverage& other);
};

void print(std::ostream& out, const Coverage& coverage);
// Those that a whole set of seeds should have taken and has not.
std::vector<std::string> missing(const Coverage& coverage);

}  // namespace weft::simulation
