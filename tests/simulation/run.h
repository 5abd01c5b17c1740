// Runs of scripts: here, in a process of their own (a CHECK ends only that), many side by side; and
// shrinking.
#pragma once

#include <functional>
#include <string>

#include "tests/simulation/act.h"
#include "tests/simulation/coverage.h"
#include "tests/simulation/world.h"

namespace weft::simulation {

struct Outcome {
  bool failed = false;
  std::string kind;  // what found it: "checker tokens", "CHECK file:line", "signal 11"
  std::string text;  // what the run said last
  int64_t acts = 0;  // that had begun; all of them when it failed while settling
  Coverage coverage;
};

// What is planted in a run, and which checkers are left out.
struct Conditions {
  Verdict verdict;
  // Called in the process of the run, before it; may plant mistakes.
  std::function<void(World&)> prepare;
  Seams seams;
};

// In this process. Throws Failure; `at` counts the acts that have begun. With a trace it tells each act.
void run_here(const Script& script, const Conditions& conditions, Coverage& coverage, int64_t& at,
              std::ostream* trace = nullptr);
// In a process of its own.
Outcome run_apart(const Script& script, const Conditions& conditions = {});

struct Batch {
  uint64_t first = 1, last = 1;
  int64_t events = 2000;
  int jobs = 1;
};
// Runs seeds until one fails; returns that one's outcome, else that of all. `progress` is told how many are
// done.
struct BatchOutcome {
  Coverage coverage;
  std::optional<uint64_t> failed;
};
BatchOutcome run_batch(const Batch& batch, const Conditions& conditions,
                       const std::function<void(int64_t)>& progress);

// A shorter script that fails in the same way: acts behind the failure, then ever smaller pieces are left
// out.
Script shrink(Script script, const Outcome& outcome, const Conditions& conditions,
              const std::function<void(const Script&)>& progress);

}  // namespace weft::simulation
