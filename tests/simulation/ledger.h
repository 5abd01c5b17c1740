// The book of requests: what each was told so far, and whether that is what it had to be told.
//
// Checkers "tokens", "notices" and "stored" live here; so do the sums that the control plane's counters must
// equal. A request is live from its arrival to its FinishedNotice.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "controlplane/control_plane.h"
#include "tests/simulation/coverage.h"
#include "tests/simulation/verdict.h"
#include "tests/simulation/workers.h"

namespace weft::simulation {

class Ledger {
 public:
  using Plans = std::deque<std::shared_ptr<const Plan>>;
  // `unapplied`: the plans whose effects the control plane has not taken yet, oldest first.
  Ledger(const Limits& limits, const Workers& workers, const Plans& unapplied, Verdict verdict,
         Coverage& coverage)
      : limits_(limits), workers_(workers), unapplied_(unapplied), verdict_(verdict), coverage_(coverage) {}

  struct Live {
    RequestArrived arrival;
    std::optional<Time> deadline;
    int64_t answered = 0, drafted = 0, accepted = 0, prefilled = 0;
    bool cancelled = false, paused = false, unknown_parent = false;
    bool abandoned_alone = false;
    bool placed = false, on_host = false;   // where its context lies, as soon as that is known
    std::optional<RequestSnapshot> before;  // the latest event, if its bytes are known from outside
    kv::Topology places;                    // of then
  };

  // `unknown_parent`: it must be refused.
  void arrived(const RequestArrived& arrival, Time now, bool unknown_parent);
  void remember(const ControlPlane& plane);
  // Where the contexts of those who came lie: as they asked.
  void place(const ControlPlane& plane);
  void take(std::span<const Notice> notices);

  std::map<RequestId, Live>& live() { return live_; }
  const std::map<RequestId, Live>& live() const { return live_; }
  // What the control plane's counters of the same names must be.
  const Counters& sums() const { return sums_; }
  // A change of the topology is asked for; its notice says how it ended.
  void topology_requested(uint64_t command, RankMask before, RankMask after, bool gone) {
    change_ = Change{command, before, after, gone, 0};
    changed_ever_ = true;
  }
  // Another one, while one goes on: it must be refused.
  void second_topology_requested(uint64_t command) { refusals_.insert(command); }
  void moved(int64_t bytes) { change_->moved += bytes; }  // by a plan of the change
  void host_moved(int64_t spilled, int64_t loaded) {      // by a plan that is done
    sums_.spilled_bytes += spilled;
    sums_.loaded_bytes += loaded;
  }
  bool changing() const { return change_.has_value(); }
  // Some requests may read their prompts again.
  void memory_lost(const ControlPlane& plane);
  // The ranks that are to take part now, once.
  std::optional<RankMask> take_topology() { return std::exchange(topology_, std::nullopt); }
  int64_t pins() const { return std::ssize(pinned_); }
  // Requests that failed since this was asked: what they computed is not trusted.
  std::vector<FinishedNotice> take_failures() { return std::exchange(failures_, {}); }

 private:
  void on(const TokenNotice& notice);
  void on(const DraftNotice& notice);
  void on(const PrefillNotice& notice);
  void on(const RegroupedNotice& notice);
  void on(const PinNotice& notice);
  void on(const TopologyNotice& notice);
  void on(const PressureNotice& notice);
  void on(const FinishedNotice& notice);
  void check_end(const FinishedNotice& notice, const Live& live, const Truth& truth);
  void check_error(const FinishedNotice& notice, const Live& live, const Truth& truth);
  ErrorCode host_refusal(const RequestArrived& arrival) const;
  bool loads_wait(const FinishedNotice& notice, const Live& live) const;
  void check_stored(const FinishedNotice& notice, const Live& live);
  Live& find(RequestId id);
  void count(Mark mark, bool happened = true) { coverage_.mark(mark) += happened ? 1 : 0; }

  const Limits& limits_;
  const Workers& workers_;
  const Plans& unapplied_;
  const Verdict verdict_;
  Coverage& coverage_;
  std::map<RequestId, Live> live_;
  Counters sums_;
  RequestId arriving_{0};
  struct Change {
    uint64_t command = 0;
    RankMask before = 0, after = 0;
    bool gone = false;  // the workers of `before` are not all there
    int64_t moved = 0;
  };
  std::optional<Change> change_;
  std::set<uint64_t> refusals_;
  std::optional<RankMask> topology_;
  bool changed_ever_ = false;
  std::set<uint64_t> pinned_;
  std::vector<FinishedNotice> failures_;
};

}  // namespace weft::simulation
