#include "tests/simulation/run.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iostream>
#include <memory>

namespace weft::simulation {
namespace {

constexpr int kFailed = 3;              // exit status of a run in which a checker found something
constexpr unsigned kHangSeconds = 120;  // of one run; it then ends by SIGALRM
constexpr timespec kProgressInterval = {0, 200'000'000};

// Memory that a process shares with its children.
template <typename T>
class Shared {
 public:
  Shared() {
    void* at = ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    value_ = new (at) T();
  }
  ~Shared() { ::munmap(value_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T* operator->() { return value_; }
  T& operator*() { return *value_; }

 private:
  T* value_;
};

// The ends of children, from when this exists.
class ChildSignals {
 public:
  ChildSignals() {
    ::sigemptyset(&child_);
    ::sigaddset(&child_, SIGCHLD);
    CHECK(::sigprocmask(SIG_BLOCK, &child_, &before_) == 0);
  }
  ~ChildSignals() { ::sigprocmask(SIG_SETMASK, &before_, nullptr); }
  ChildSignals(const ChildSignals&) = delete;
  ChildSignals& operator=(const ChildSignals&) = delete;
  // Until one more has ended, or for this long.
  void wait(timespec most) const { ::sigtimedwait(&child_, nullptr, &most); }

 private:
  sigset_t child_{}, before_{};
};

void tell(std::ostream& out, const World& world, int64_t at, const Act& act) {
  out << "#" << at << " " << act_name(act.kind) << " " << act.draw << "  → "
      << static_cast<double>(world.core().now.ns) * 1e-9 << " s, " << world.core().ledger.live().size()
      << " live" << (world.engine().epoch_active() ? "" : ", no epoch") << ";";
  constexpr std::array kStages = {"made", "published", "half run", "executed", "all but one", "applied"};
  for (const auto& standing : world.engine().standing()) {
    out << " step " << number(standing.plan->step) << " " << kStages[static_cast<size_t>(standing.stage)]
        << " (";
    for (const Span& span : standing.plan->spans)
      out << " " << number(span.request) << ":" << span.start << "+" << span.rows
          << (span.prefill ? "p" : "d");
    const auto count = [&](size_t number, const char* what) {
      if (number > 0) out << " " << number << what;
    };
    count(standing.plan->copies.size(), " copies");
    count(standing.plan->loads.size(), " loads");
    count(standing.plan->spills.size(), " spills");
    out << " )";
  }
  out << std::endl;
}

std::string kind_of(const std::string& text, int status) {
  if (WIFEXITED(status) && WEXITSTATUS(status) == kFailed) return "checker " + text.substr(0, text.find(':'));
  const size_t check = text.rfind("CHECK failed at ");
  if (check != std::string::npos) {
    const size_t colon = text.find(": ", check);
    return "CHECK " + text.substr(check + 16, colon - check - 16);
  }
  return WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status))
                             : "exit " + std::to_string(WEXITSTATUS(status));
}

}  // namespace

void run_here(const Script& script, const Conditions& conditions, Coverage& coverage, int64_t& at,
              std::ostream* trace) {
  const Setup setup = setup_of(script.seed);
  World world(setup, conditions.verdict, coverage, conditions.seams);
  if (conditions.prepare) conditions.prepare(world);
  if (trace != nullptr) world.after_act = [&](const Act& act) { tell(*trace, world, at, act); };
  int64_t events = 0;
  for (const Act& act : script.acts) {
    if (events == script.events) break;
    ++at;
    events += world.apply(act) ? 1 : 0;
  }
  coverage.short_seeds += events < script.events ? 1 : 0;
  world.settle();
}

Outcome run_apart(const Script& script, const Conditions& conditions) {
  struct Report {
    Coverage coverage;
    int64_t at = 0;
  };
  Shared<Report> report;
  int ends[2];
  CHECK(::pipe(ends) == 0);
  std::cout.flush();
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    ::alarm(kHangSeconds);
    ::dup2(ends[1], STDERR_FILENO);
    ::close(ends[0]);
    ::close(ends[1]);
    try {
      run_here(script, conditions, report->coverage, report->at);
    } catch (const Failure& failure) {
      [[maybe_unused]] const auto n = ::write(STDERR_FILENO, failure.what(), std::strlen(failure.what()));
      ::_exit(kFailed);
    }
    ::_exit(0);
  }
  ::close(ends[1]);
  Outcome outcome;
  char buffer[4096];
  for (ssize_t got; (got = ::read(ends[0], buffer, sizeof buffer)) > 0;)
    outcome.text.append(buffer, static_cast<size_t>(got));
  ::close(ends[0]);
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  outcome.failed = status != 0;
  if (outcome.failed) outcome.kind = kind_of(outcome.text, status);
  outcome.acts = report->at;
  outcome.coverage = report->coverage;
  return outcome;
}

BatchOutcome run_batch(const Batch& batch, const Conditions& conditions,
                       const std::function<void(int64_t)>& progress) {
  struct Report {
    Coverage coverage;
    uint64_t seed = 0;  // that runs
  };
  std::vector<std::unique_ptr<Shared<Report>>> reports;
  std::vector<pid_t> children;
  ChildSignals child_signals;
  std::cout.flush();
  for (int job = 0; job < batch.jobs; ++job) {
    Report& report = **reports.emplace_back(std::make_unique<Shared<Report>>());
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) {
      for (uint64_t seed = batch.first + static_cast<uint64_t>(job); seed <= batch.last;
           seed += static_cast<uint64_t>(batch.jobs)) {
        ::alarm(kHangSeconds);
        report.seed = seed;
        int64_t at = 0;
        try {
          run_here(script_of(setup_of(seed), batch.events), conditions, report.coverage, at);
        } catch (const Failure&) {
          ::_exit(kFailed);
        }
      }
      ::_exit(0);
    }
    children.push_back(child);
  }
  BatchOutcome outcome;
  for (size_t left = children.size(); left > 0;) {
    int status = 0;
    const pid_t ended = ::waitpid(-1, &status, WNOHANG);
    int64_t done = 0;
    for (const auto& report : reports) done += (*report)->coverage.seeds;
    if (ended == 0) {
      progress(done);
      child_signals.wait(kProgressInterval);
      continue;
    }
    const auto which = std::find(children.begin(), children.end(), ended);
    CHECK(which != children.end());
    --left;
    *which = -1;
    if (status == 0 || outcome.failed) continue;
    outcome.failed = (*reports[static_cast<size_t>(which - children.begin())])->seed;
    for (const pid_t other : children) {
      if (other > 0) ::kill(other, SIGKILL);
    }
  }
  for (const auto& report : reports) outcome.coverage += (*report)->coverage;
  return outcome;
}

Script shrink(Script script, const Outcome& outcome, const Conditions& conditions,
              const std::function<void(const Script&)>& progress) {
  const auto still = [&](const Script& candidate) {
    const Outcome again = run_apart(candidate, conditions);
    return again.failed && again.kind == outcome.kind;
  };
  Script cut = script;
  cut.acts.resize(static_cast<size_t>(outcome.acts));
  if (still(cut)) script = cut;
  for (size_t piece = std::max<size_t>(script.acts.size() / 2, 1);; piece = std::max<size_t>(piece / 2, 1)) {
    bool any = false;
    for (size_t begin = 0; begin < script.acts.size();) {
      Script candidate{script.seed, script.events, {}};
      const size_t end = std::min(begin + piece, script.acts.size());
      candidate.acts.insert(candidate.acts.end(), script.acts.begin(),
                            script.acts.begin() + static_cast<std::ptrdiff_t>(begin));
      candidate.acts.insert(candidate.acts.end(), script.acts.begin() + static_cast<std::ptrdiff_t>(end),
                            script.acts.end());
      if (still(candidate)) {
        script = std::move(candidate);
        any = true;
        progress(script);
      } else {
        begin = end;
      }
    }
    if (piece == 1 && !any) return script;
  }
}

}  // namespace weft::simulation
