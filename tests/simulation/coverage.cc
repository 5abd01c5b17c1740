#include "tests/simulation/coverage.h"

#include <iomanip>
#include <ostream>

namespace weft::simulation {
namespace {

constexpr std::array<const char*, kFaults> kFaultNames = {
    "death", "slow",    "duplicate", "reordered", "late", "abandonment", "cancel",
    "pause", "regroup", "deadline",  "drain",     "gone", "memory lost"};
constexpr std::array<const char*, kPlanStages> kPlanStageNames = {"made",     "published",   "half run",
                                                                  "executed", "all but one", "applied"};
constexpr std::array<const char*, kRequestStages> kRequestStageNames = {
    "waiting", "1st chunk", "prefill", "switch", "decode", "drafts", "ending", "moving"};
constexpr std::array<const char*, kHostStages> kHostStageNames = {"waiting", "loading", "spilling", "reading",
                                                                  "resting"};
constexpr std::array<const char*, kMarks> kMarkNames = {"finished",
                                                        "stopped",
                                                        "hits",
                                                        "full hits",
                                                        "evictions",
                                                        "copies",
                                                        "regrouped",
                                                        "regroup moved",
                                                        "regroup thinned",
                                                        "regroup refused",
                                                        "refused",
                                                        "cancelled",
                                                        "internal",
                                                        "numerical",
                                                        "late end",
                                                        "passes",
                                                        "input refs",
                                                        "owned spans",
                                                        "mixed steps",
                                                        "all drafts hold",
                                                        "some drafts hold",
                                                        "no draft holds",
                                                        "drafts end",
                                                        "guesses hold",
                                                        "abandoned",
                                                        "epochs",
                                                        "repeated plans",
                                                        "partial phases",
                                                        "hung",
                                                        "spawn failed",
                                                        "turns",
                                                        "unknown parents",
                                                        "pinned",
                                                        "pins refused",
                                                        "pins in the way",
                                                        "pins hit",
                                                        "topology changed",
                                                        "topology moved",
                                                        "topology refused",
                                                        "topology failed",
                                                        "copies priced",
                                                        "copies spread",
                                                        "stored exactly",
                                                        "spilled",
                                                        "loaded",
                                                        "prefetched",
                                                        "host hits",
                                                        "host evicted",
                                                        "spill abandoned",
                                                        "load abandoned",
                                                        "loads blamed",
                                                        "thinned",
                                                        "thickened",
                                                        "preempted",
                                                        "lost blocks",
                                                        "replayed rows",
                                                        "gone moved",
                                                        "on host",
                                                        "auto on host",
                                                        "context refused",
                                                        "host found",
                                                        "host ended",
                                                        "host spans",
                                                        "host full hits",
                                                        "host drafts",
                                                        "host owned",
                                                        "hot hits",
                                                        "hot fetched",
                                                        "hot left",
                                                        "host regrouped",
                                                        "host moved",
                                                        "host replayed",
                                                        "host pinned",
                                                        "host pins hit",
                                                        "stored on host"};
constexpr std::array<const char*, daemon::kWorkerEvents> kEventNames = {"exited",  "ready",     "timeout",
                                                                        "want up", "want down", "hung"};

// Without a plan in flight no acknowledgement is a duplicate, none can be overtaken and nothing is abandoned.
bool possible(Fault fault, PlanStage stage) {
  return stage != PlanStage::kApplied ||
         (fault != Fault::kDuplicate && fault != Fault::kReordered && fault != Fault::kAbandonment);
}

// While ranks change, another change is refused before anybody asks whether its worker is there.
bool possible(Fault fault, RequestStage stage) {
  return fault != Fault::kGone || stage != RequestStage::kMoving;
}

// What a daemon can make happen: it asks only for workers that have no process, and says that they hang only
// of those with one.
bool possible(daemon::WorkerState state, daemon::WorkerEvent event) {
  using E = daemon::WorkerEvent;
  using S = daemon::WorkerState;
  switch (event) {
    case E::kExited:
      return state != S::kDown;
    case E::kTimeout:
    case E::kWantDown:
      return true;
    case E::kReady:
      return state == S::kStarting;
    case E::kWantUp:
      return state == S::kDown;
    case E::kHung:
      return state == S::kReady || state == S::kStopping;
  }
  return false;
}

template <size_t Rows, size_t Columns>
void table(std::ostream& out, const std::string& title, const std::array<const char*, Rows>& rows,
           const std::array<const char*, Columns>& columns,
           const std::array<std::array<int64_t, Columns>, Rows>& counts) {
  out << std::left << std::setw(14) << title << std::right;
  for (const char* column : columns) out << std::setw(12) << column;
  out << "\n";
  for (size_t r = 0; r < Rows; ++r) {
    out << std::left << std::setw(14) << rows[r] << std::right;
    for (const int64_t count : counts[r]) out << std::setw(12) << count;
    out << "\n";
  }
}

template <size_t N>
void add(std::array<int64_t, N>& to, const std::array<int64_t, N>& from) {
  for (size_t i = 0; i < N; ++i) to[i] += from[i];
}
template <size_t N, size_t M>
void add(std::array<std::array<int64_t, M>, N>& to, const std::array<std::array<int64_t, M>, N>& from) {
  for (size_t i = 0; i < N; ++i) add(to[i], from[i]);
}

std::array<const char*, daemon::kWorkerStates> state_names() {
  std::array<const char*, daemon::kWorkerStates> names{};
  for (size_t s = 0; s < names.size(); ++s)
    names[s] = daemon::worker_state_name(static_cast<daemon::WorkerState>(s));
  return names;
}

}  // namespace

void Coverage::operator+=(const Coverage& other) {
  add(acts, other.acts);
  add(plans, other.plans);
  add(requests, other.requests);
  add(hosts, other.hosts);
  add(supervisor, other.supervisor);
  add(marks, other.marks);
  seeds += other.seeds;
  short_seeds += other.short_seeds;
  events += other.events;
  plans_made += other.plans_made;
  rows += other.rows;
  slots += other.slots;
}

void print(std::ostream& out, const Coverage& coverage) {
  out << coverage.seeds << " seeds, " << coverage.events << " events, " << coverage.plans_made << " plans, "
      << coverage.rows << " rows, " << coverage.slots << " slots read\n\nevents that did something:\n";
  for (int kind = 0; kind < kActKinds; ++kind) {
    out << "  " << std::left << std::setw(12) << act_name(static_cast<ActKind>(kind)) << std::right
        << std::setw(12) << coverage.acts[static_cast<size_t>(kind)]
        << (kind % 4 == 3 || kind + 1 == kActKinds ? "\n" : "");
  }
  out << "\nmarks:\n";
  for (size_t mark = 0; mark < kMarks; ++mark) {
    out << "  " << std::left << std::setw(17) << kMarkNames[mark] << std::right << std::setw(10)
        << coverage.marks[mark] << (mark % 4 == 3 ? "\n" : "");
  }
  out << "\n";
  table(out, "fault, plan", kFaultNames, kPlanStageNames, coverage.plans);
  out << "\n";
  table(out, "fault, request", kFaultNames, kRequestStageNames, coverage.requests);
  out << "\n";
  table(out, "fault, on host", kFaultNames, kHostStageNames, coverage.hosts);
  out << "\n";
  table(out, "supervisor", state_names(), kEventNames, coverage.supervisor);
}

std::vector<std::string> missing(const Coverage& coverage) {
  std::vector<std::string> found;
  if (coverage.short_seeds > 0)
    found.push_back("enough events in " + std::to_string(coverage.short_seeds) + " seeds");
  for (int kind = 0; kind < kActKinds; ++kind) {
    if (coverage.acts[static_cast<size_t>(kind)] == 0)
      found.emplace_back(act_name(static_cast<ActKind>(kind)));
  }
  for (size_t mark = 0; mark < kMarks; ++mark) {
    if (coverage.marks[mark] == 0) found.emplace_back(kMarkNames[mark]);
  }
  for (size_t f = 0; f < kFaults; ++f) {
    for (size_t s = 0; s < kPlanStages; ++s) {
      if (coverage.plans[f][s] == 0 && possible(static_cast<Fault>(f), static_cast<PlanStage>(s)))
        found.push_back(std::string(kFaultNames[f]) + " × plan " + kPlanStageNames[s]);
    }
    for (size_t s = 0; s < kRequestStages; ++s) {
      if (coverage.requests[f][s] == 0 && possible(static_cast<Fault>(f), static_cast<RequestStage>(s)))
        found.push_back(std::string(kFaultNames[f]) + " × request " + kRequestStageNames[s]);
    }
    for (size_t s = 0; s < kHostStages; ++s) {
      if (coverage.hosts[f][s] == 0)
        found.push_back(std::string(kFaultNames[f]) + " × on host " + kHostStageNames[s]);
    }
  }
  for (size_t s = 0; s < daemon::kWorkerStates; ++s) {
    for (size_t e = 0; e < daemon::kWorkerEvents; ++e) {
      const auto state = static_cast<daemon::WorkerState>(s);
      if (coverage.supervisor[s][e] == 0 && possible(state, static_cast<daemon::WorkerEvent>(e)))
        found.push_back(std::string("supervisor ") + daemon::worker_state_name(state) + " × " +
                        kEventNames[e]);
    }
  }
  return found;
}

}  // namespace weft::simulation
