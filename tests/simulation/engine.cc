#include "tests/simulation/engine.h"

#include <algorithm>
#include <set>
#include <utility>

namespace weft::simulation {
namespace {

constexpr size_t kOldKept = 50;

}  // namespace

// ---- epochs

void Engine::epoch_began() {
  collect_all();  // what an earlier epoch still left counts
  ++core_.coverage.mark(Mark::kEpochs);
  const std::vector<std::shared_ptr<const Plan>> before = plans();
  const bool abandoned = flights_.epoch_begins() > 0;
  core_.workers.begin_epoch();
  if (abandoned) return abandon(before);
  for (Flights::Flight& flight : flights_) {
    if (flight.parcel.published) ++core_.coverage.mark(Mark::kRepeatedPlans);
    flight.parcel.published = true;
    core_.workers.publish(flight.parcel.plan);
  }
}

void Engine::epoch_lost(daemon::Loss loss) {
  flights_.stop();
  collect_all();
  flights_.epoch_lost(loss);
}

std::vector<std::shared_ptr<const Plan>> Engine::plans() const {
  std::vector<std::shared_ptr<const Plan>> out;
  for (const Flights::Flight& flight : flights_) out.push_back(flight.parcel.plan);
  return out;
}

void Engine::abandon(const std::vector<std::shared_ptr<const Plan>>& plans) {
  tell_all();
  core_.coverage.mark(Mark::kAbandoned) += std::ssize(plans);
  if (plans.size() == 1) {
    std::set<RequestId> served;
    for (const Span& span : plans[0]->spans) served.insert(span.request);
    for (const HostCopy& load : plans[0]->loads) served.insert(load.request);
    auto& live = core_.ledger.live();
    const auto found = served.size() == 1 ? live.find(*served.begin()) : live.end();
    if (found != live.end()) found->second.abandoned_alone = true;
    // Whose context a plan of nothing else sends to the host does not show in it.
    if (served.empty() && !plans[0]->spills.empty()) {
      for (auto& [id, one] : live) one.abandoned_alone = one.abandoned_alone || one.on_host;
    }
  }
  core_.feed(PlansAbandoned{});
  forget_plans();
}

void Engine::feed_without_plans(const controlplane::Event& event) {
  tell_all();
  flights_.withdraw();
  // A change of ranks may have made a plan that nobody has asked for yet; its number is used up.
  steps_ = static_cast<uint64_t>(core_.plane.counters().plans);
  core_.feed(event);
  forget_plans();
}

// The daemon tells of a step at once when it is done; only then can it give up those behind it.
void Engine::tell_all() {
  while (!pending_.empty()) tell(pending_.front(), 0);
}

void Engine::forget_plans() {
  host_checks_.given_up();
  core_.unapplied.clear();
}

// ---- plans

bool Engine::make_plan() {
  if (!epoch_active()) return false;
  checks_.before();
  core_.touched = true;
  auto made = core_.plane.next_plan(core_.now);
  core_.handle_due();
  if (!made) return false;
  if (core_.seams.plan) core_.seams.plan(*made);
  ++steps_;
  core_.verdict.expect(Checker::kPlan, number(made->step) == steps_, "step ", number(made->step), " follows ",
                       steps_ - 1);
  core_.verdict.expect(Checker::kPlan, std::ssize(core_.unapplied) < core_.setup.limits.plans_in_flight,
                       "more plans in flight than allowed");
  const std::vector<std::shared_ptr<const Plan>> others(core_.unapplied.begin(), core_.unapplied.end());
  core_.workers.write_tables(*made, others);
  auto plan = std::make_shared<const Plan>(std::move(*made));
  checks_.check(*plan);
  host_checks_.check(*plan);
  core_.unapplied.push_back(plan);
  flights_.add(plan->step, plan->ranks, {plan, false});
  ++core_.coverage.plans_made;
  return true;
}

bool Engine::publish() {
  const auto next =
      std::find_if(flights_.begin(), flights_.end(), [](const auto& one) { return !one.parcel.published; });
  if (!epoch_active() || next == flights_.end()) return false;
  next->parcel.published = true;
  core_.workers.publish(next->parcel.plan);
  return true;
}

std::vector<Engine::Standing> Engine::standing() const {
  std::vector<Standing> out;
  for (const Pending& pending : pending_) {
    const bool all_but_one = pending.left.size() == 1 && rank_count_of(pending.plan->ranks) > 1;
    out.push_back({pending.plan.get(), all_but_one ? PlanStage::kAllButOne : PlanStage::kExecuted});
  }
  for (const Flights::Flight& flight : flights_) {
    const Workers::Progress progress = core_.workers.progress(flight.step);
    PlanStage stage = PlanStage::kMade;
    if (flight.parcel.published) stage = PlanStage::kPublished;
    if (progress.begun != 0) stage = PlanStage::kHalfExecuted;
    if (progress.finished == flight.ranks) stage = PlanStage::kExecuted;
    out.push_back({flight.parcel.plan.get(), stage});
  }
  return out;
}

// ---- results

// Some ranks' rings are read.
bool Engine::collect(Draw& draw) {
  bool any = false;
  for (int rank = 0; rank < core_.setup.limits.rank_count; ++rank) {
    auto& ring = core_.workers.results(rank);
    if (draw.chance(40)) continue;
    for (; !ring.empty(); ring.pop_front(), any = true) take(std::move(ring.front()));
  }
  finish_done();
  return any;
}

void Engine::collect_all() {
  for (int rank = 0; rank < core_.setup.limits.rank_count; ++rank) {
    auto& ring = core_.workers.results(rank);
    for (; !ring.empty(); ring.pop_front()) take(std::move(ring.front()));
  }
  finish_done();
}

void Engine::take(StepOutcome outcome) {
  Flights::Flight* flight = flights_.find(outcome.step);
  if (flight == nullptr) return;
  const auto differ = flights_.take(*flight, outcome.rank, {}, std::move(outcome.samples));
  core_.verdict.expect(Checker::kTokens, differ.empty(), "a repeat of step ", number(outcome.step),
                       " draws another token");
}

void Engine::finish_done() {
  while (const auto done = flights_.take_done()) {
    Pending pending{done->parcel.plan, {}, {}};
    for_each_rank(done->ranks, [&](int rank) { pending.left.push_back(done->acknowledgement(rank)); });
    ++done_steps_;
    pending_.push_back(std::move(pending));
  }
}

bool Engine::deliver(Draw& draw, bool in_order) {
  if (pending_.empty()) return false;
  const size_t at = in_order ? 0 : static_cast<size_t>(draw.below(std::ssize(pending_)));
  Pending& pending = pending_[at];
  if (pending.left.empty()) return false;
  if (!in_order && at == 0 && pending.left.size() == 1) return false;  // nothing to overtake
  tell(pending, in_order ? 0 : static_cast<size_t>(draw.below(std::ssize(pending.left))));
  return true;
}

void Engine::tell(Pending& pending, size_t which) {
  const StepAcknowledged ack = std::move(pending.left[which]);
  pending.left.erase(pending.left.begin() + static_cast<std::ptrdiff_t>(which));
  pending.told.push_back(ack);
  if (old_.size() < kOldKept) {
    old_.push_back(ack);
  } else {
    old_[number(ack.step) * 7 % kOldKept] = ack;
  }
  // The plans that are done with it.
  size_t done = 0;
  while (done < pending_.size() && pending_[done].left.empty()) host_checks_.done(*pending_[done++].plan);
  core_.feed(ack);
  for (; done > 0; --done) {
    pending_.pop_front();
    core_.unapplied.pop_front();
  }
}

bool Engine::deliver_again(Draw& draw) {
  std::vector<const StepAcknowledged*> told;
  for (const Pending& pending : pending_) {
    for (const StepAcknowledged& ack : pending.told) told.push_back(&ack);
  }
  if (told.empty()) return false;
  const StepAcknowledged ack = *told[static_cast<size_t>(draw.below(std::ssize(told)))];
  core_.feed(ack);
  return true;
}

bool Engine::deliver_late(Draw& draw) {
  if (old_.empty()) return false;
  const StepAcknowledged ack = old_[static_cast<size_t>(draw.below(std::ssize(old_)))];
  for (const auto& plan : core_.unapplied) {
    if (plan->step == ack.step) return false;
  }
  core_.feed(ack);
  return true;
}

}  // namespace weft::simulation
