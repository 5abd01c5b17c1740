#include "tests/simulation/world.h"

#include <algorithm>

namespace weft::simulation {

World::World(const Setup& setup, Verdict verdict, Coverage& coverage, Seams seams)
    : core_(setup, verdict, coverage, std::move(seams)),
      engine_(core_),
      fleet_(core_, engine_),
      traffic_(core_),
      pins_(core_) {
  fleet_.start();
}

bool World::apply(const Act& act) {
  Draw draw(act.draw);
  pass(Duration(1 + draw.below(core_.setup.tick.count())));
  const bool gives_up =
      act.kind == ActKind::kLoad || act.kind == ActKind::kAbort || act.kind == ActKind::kReap;
  const auto before = gives_up ? stages() : decltype(stages())();
  const int64_t abandoned = core_.coverage.mark(Mark::kAbandoned), lost = fleet_.memories_lost();
  obey();
  const bool did = happen(act, draw);
  obey();
  if (core_.coverage.mark(Mark::kAbandoned) > abandoned) count_fault(Fault::kAbandonment, before);
  if (fleet_.memories_lost() > lost) count_fault(Fault::kMemoryLost, before);
  core_.coverage.acts[static_cast<size_t>(act.kind)] += did ? 1 : 0;
  core_.coverage.events += did ? 1 : 0;
  if (after_act) after_act(act);
  if (core_.take_touched() || did) {
    pins_.look();
    check_all(*this);
  }
  return did;
}

bool World::happen(const Act& act, Draw& draw) {
  const int ranks = core_.setup.limits.rank_count;
  const int rank = static_cast<int>(draw.below(ranks));
  // From this rank on, the first one that can.
  const auto first = [&](auto can) {
    for (int i = 0; i < ranks; ++i) {
      if (can((rank + i) % ranks)) return true;
    }
    return false;
  };
  const auto id = traffic_.any(draw);
  switch (act.kind) {
    case ActKind::kArrive:
      if (std::ssize(core_.ledger.live()) >= core_.setup.max_live) return false;
      core_.feed(traffic_.arrival(draw));
      return true;
    case ActKind::kCancel:
      if (!id) return false;
      count_request_fault(Fault::kCancel, *id);
      core_.ledger.live().at(*id).cancelled = true;
      core_.feed(CancelRequested{*id});
      return true;
    case ActKind::kPause:
      if (!id) return false;
      count_request_fault(Fault::kPause, *id);
      core_.ledger.live().at(*id).paused = true;
      core_.feed(PauseChanged{*id, true});
      return true;
    case ActKind::kResume:
      return resume(draw);
    case ActKind::kRegroup:
      if (!id) return false;
      count_request_fault(Fault::kRegroup, *id);
      core_.feed(traffic_.regroup(draw, *id));
      return true;
    case ActKind::kPrice: {
      if (!id) return false;
      RegroupRequested asked = traffic_.regroup(draw, *id);
      asked.dry_run = true;
      core_.feed(asked);
      return true;
    }
    case ActKind::kPin:
      core_.feed(PinRequested{++commands_, traffic_.any_ever(draw)});
      return true;
    case ActKind::kUnpin:
      return unpin(draw);
    case ActKind::kDeadline:
      return pass_to_deadline();
    case ActKind::kPlan:
      return engine_.make_plan();
    case ActKind::kPublish:
      return engine_.publish();
    case ActKind::kCollect:
      return engine_.collect(draw);
    case ActKind::kDeliver:
      return acknowledge(draw, true);
    case ActKind::kReorder:
      return acknowledge(draw, false);
    case ActKind::kDuplicate:
      if (!engine_.deliver_again(draw)) return false;
      count_fault(Fault::kDuplicate);
      return true;
    case ActKind::kLate:
      if (!engine_.deliver_late(draw)) return false;
      count_fault(Fault::kLate);
      return true;
    case ActKind::kDrain:
      return change_topology(rank, false);
    case ActKind::kJoin:
      return first(
          [&](int r) { return !holds(core_.topology, r) && fleet_.waits(r) && change_topology(r, true); });
    case ActKind::kStopWorker:
      return !core_.changing() && first([&](int r) { return fleet_.stop_worker(r); });
    case ActKind::kStartWorker:
      return first([&](int r) { return fleet_.start_worker(r); });
    case ActKind::kWait:
      pass(Duration(draw.below(core_.setup.tick.count() * (draw.chance(8) ? 4000 : 60))));
      return true;
    case ActKind::kWork:
      return first([&, phases = 1 + draw.below(3)](int r) { return fleet_.work(r, phases); });
    case ActKind::kRush:
      return fleet_.rush();
    case ActKind::kLoad:
      return first([&](int r) { return fleet_.load(r); });
    case ActKind::kAbort:
      return first([&](int r) { return fleet_.leave_step(r); });
    case ActKind::kReap:
      return first([&](int r) { return fleet_.reap(r); });
    case ActKind::kKill:
      if (!fleet_.kill(rank, draw.below(draw.chance(50) ? 8 : 100),
                       draw.chance(75) ? daemon::Loss::kFailed : daemon::Loss::kKilled))
        return false;
      count_fault(Fault::kDeath);
      return true;
    case ActKind::kStall:
      if (!fleet_.stall(rank, Duration(1 + draw.below(core_.setup.hang_deadline.count() * 5 / 4))))
        return false;
      count_fault(Fault::kSlow);
      return true;
    case ActKind::kSpawnFails:
      return fleet_.fail_next_spawn(rank);
    case ActKind::kLoseMemory:
      return fleet_.lose_memory(rank, draw.below(50));
  }
  return false;
}

bool World::acknowledge(Draw& draw, bool in_order) {
  bool any = false;
  const int64_t most = draw.chance(50) ? 1 : 2 * core_.setup.limits.rank_count;
  for (int64_t i = 1 + draw.below(most); i > 0; --i) {
    if (!engine_.deliver(draw, in_order)) break;
    if (!in_order) count_fault(Fault::kReordered);
    any = true;
  }
  return any;
}

bool World::resume(Draw& draw) {
  std::vector<RequestId> paused;
  for (const auto& [id, live] : core_.ledger.live()) {
    if (live.paused) paused.push_back(id);
  }
  if (paused.empty()) return false;
  const RequestId id = paused[static_cast<size_t>(draw.below(std::ssize(paused)))];
  core_.ledger.live().at(id).paused = false;
  core_.feed(PauseChanged{id, false});
  return true;
}

bool World::change_topology(int rank, bool joins) {
  TopologyRequested event{++commands_, rank, joins};
  const RankMask after = core_.topology ^ mask_of(rank);
  event.gone = !core_.changing() && !joins && holds(core_.topology, rank) && after != 0 &&
               !fleet_.all_run() && !fleet_.is_there(rank);
  count_fault(event.gone ? Fault::kGone : Fault::kDrain);
  if (core_.changing()) {
    core_.ledger.second_topology_requested(commands_);
  } else {
    core_.ledger.topology_requested(commands_, core_.topology, after, event.gone);
  }
  if (!event.gone) {
    core_.feed(event);
    return true;
  }
  // The others begin without it.
  engine_.feed_without_plans(event);
  core_.topology = after;
  fleet_.set_topology(after);
  return true;
}

void World::obey() {
  const auto ranks = core_.ledger.take_topology();
  if (!ranks) return;
  core_.topology = *ranks;
  fleet_.set_topology(*ranks);
}

// Sometimes one that is not there.
bool World::unpin(Draw& draw) {
  const std::vector<PinSnapshot> pins = core_.plane.pins();
  if (pins.empty()) return false;
  const uint64_t pin = pins[static_cast<size_t>(draw.below(std::ssize(pins)))].pin;
  core_.feed(UnpinRequested{++commands_, draw.chance(90) ? pin : pin + 1000});
  return true;
}

void World::pass(Duration duration) {
  for (const auto& [id, live] : core_.ledger.live()) {
    if (live.deadline && *live.deadline <= core_.now + duration) count_request_fault(Fault::kDeadline, id);
  }
  core_.pass(duration);
  fleet_.pass_time();
}

bool World::pass_to_deadline() {
  const auto next = core_.plane.next_deadline();
  if (next) pass(std::max(*next - core_.now, Duration(1)));
  return next.has_value();
}

// ---- counting

World::Stages World::stages() const {
  Stages out;
  for (const auto& one : engine_.standing()) out.plans.push_back(one.stage);
  if (out.plans.empty()) out.plans.push_back(PlanStage::kApplied);
  for (const auto& [id, live] : core_.ledger.live()) {
    out.requests.push_back(stage_of(id));
    if (const auto stage = host_stage_of(id, live)) out.hosts.push_back(*stage);
  }
  return out;
}

void World::count_fault(Fault fault, const Stages& at) {
  for (const PlanStage stage : at.plans)
    ++core_.coverage.plans[static_cast<size_t>(fault)][static_cast<size_t>(stage)];
  for (const RequestStage stage : at.requests)
    ++core_.coverage.requests[static_cast<size_t>(fault)][static_cast<size_t>(stage)];
  for (const HostStage stage : at.hosts)
    ++core_.coverage.hosts[static_cast<size_t>(fault)][static_cast<size_t>(stage)];
}

void World::count_request_fault(Fault fault, RequestId id) {
  ++core_.coverage.requests[static_cast<size_t>(fault)][static_cast<size_t>(stage_of(id))];
  if (const auto stage = host_stage_of(id, core_.ledger.live().at(id)))
    ++core_.coverage.hosts[static_cast<size_t>(fault)][static_cast<size_t>(*stage)];
  auto& plans = core_.coverage.plans[static_cast<size_t>(fault)];
  bool any = false;
  for (const auto& one : engine_.standing()) {
    for (const Span& span : one.plan->spans) {
      if (span.request != id) continue;
      ++plans[static_cast<size_t>(one.stage)];
      any = true;
    }
  }
  if (!any) ++plans[static_cast<size_t>(PlanStage::kApplied)];
}

RequestStage World::stage_of(RequestId id) const {
  const auto snapshot = core_.plane.request(id);
  if (!snapshot || snapshot->state == RequestState::kWaiting) return RequestStage::kWaiting;
  if (core_.changing()) return RequestStage::kMoving;
  if (snapshot->switching) return RequestStage::kSwitch;
  const Truth& truth = core_.workers.truth(id);
  for (const auto& one : engine_.standing()) {
    for (const Span& span : one.plan->spans) {
      if (span.request != id) continue;
      if (span.sample_rows > 0 && span.start + span.rows >= truth.rows() - 1) return RequestStage::kEnding;
      if (!span.prefill && span.rows > 1) return RequestStage::kDrafts;
    }
  }
  if (snapshot->state == RequestState::kDecode) return RequestStage::kDecode;
  return snapshot->computed_tokens == snapshot->cached_tokens ? RequestStage::kFirstChunk
                                                              : RequestStage::kPrefill;
}

std::optional<HostStage> World::host_stage_of(RequestId id, const Ledger::Live& live) const {
  if (!live.on_host) return std::nullopt;
  const auto snapshot = core_.plane.request(id);
  if (!snapshot || snapshot->state == RequestState::kWaiting) return HostStage::kWaiting;
  bool loads = false, spills = false, reads = false;
  for (const auto& plan : core_.unapplied) {
    loads = loads || std::any_of(plan->loads.begin(), plan->loads.end(),
                                 [&](const HostCopy& load) { return load.request == id; });
    spills = spills || !plan->spills.empty();
    reads = reads || std::any_of(plan->spans.begin(), plan->spans.end(), [&](const Span& span) {
              return span.request == id && span.host_blocks > 0;
            });
  }
  const int64_t full = snapshot->computed_tokens / core_.setup.limits.geometry.block_tokens;
  if (loads) return HostStage::kLoading;
  if (spills && full > snapshot->host_blocks) return HostStage::kSpilling;
  return reads ? HostStage::kReading : HostStage::kResting;
}

// ---- the end

// Without faults: requests go on, workers come back, everything that was admitted ends.
void World::settle() {
  Draw draw(mix64(core_.setup.seed) ^ 0x5e771e);
  while (resume(draw)) {
  }
  while (unpin(draw)) {
  }
  constexpr std::array kPeaceful = {ActKind::kPlan,    ActKind::kPublish, ActKind::kRush,  ActKind::kCollect,
                                    ActKind::kDeliver, ActKind::kLoad,    ActKind::kAbort, ActKind::kReap};
  // A change of ranks may have made a plan that nobody has asked for yet; pages wait for it.
  const auto quiet = [&] {
    return core_.ledger.live().empty() && engine_.idle() && fleet_.all_run() && !core_.changing();
  };
  for (int64_t i = 0; i < 60000 && !quiet(); ++i) {
    const ActKind kind = i % 40 == 39 ? ActKind::kWait : draw.one_of(kPeaceful);
    apply({kind, draw.random.next()});
  }
  while (unpin(draw)) {  // such as were asked for while the ranks changed
  }
  core_.verdict.expect(Checker::kProgress, quiet(), core_.ledger.live().size(),
                       " requests do not end though no fault happens");
  for_each_pool(core_.setup.limits.rank_count, [&](kv::Stream stream, int rank) {
    const PoolCounts pool = core_.plane.pool(stream, rank);
    core_.verdict.expect(Checker::kReturns,
                         pool.free + pool.cached == pool.pages && pool.used == 0 && pool.reserved == 0,
                         "everything has ended, and of rank ", rank, " ", pool.used, " pages are used and ",
                         pool.reserved, " reserved");
  });
  finish_workers(draw);
  core_.coverage.mark(Mark::kLostBlocks) += core_.plane.counters().lost_blocks;
  core_.coverage.mark(Mark::kReplayedRows) += core_.plane.counters().replayed_rows;
  core_.coverage.mark(Mark::kHostHits) += core_.plane.counters().host_hit_tokens > 0 ? 1 : 0;
  core_.coverage.mark(Mark::kPasses) += core_.plane.counters().passes;
  core_.coverage.mark(Mark::kEvictions) += core_.plane.counters().evicted_blocks;
  const Workers::HotCounts& hot = core_.workers.hot_counts();
  core_.coverage.mark(Mark::kHotHits) += hot.hits;
  core_.coverage.mark(Mark::kHotFetched) += hot.fetched;
  core_.coverage.mark(Mark::kHotLeft) += hot.left;
  core_.coverage.rows += core_.workers.rows_run();
  core_.coverage.slots += core_.workers.slots_read();
  ++core_.coverage.seeds;
}

// The workers are stopped, some of them while they die or come back.
void World::finish_workers(Draw& draw) {
  constexpr std::array kFaults = {ActKind::kKill, ActKind::kReap, ActKind::kReap,       ActKind::kStall,
                                  ActKind::kWait, ActKind::kLoad, ActKind::kSpawnFails, ActKind::kStopWorker};
  for (int64_t i = draw.below(40); i > 0; --i) apply({draw.one_of(kFaults), draw.random.next()});
  fleet_.stop();
  for (int64_t i = 0; i < 5000 && !fleet_.stopped(); ++i)
    apply({draw.chance(90) ? ActKind::kReap : ActKind::kWait, draw.random.next()});
  core_.verdict.expect(Checker::kProgress, fleet_.stopped(), "the workers do not stop");
}

}  // namespace weft::simulation
