// One simulated world: requests, the real control plane and supervisors, simulated workers, clock and
// transport.
//
// apply() makes one act happen and then looks at everything (checks.cc); settle() lets the world run without
// faults until all requests have ended, and then stops the workers. A world is a function of its setup and
// its acts. What is wrong is thrown as Failure, or a CHECK of the product.
#pragma once

#include <functional>

#include "tests/simulation/core.h"
#include "tests/simulation/engine.h"
#include "tests/simulation/fleet.h"
#include "tests/simulation/pin_book.h"
#include "tests/simulation/traffic.h"

namespace weft::simulation {

class World {
 public:
  World(const Setup& setup, Verdict verdict, Coverage& coverage, Seams seams = {});

  bool apply(const Act& act);  // whether it did something
  void settle();
  // Called after every act, also those of settle(), before what it led to is checked.
  std::function<void(const Act&)> after_act;

  Core& core() { return core_; }
  const Core& core() const { return core_; }
  const Engine& engine() const { return engine_; }
  const Fleet& fleet() const { return fleet_; }

 private:
  bool happen(const Act& act, Draw& draw);
  bool acknowledge(Draw& draw, bool in_order);
  bool resume(Draw& draw);
  bool unpin(Draw& draw);
  bool change_topology(int rank, bool joins);
  void obey();  // what the control plane said about ranks
  void pass(Duration duration);
  bool pass_to_deadline();
  // Of all plans in flight, and of all requests.
  struct Stages {
    std::vector<PlanStage> plans;
    std::vector<RequestStage> requests;
    std::vector<HostStage> hosts;
  };
  Stages stages() const;
  // A fault of workers or transport meets them all.
  void count_fault(Fault fault, const Stages& at);
  void count_fault(Fault fault) { count_fault(fault, stages()); }
  void count_request_fault(Fault fault, RequestId id);
  RequestStage stage_of(RequestId id) const;
  std::optional<HostStage> host_stage_of(RequestId id, const Ledger::Live& live) const;
  void finish_workers(Draw& draw);

  Core core_;
  Engine engine_;
  Fleet fleet_;
  Traffic traffic_;
  PinBook pins_;
  uint64_t commands_ = 0;  // about pins
};

// Everything that must hold after every act (checks.cc).
void check_all(const World& world);

}  // namespace weft::simulation
