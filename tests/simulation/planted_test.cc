// Goal: every checker of the simulation finds the mistakes that it exists for.
// Method: a mistake is planted, in what the control plane says (Seams), in the simulated workers, or in the
// product by wrapping a function at link time (ld --wrap; see CMakeLists.txt); product code has no switches.
// Seeds run until one fails: it must be the expected checker that speaks. Where that checker is left out,
// most mistakes are seen by nobody; for some another checker speaks later.
#include <gtest/gtest.h>

#include <iostream>
#include <set>
#include <utility>

#include "tests/simulation/run.h"

namespace weft::simulation {
namespace {

enum class Wrapped {
  kNone,
  kPoolForgetsInFlight,
  kPageNeverComesBack,
  kLostRelease,
  kLostFailure,
  kHostForgetsLocks,
  kHostLockStays,
  kHostUnlockLost,
  kThereTooEarly,
  kHostLocksLookFree,
  kHostWhereNoneCanBe,
  kFindsNothing,
  kFindsNothingOnHost,
  kSpillMiscounted,
  kLoadMiscounted,
  kNoDeadline,
  kDeafSupervisor,
  kAbortedForOthers,
  kMemoryLossUnheard,
};
Wrapped wrapped = Wrapped::kNone;
std::set<uint64_t> early;  // copies that were there too early

}  // namespace
}  // namespace weft::simulation

using weft::simulation::early;
using weft::simulation::wrapped;
using weft::simulation::Wrapped;
namespace controlplane = weft::controlplane;
namespace daemon_ = weft::daemon;

// NOLINTBEGIN: names are the linker's
#define POOL _ZNK4weft12controlplane6Memory4poolENS_2kv6StreamEi
#define RELEASE _ZN4weft12controlplane6Memory7releaseERNS0_9BlockPathE
#define HOST_BEGIN _ZN4weft12controlplane8HostPool5beginERKNS_2kv9BlockHashES5_NS_6StepIdE
#define HOST_ARRIVED _ZN4weft12controlplane8HostPool7arrivedERKNS0_10HostCopyIdE
#define HOST_UNLOCK _ZN4weft12controlplane8HostPool6unlockERKNS_2kv9BlockHashENS_6StepIdE
#define HOST_COUNTS _ZNK4weft12controlplane8HostPool6countsENS_2kv6StreamE
#define HOST_MATCH _ZNK4weft12controlplane8HostPool5matchERKNS0_10SharedListINS_2kv9BlockHashEEEl
#define CHECK_HOST_CONTEXTS _ZN4weft12controlplane19check_host_contextsERKNS0_6LimitsE
#define FIND _ZNK4weft12controlplane11PrefixCache4findERKNS0_10SharedListINS_2kv9BlockHashEEEl
#define COUNTERS _ZNK4weft12controlplane12ControlPlane8countersEv
#define NEXT_DEADLINE _ZNK4weft12controlplane12ControlPlane13next_deadlineEv
#define SUPERVISE _ZN4weft6daemon10Supervisor6handleENS0_11WorkerEventENS_4TimeE
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define ENDED                                                          \
  JOIN(_ZN4weft6daemon10FleetRules5endedEiRKNSt7__cxx1112basic_string, \
       IcSt11char_traitsIcESaIcEEENS0_4LossEbNS_4TimeE)
#define REAL(name) JOIN(__real_, name)
#define WRAP(name) JOIN(__wrap_, name)

extern "C" {

controlplane::PoolCounts REAL(POOL)(const controlplane::Memory*, weft::kv::Stream stream, int rank);
controlplane::PoolCounts WRAP(POOL)(const controlplane::Memory* memory, weft::kv::Stream stream, int rank) {
  controlplane::PoolCounts counts = REAL(POOL)(memory, stream, rank);
  if (wrapped == Wrapped::kPoolForgetsInFlight) counts.in_flight = 0;
  if (wrapped == Wrapped::kPageNeverComesBack && memory->last_issued() > weft::StepId{5} && counts.free > 0) {
    --counts.free;
    ++counts.in_flight;
  }
  return counts;
}

void REAL(RELEASE)(controlplane::Memory*, controlplane::BlockPath& path);
void WRAP(RELEASE)(controlplane::Memory* memory, controlplane::BlockPath& path) {
  if (wrapped == Wrapped::kLostRelease && memory->last_issued() > weft::StepId{5}) {
    wrapped = Wrapped::kNone;
    return;
  }
  REAL(RELEASE)(memory, path);
}

void REAL(HOST_ARRIVED)(controlplane::HostPool*, const controlplane::HostCopyId& copy);
void WRAP(HOST_ARRIVED)(controlplane::HostPool* pool, const controlplane::HostCopyId& copy) {
  if (early.erase(copy.serial) == 0) REAL(HOST_ARRIVED)(pool, copy);
}

controlplane::HostPool::Room REAL(HOST_BEGIN)(controlplane::HostPool*, const weft::kv::BlockHash& hash,
                                              const weft::kv::BlockHash& parent, weft::StepId fence);
controlplane::HostPool::Room WRAP(HOST_BEGIN)(controlplane::HostPool* pool, const weft::kv::BlockHash& hash,
                                              const weft::kv::BlockHash& parent, weft::StepId fence) {
  const auto room = REAL(HOST_BEGIN)(pool, hash, parent, fence);
  if (wrapped == Wrapped::kThereTooEarly && room == controlplane::HostPool::Room::kTaken) {
    early.insert(pool->id(hash).serial);
    REAL(HOST_ARRIVED)(pool, pool->id(hash));
  }
  return room;
}

void REAL(HOST_UNLOCK)(controlplane::HostPool*, const weft::kv::BlockHash& hash, weft::StepId fence);
void WRAP(HOST_UNLOCK)(controlplane::HostPool* pool, const weft::kv::BlockHash& hash, weft::StepId fence) {
  if (wrapped == Wrapped::kHostUnlockLost) {
    wrapped = Wrapped::kNone;
    return;
  }
  REAL(HOST_UNLOCK)(pool, hash, fence);
}

controlplane::HostCounts REAL(HOST_COUNTS)(const controlplane::HostPool*, weft::kv::Stream stream);
controlplane::HostCounts WRAP(HOST_COUNTS)(const controlplane::HostPool* pool, weft::kv::Stream stream) {
  controlplane::HostCounts counts = REAL(HOST_COUNTS)(pool, stream);
  if (wrapped == Wrapped::kHostForgetsLocks) counts.used = 0;
  if (wrapped == Wrapped::kHostLockStays && counts.cached > 3) {
    --counts.cached;
    ++counts.used;
  }
  if (wrapped == Wrapped::kHostLocksLookFree) counts.cached += std::exchange(counts.used, 0);
  return counts;
}

int64_t REAL(HOST_MATCH)(const controlplane::HostPool*, const controlplane::Identities& identities,
                         int64_t first);
int64_t WRAP(HOST_MATCH)(const controlplane::HostPool* pool, const controlplane::Identities& identities,
                         int64_t first) {
  // What is pinned is found so, too.
  const bool nothing = wrapped == Wrapped::kFindsNothingOnHost && identities.size() % 2 == 1;
  return nothing ? 0 : REAL(HOST_MATCH)(pool, identities, first);
}

weft::Result<void> REAL(CHECK_HOST_CONTEXTS)(const controlplane::Limits& limits);
weft::Result<void> WRAP(CHECK_HOST_CONTEXTS)(const controlplane::Limits& limits) {
  if (wrapped == Wrapped::kHostWhereNoneCanBe) return {};
  return REAL(CHECK_HOST_CONTEXTS)(limits);
}

controlplane::PrefixCache::Match REAL(FIND)(const controlplane::PrefixCache*,
                                            const controlplane::Identities& identities, int64_t likely);
controlplane::PrefixCache::Match WRAP(FIND)(const controlplane::PrefixCache* cache,
                                            const controlplane::Identities& identities, int64_t likely) {
  if (wrapped == Wrapped::kFindsNothing) return {};
  return REAL(FIND)(cache, identities, likely);
}

controlplane::Counters REAL(COUNTERS)(const controlplane::ControlPlane*);
controlplane::Counters WRAP(COUNTERS)(const controlplane::ControlPlane* plane) {
  controlplane::Counters counters = REAL(COUNTERS)(plane);
  if (wrapped == Wrapped::kLostFailure && counters.failed > 0) --counters.failed;
  if (wrapped == Wrapped::kSpillMiscounted && counters.spilled_bytes > 0) ++counters.spilled_bytes;
  if (wrapped == Wrapped::kLoadMiscounted && counters.loaded_bytes > 0) ++counters.loaded_bytes;
  return counters;
}

std::optional<weft::Time> REAL(NEXT_DEADLINE)(const controlplane::ControlPlane*);
std::optional<weft::Time> WRAP(NEXT_DEADLINE)(const controlplane::ControlPlane* plane) {
  return wrapped == Wrapped::kNoDeadline ? std::nullopt : REAL(NEXT_DEADLINE)(plane);
}

daemon_::WorkerAction REAL(SUPERVISE)(daemon_::Supervisor*, daemon_::WorkerEvent event, weft::Time now);
daemon_::WorkerAction WRAP(SUPERVISE)(daemon_::Supervisor* supervisor, daemon_::WorkerEvent event,
                                      weft::Time now) {
  if (wrapped == Wrapped::kDeafSupervisor && supervisor->state() == daemon_::WorkerState::kDraining &&
      event == daemon_::WorkerEvent::kExited)
    return daemon_::WorkerAction::kNone;
  return REAL(SUPERVISE)(supervisor, event, now);
}

void REAL(ENDED)(daemon_::FleetRules*, int rank, const std::string& how, daemon_::Loss loss, bool memory_lost,
                 weft::Time now);
void WRAP(ENDED)(daemon_::FleetRules* rules, int rank, const std::string& how, daemon_::Loss loss,
                 bool memory_lost, weft::Time now) {
  REAL(ENDED)(rules, rank, how, loss, memory_lost && wrapped != Wrapped::kMemoryLossUnheard, now);
  if (wrapped != Wrapped::kAbortedForOthers) return;
  for (int other = 0; other < rules->rank_count(); ++other) rules->aborted(other, rules->epoch());
}

}  // extern "C"
// NOLINTEND

namespace weft::simulation {
namespace {

struct Plant {
  const char* name;
  Checker checker;  // finds it
  bool by_others;   // whether others find it, later, if `checker` is left out
  std::function<void(Conditions&)> plant;
  uint64_t seeds = 25;  // it takes so many at most
};

void wrap(Conditions& to, Wrapped what) {
  to.prepare = [what](World&) { wrapped = what; };
}

template <typename N>
std::function<void(std::vector<Notice>&)> each(void (*change)(N&)) {
  return [change](std::vector<Notice>& notices) {
    for (Notice& notice : notices) {
      if (auto* one = std::get_if<N>(&notice)) change(*one);
    }
  };
}

// The first page that a plan's table writes name becomes the one that another of its writes names.
void give_a_page_twice(Plan& plan) {
  for (size_t to = 1; to < plan.table_writes.size(); ++to) {
    auto& pages = plan.table_writes[to].pages;
    const auto& others = plan.table_writes[0].pages;
    for (size_t i = 0; i < std::min(pages.size(), others.size()); ++i) {
      if (pages[i] == kNoPage || others[i] == kNoPage || pages[i] == others[i]) continue;
      pages[i] = others[i];
      return;
    }
  }
}

// A spill goes to a page that a context on the host reads from this plan on.
void evict_a_host_block(Plan& plan) {
  for (const HostTableWrite& write : plan.host_writes) {
    for (HostCopy& spill : plan.spills) {
      if (write.pages.empty() || spill.stream != kv::Stream::kEntries) continue;
      spill.host_page = write.pages.front();
      return;
    }
  }
}

// Two hot buffers lie in the same pages.
void give_a_hot_buffer_twice(Plan& plan) {
  static std::vector<PageId> before;
  for (HostTableWrite& write : plan.host_writes) {
    if (write.hot_pages.empty()) continue;
    if (write.hot_pages.size() == before.size()) write.hot_pages = before;
    before = write.hot_pages;
  }
}

const std::vector<Plant>& plants() {
  static const std::vector<Plant> all = {
      {"LostRelease", Checker::kInvariants, true, [](Conditions& c) { wrap(c, Wrapped::kLostRelease); }},
      {"PoolForgetsInFlight", Checker::kPools, false,
       [](Conditions& c) { wrap(c, Wrapped::kPoolForgetsInFlight); }},
      {"PageTwice", Checker::kPages, true, [](Conditions& c) { c.seams.plan = give_a_page_twice; }},
      {"PageNeverComesBack", Checker::kReturns, false,
       [](Conditions& c) { wrap(c, Wrapped::kPageNeverComesBack); }},
      {"HostForgetsLocks", Checker::kPools, true, [](Conditions& c) { wrap(c, Wrapped::kHostForgetsLocks); }},
      {"HostLockStays", Checker::kReturns, false, [](Conditions& c) { wrap(c, Wrapped::kHostLockStays); }},
      {"HostUnlockLost", Checker::kInvariants, true,
       [](Conditions& c) { wrap(c, Wrapped::kHostUnlockLost); }},
      {"ThereTooEarly", Checker::kHost, true, [](Conditions& c) { wrap(c, Wrapped::kThereTooEarly); }},
      {"SpillsToOnePage", Checker::kHost, true,
       [](Conditions& c) {
         c.seams.plan = [](Plan& plan) {
           if (plan.spills.size() > 1 && plan.spills[0].stream == plan.spills[1].stream)
             plan.spills[1].host_page = plan.spills[0].host_page;
         };
       }},
      {"LoadsTwice", Checker::kHost, true,
       [](Conditions& c) {
         c.seams.plan = [](Plan& plan) {
           if (!plan.loads.empty()) plan.loads.push_back(plan.loads.back());
         };
       }},
      {"SpillNotDone", Checker::kHostBytes, true,
       [](Conditions& c) {
         c.prepare = [](World& world) {
           world.core().workers.lose_spill = [](const HostCopy& copy) {
             return copy.stream == kv::Stream::kIndexKeys;  // which rows never read where they lie
           };
         };
       }},
      {"LoadNotDone", Checker::kBytes, true,
       [](Conditions& c) {
         c.prepare = [](World& world) {
           world.core().workers.lose_load = [](const HostCopy&) { return true; };
         };
       }},
      {"HostBlockEvicted", Checker::kHost, true, [](Conditions& c) { c.seams.plan = evict_a_host_block; }},
      {"HostLocksLookFree", Checker::kHost, false,
       [](Conditions& c) { wrap(c, Wrapped::kHostLocksLookFree); }},
      {"HostBlockTwice", Checker::kBytes, true,
       [](Conditions& c) {
         c.seams.plan = [](Plan& plan) {
           for (HostTableWrite& write : plan.host_writes) {
             if (write.pages.size() > 1) write.pages.back() = write.pages.front();
           }
         };
       }},
      {"HotBufferKept", Checker::kBytes, true,
       [](Conditions& c) { c.prepare = [](World& world) { world.core().workers.keep_hot = true; }; }},
      {"HotBufferTwice", Checker::kPages, true,
       [](Conditions& c) { c.seams.plan = give_a_hot_buffer_twice; }},
      {"HostBlockTooMany", Checker::kPlan, true,
       [](Conditions& c) {
         c.seams.plan = [](Plan& plan) {
           for (Span& span : plan.spans) span.host_blocks += span.host_blocks > 0 ? 1 : 0;
         };
       }},
      {"HostWhereNoneCanBe", Checker::kNotices, false,
       [](Conditions& c) { wrap(c, Wrapped::kHostWhereNoneCanBe); }},
      {"PinnedNotFoundOnHost", Checker::kPins, false,
       [](Conditions& c) { wrap(c, Wrapped::kFindsNothingOnHost); }, 600},
      {"PinnedNotFound", Checker::kPins, false, [](Conditions& c) { wrap(c, Wrapped::kFindsNothing); }},
      {"SpillMiscounted", Checker::kCounters, false,
       [](Conditions& c) { wrap(c, Wrapped::kSpillMiscounted); }},
      {"LoadMiscounted", Checker::kCounters, false, [](Conditions& c) { wrap(c, Wrapped::kLoadMiscounted); }},
      {"TooFewPaddedRows", Checker::kPlan, false,
       [](Conditions& c) { c.seams.plan = [](Plan& plan) { plan.padded = {}; }; }},
      {"CopyTwice", Checker::kCopies, false,
       [](Conditions& c) {
         c.seams.plan = [](Plan& plan) {
           if (plan.copies.size() == 1) plan.copies.push_back(plan.copies.back());
         };
       }},
      {"CopyLeftOut", Checker::kCopies, true,
       [](Conditions& c) {
         c.seams.plan = [](Plan& plan) {
           if (!plan.copies.empty()) plan.copies.pop_back();
         };
       }},
      {"StoredTooMuch", Checker::kStored, false,
       [](Conditions& c) {
         c.seams.notices = each<FinishedNotice>([](FinishedNotice& n) { n.stored[0][0] += 1; });
       }},
      {"CopyNotDone", Checker::kBytes, true,
       [](Conditions& c) {
         c.prepare = [](World& world) {
           world.core().workers.lose_copy = [](const PageCopy&) { return true; };
         };
       }},
      {"PartialLost", Checker::kTokens, true,
       [](Conditions& c) {
         c.prepare = [](World& world) {
           world.core().workers.lose_sums = [](int rank) { return rank == 1; };
         };
       }},
      {"AnswerMiscounted", Checker::kNotices, false,
       [](Conditions& c) {
         c.seams.notices = each<FinishedNotice>([](FinishedNotice& n) { n.completion_tokens += 1; });
       }},
      {"TokenTwice", Checker::kNotices, true,
       [](Conditions& c) {
         c.seams.notices = [](std::vector<Notice>& notices) {
           if (notices.empty() || !std::holds_alternative<TokenNotice>(notices.back())) return;
           const Notice again = notices.back();
           notices.push_back(again);
         };
       }},
      {"FailureNotCounted", Checker::kCounters, false, [](Conditions& c) { wrap(c, Wrapped::kLostFailure); }},
      {"DeadlineForgotten", Checker::kDeadlines, true, [](Conditions& c) { wrap(c, Wrapped::kNoDeadline); }},
      {"DeafSupervisor", Checker::kEpochs, false, [](Conditions& c) { wrap(c, Wrapped::kDeafSupervisor); }},
      {"EpochBeginsTooEarly", Checker::kEpochs, false,
       [](Conditions& c) { wrap(c, Wrapped::kAbortedForOthers); }},
      {"MemoryLossUnheard", Checker::kBytes, true,
       [](Conditions& c) { wrap(c, Wrapped::kMemoryLossUnheard); }},
      {"ResumeLost", Checker::kProgress, true,
       [](Conditions& c) {
         c.seams.lose_event = [](const controlplane::Event& event) {
           const auto* pause = std::get_if<PauseChanged>(&event);
           return pause != nullptr && !pause->paused;
         };
       }},
  };
  return all;
}

constexpr int64_t kEvents = 600;

// What the first failing of some seeds fails with; empty: none fails.
std::string found_by(const Conditions& conditions, uint64_t seeds) {
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    const Outcome outcome = run_apart(script_of(setup_of(seed), kEvents), conditions);
    if (!outcome.failed) continue;
    std::cout << "seed " << seed << ", event " << outcome.acts << ": " << outcome.text << "\n";
    const bool own = outcome.kind.find("/controlplane/") != std::string::npos;
    return own ? "checker invariants" : outcome.kind;  // a CHECK of ControlPlane::check_invariants()
  }
  return "";
}

class Planted : public ::testing::TestWithParam<Plant> {};

TEST_P(Planted, IsFoundByItsChecker) {
  const Plant& plant = GetParam();
  Conditions conditions;
  plant.plant(conditions);
  EXPECT_EQ(found_by(conditions, plant.seeds), std::string("checker ") + checker_name(plant.checker));
}

TEST_P(Planted, WithoutItsChecker) {
  const Plant& plant = GetParam();
  Conditions conditions;
  plant.plant(conditions);
  conditions.verdict.leave_out(plant.checker);
  EXPECT_EQ(found_by(conditions, plant.seeds) != "", plant.by_others);
}

INSTANTIATE_TEST_SUITE_P(Mistakes, Planted, ::testing::ValuesIn(plants()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(PlantedNothing, IsNotFound) { EXPECT_EQ(found_by({}, 25), ""); }

TEST(PlantedNothing, EveryCheckerHasItsMistake) {
  for (int checker = 0; checker < kCheckers; ++checker) {
    const bool any = std::any_of(plants().begin(), plants().end(), [&](const Plant& plant) {
      return static_cast<int>(plant.checker) == checker;
    });
    EXPECT_TRUE(any) << checker_name(static_cast<Checker>(checker));
  }
}

}  // namespace
}  // namespace weft::simulation
