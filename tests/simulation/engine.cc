#include "tests/simulation/engine.h"

#include <algorithm>
#include <utility>

namespace weft::simulation {
namespace {

constexpr int kLostEpochsMax = 2;
constexpr size_t kOldKept = 50;

}  // namespace

// ---- epochs

void Engine::epoch_began() {
  collect_all();  // what an earlier epoch still left counts
  epoch_active_ = true;
  ++core_.coverage.mark(Mark::kEpochs);
  if (!flights_.empty() && flights_.front().lost_epochs >= kLostEpochsMax) abandon();
  core_.workers.begin_epoch();
  for (Flight& flight : flights_) {
    for (auto& result : flight.results) {
      if (result) {
        for (const Sample& sample : result->samples) flight.drawn[sample.sample_index] = sample;
      }
      result.reset();
    }
    if (flight.published) ++core_.coverage.mark(Mark::kRepeatedPlans);
    flight.published = true;
    core_.workers.publish(flight.plan);
  }
}

void Engine::epoch_lost() {
  epoch_active_ = false;
  collect_all();
  if (!flights_.empty()) ++flights_.front().lost_epochs;
}

void Engine::abandon() {
  // The daemon tells of a step at once when it is done; only then can it abandon those behind it.
  while (!pending_.empty()) tell(pending_.front(), 0);
  core_.coverage.mark(Mark::kAbandoned) += std::ssize(flights_);
  if (flights_.size() == 1 && flights_.front().plan->spans.size() == 1) {
    auto& live = core_.ledger.live();
    const auto found = live.find(flights_.front().plan->spans[0].request);
    if (found != live.end()) found->second.abandoned_alone = true;
  }
  flights_.clear();
  core_.feed(PlansAbandoned{});
  host_checks_.abandoned();
  core_.unapplied.clear();
}

// ---- plans

bool Engine::make_plan() {
  if (!epoch_active_) return false;
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
  flights_.push_back({std::move(plan), false, 0, {}, {}});
  ++core_.coverage.plans_made;
  return true;
}

bool Engine::publish() {
  const auto next =
      std::find_if(flights_.begin(), flights_.end(), [](const Flight& f) { return !f.published; });
  if (!epoch_active_ || next == flights_.end()) return false;
  next->published = true;
  core_.workers.publish(next->plan);
  return true;
}

std::vector<Engine::Standing> Engine::standing() const {
  std::vector<Standing> out;
  for (const Pending& pending : pending_) {
    const bool all_but_one = pending.left.size() == 1 && rank_count_of(pending.plan->ranks) > 1;
    out.push_back({pending.plan.get(), all_but_one ? PlanStage::kAllButOne : PlanStage::kExecuted});
  }
  for (const Flight& flight : flights_) {
    const Workers::Progress progress = core_.workers.progress(flight.plan->step);
    PlanStage stage = PlanStage::kMade;
    if (flight.published) stage = PlanStage::kPublished;
    if (progress.begun != 0) stage = PlanStage::kHalfExecuted;
    if (progress.finished == flight.plan->ranks) stage = PlanStage::kExecuted;
    out.push_back({flight.plan.get(), stage});
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
  const auto flight = std::find_if(flights_.begin(), flights_.end(),
                                   [&](const Flight& one) { return one.plan->step == outcome.step; });
  if (flight == flights_.end()) return;  // of an abandoned plan
  compare(*flight, outcome);
  flight->results[static_cast<size_t>(outcome.rank)] = std::move(outcome);
}

void Engine::compare(Flight& flight, const StepOutcome& outcome) const {
  for (const Sample& sample : outcome.samples) {
    const auto before = flight.drawn.find(sample.sample_index);
    core_.verdict.expect(Checker::kTokens,
                         before == flight.drawn.end() || (before->second.token == sample.token &&
                                                          before->second.not_finite == sample.not_finite),
                         "a repeat of step ", number(outcome.step), " draws another token");
  }
}

void Engine::finish_done() {
  const auto done_by_all = [](const Flight& flight) {
    RankMask left = flight.plan->ranks;
    while (left != 0 && flight.results[static_cast<size_t>(lowest_rank(left))]) left &= left - 1;
    return left == 0;
  };
  while (!flights_.empty() && done_by_all(flights_.front())) {
    Flight& done = flights_.front();
    Pending pending{done.plan, {}, {}};
    for_each_rank(done.plan->ranks, [&](int rank) {
      pending.left.push_back({done.plan->step, rank, done.results[static_cast<size_t>(rank)]->samples});
    });
    ++done_steps_;
    pending_.push_back(std::move(pending));
    flights_.pop_front();
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
