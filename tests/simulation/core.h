// What all parts of a simulated world share: the real control plane, the clock, the simulated workers'
// memory, the book of requests, and the seams at which tests plant mistakes.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "controlplane/control_plane.h"
#include "tests/simulation/coverage.h"
#include "tests/simulation/ledger.h"
#include "tests/simulation/setup.h"
#include "tests/simulation/verdict.h"
#include "tests/simulation/workers.h"

namespace weft::simulation {

// Mistakes that planted_test.cc makes between the control plane and the rest of the world.
struct Seams {
  std::function<void(Plan&)> plan;
  std::function<void(std::vector<Notice>&)> notices;
  std::function<bool(const controlplane::Event&)> lose_event;
};

struct Core {
  Core(const Setup& setup_, Verdict verdict_, Coverage& coverage_, Seams seams_)
      : setup(setup_),
        verdict(verdict_),
        coverage(coverage_),
        seams(std::move(seams_)),
        plane(setup.limits),
        workers(setup.limits, verdict),
        ledger(setup.limits, workers, unapplied, verdict, coverage) {}

  // An event reaches the control plane; its notices reach the book.
  void feed(const controlplane::Event& event);
  // Time goes on, by one act or by more. What is due at the control plane happens.
  void pass(Duration duration);
  // Whether the control plane was asked anything since the last call: else nothing in it can have changed.
  bool take_touched() { return std::exchange(touched, false); }
  void handle_due();
  RankMask ranks() const { return all_ranks(setup.limits.rank_count); }

  const Setup& setup;
  const Verdict verdict;
  Coverage& coverage;
  const Seams seams;
  Time now{1};
  ControlPlane plane;
  Workers workers;
  Ledger::Plans unapplied;  // kept by the engine
  Ledger ledger;
  bool changing() const { return ledger.changing(); }      // the topology
  RankMask topology = all_ranks(setup.limits.rank_count);  // of the plans that are made
  bool touched = true;                                     // set by who calls plane.next_plan(), too

 private:
  void handle(std::span<const controlplane::Event> events);
};

}  // namespace weft::simulation
