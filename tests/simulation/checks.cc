// What must hold after every act: one function for each checker, in a table.
#include <algorithm>

#include "tests/simulation/world.h"

namespace weft::simulation {
namespace {

void check_invariants(const World& world) { world.core().plane.check_invariants(); }

void check_pools(const World& world) {
  const Core& core = world.core();
  for_each_pool(core.setup.limits.rank_count, [&](kv::Stream stream, int rank) {
    const PoolCounts pool = core.plane.pool(stream, rank);
    core.verdict.expect(
        Checker::kPools,
        pool.free + pool.used + pool.cached + pool.in_flight == pool.pages && pool.free >= 0 &&
            pool.used >= 0 && pool.cached >= 0 && pool.in_flight >= 0 && pool.reserved >= 0,
        kv::stream_name(stream), " of rank ", rank, ": ", pool.free, " free + ", pool.used, " used + ",
        pool.cached, " cached + ", pool.in_flight, " in flight are not ", pool.pages);
  });
  for (const kv::Stream stream : kv::kAllStreams) {
    const HostCounts host = core.plane.host_pool(stream);
    core.verdict.expect(Checker::kPools,
                        host.free + host.used + host.cached + host.in_flight == host.pages &&
                            host.pages == core.setup.limits.host_pages[static_cast<size_t>(stream)] &&
                            host.free >= 0 && host.used >= 0 && host.cached >= 0 && host.in_flight >= 0,
                        kv::stream_name(stream), " on the host: ", host.free, " free + ", host.used,
                        " used + ", host.cached, " cached + ", host.in_flight, " in flight are not ",
                        host.pages);
  }
}

// With no plan in flight nothing can keep a page from being free. So what a request gives back, in whatever
// state it ends, is free again when the plans of that moment are done: two at most.
void check_returns(const World& world) {
  const Core& core = world.core();
  if (!core.unapplied.empty() || core.changing()) return;  // a change has plans that wait to be asked for
  for_each_pool(core.setup.limits.rank_count, [&](kv::Stream stream, int rank) {
    core.verdict.expect(Checker::kReturns, core.plane.pool(stream, rank).in_flight == 0,
                        kv::stream_name(stream), " of rank ", rank, ": ",
                        core.plane.pool(stream, rank).in_flight, " pages are in flight, and no plan is");
  });
  for (const kv::Stream stream : kv::kAllStreams) {
    const HostCounts host = core.plane.host_pool(stream);
    core.verdict.expect(Checker::kReturns, host.in_flight == 0, kv::stream_name(stream),
                        " on the host: ", host.in_flight, " pages are in flight, and no plan is");
    const bool idle = core.ledger.live().empty() && core.ledger.pins() == 0;
    core.verdict.expect(Checker::kReturns, !idle || host.used == 0, kv::stream_name(stream),
                        " on the host: ", host.used, " pages are locked by nobody");
  }
  if (!core.ledger.live().empty() || core.ledger.pins() > 0) return;
  for_each_pool(core.setup.limits.rank_count, [&](kv::Stream stream, int rank) {
    const PoolCounts pool = core.plane.pool(stream, rank);
    core.verdict.expect(Checker::kReturns, pool.used == 0 && pool.reserved == 0, kv::stream_name(stream),
                        " of rank ", rank, ": ", pool.used, " pages used and ", pool.reserved,
                        " reserved by nobody");
  });
}

void check_counters(const World& world) {
  const Core& core = world.core();
  const Counters told = core.plane.counters(), sums = core.ledger.sums();
  const auto expect = [&](int64_t counted, int64_t seen, const char* what) {
    core.verdict.expect(Checker::kCounters, counted == seen, what, ": counted ", counted, ", seen ", seen);
  };
  expect(told.generated_tokens, sums.generated_tokens, "tokens");
  expect(told.drafted_tokens, sums.drafted_tokens, "drafts");
  expect(told.accepted_tokens, sums.accepted_tokens, "accepted drafts");
  expect(told.finished, sums.finished, "finished");
  expect(told.cancelled, sums.cancelled, "cancelled");
  expect(told.failed, sums.failed, "failed");
  expect(told.refused, sums.refused, "refused");
  expect(told.topology_changes, sums.topology_changes, "changes of ranks");
  expect(told.spilled_bytes, sums.spilled_bytes, "bytes spilled");
  expect(told.loaded_bytes, sums.loaded_bytes, "bytes loaded");
  expect(std::ssize(core.plane.pins()), core.ledger.pins(), "pins");
  // While the ranks change, one may have been made and wait to be asked for.
  const bool waits = core.changing() && told.plans == world.engine().steps() + 1;
  expect(told.plans - (waits ? 1 : 0), world.engine().steps(), "plans");
  expect(core.plane.running_count() + core.plane.waiting_count(), std::ssize(core.ledger.live()), "requests");
}

void check_deadlines(const World& world) {
  const Core& core = world.core();
  std::optional<Time> first;
  for (const auto& [id, live] : core.ledger.live()) {
    if (!live.deadline) continue;
    first = first ? std::min(*first, *live.deadline) : *live.deadline;
    core.verdict.expect(Checker::kDeadlines, *live.deadline > core.now, "request ", number(id),
                        " has outlived its deadline");
  }
  core.verdict.expect(Checker::kDeadlines, core.plane.next_deadline() == first,
                      "the next deadline is not that of a request");
}

void check_epochs(const World& world) { world.fleet().check(); }

struct Standing {
  Checker checker;
  void (*check)(const World&);
};
constexpr std::array kStanding = {
    Standing{Checker::kInvariants, check_invariants}, Standing{Checker::kPools, check_pools},
    Standing{Checker::kReturns, check_returns},       Standing{Checker::kCounters, check_counters},
    Standing{Checker::kDeadlines, check_deadlines},   Standing{Checker::kEpochs, check_epochs}};

}  // namespace

void check_all(const World& world) {
  for (const Standing& one : kStanding) {
    if (world.core().verdict.on(one.checker)) one.check(world);
  }
}

}  // namespace weft::simulation
