// What the daemon does between control plane and workers: plans in flight, their results, repeats.
//
// The rules are the daemon's (daemon/flights.h). Acknowledgements of done steps reach the control plane one
// by one, in any order, some of them twice or late; the daemon's own loop hands them over at once.
#pragma once

#include <deque>
#include <memory>
#include <variant>
#include <vector>

#include "daemon/flights.h"
#include "tests/simulation/core.h"
#include "tests/simulation/host_checks.h"
#include "tests/simulation/plan_checks.h"

namespace weft::simulation {

class Engine {
 public:
  explicit Engine(Core& core) : core_(core), checks_(core), host_checks_(core) {}

  void epoch_began();
  void epoch_lost(daemon::Loss loss);
  bool epoch_active() const { return flights_.active(); }
  // While no epoch runs: plans in flight will not be run any more, and then this happens.
  void feed_without_plans(const controlplane::Event& event);
  int64_t done_steps() const { return done_steps_; }

  // ---- acts; false: there was nothing to do
  bool make_plan();
  bool publish();
  bool collect(Draw& draw);
  bool deliver(Draw& draw, bool in_order);
  bool deliver_again(Draw& draw);  // of a step that is still in flight
  bool deliver_late(Draw& draw);   // of one that is not

  int64_t steps() const { return static_cast<int64_t>(steps_); }
  bool idle() const { return flights_.empty() && pending_.empty(); }
  // Where the plans are that have not been applied, oldest first.
  struct Standing {
    const Plan* plan;
    PlanStage stage;
  };
  std::vector<Standing> standing() const;

 private:
  struct Parcel {
    std::shared_ptr<const Plan> plan;
    bool published = false;
  };
  using Flights = daemon::Flights<Parcel, std::monostate>;
  // Done, but the control plane has not heard of all of it.
  struct Pending {
    std::shared_ptr<const Plan> plan;
    std::vector<StepAcknowledged> left, told;
  };

  void collect_all();
  void take(StepOutcome outcome);
  void finish_done();
  void tell(Pending& pending, size_t which);
  void tell_all();
  std::vector<std::shared_ptr<const Plan>> plans() const;
  void abandon(const std::vector<std::shared_ptr<const Plan>>& plans);
  void forget_plans();

  Core& core_;
  PlanChecks checks_;
  HostChecks host_checks_;
  uint64_t steps_ = 0;
  int64_t done_steps_ = 0;
  Flights flights_;
  std::deque<Pending> pending_;
  std::vector<StepAcknowledged> old_;  // some that have been told, of any age
};

}  // namespace weft::simulation
