// Plans in flight between the control plane and the workers: which results count, what is repeated, what is
// given up.
//
// The rules alone, apart from how plans and results travel. A plan is *done* when every rank that takes part
// in it has reported it in the present epoch, and plans are done in order of steps. Results that still arrive
// after an epoch was lost count. When the next one begins, what is not done has to be published again, and
// every rank has to report again: one whose old report stood could still be writing in its repeat. A plan
// that was lost with two epochs that failed is abandoned, with all behind it; with epochs that ended because
// somebody killed a worker, which says little about the plan, after many. A repeat draws what earlier
// attempts drew.
//
// `Parcel` is what the owner keeps with a plan, `Report` what one rank says of it beside its samples. No
// clock, transport or thread.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "controlplane/event.h"
#include "proto/vocab/check.h"
#include "proto/vocab/ids.h"

namespace weft::daemon {

// How an epoch was lost: a worker crashed or hung; or it was killed from outside, by hand or by the kernel,
// which may be short of memory.
enum class Loss : uint8_t { kFailed, kKilled };

// A plan that was lost with so many epochs is abandoned.
inline constexpr int kFailedEpochsMax = 2;
inline constexpr int kKilledEpochsMax = 16;

template <typename Parcel, typename Report>
class Flights {
 public:
  using Sample = controlplane::Sample;
  struct Reported {
    Report report;
    std::vector<Sample> samples;
  };
  struct Flight {
    StepId step{};
    RankMask ranks = 0;
    Parcel parcel;
    int failed_epochs = 0, killed_epochs = 0;
    std::array<std::optional<Reported>, kMaxRanks> reports;
    std::vector<Sample> drawn;  // by earlier attempts

    bool done() const {
      for (RankMask left = ranks; left != 0; left &= left - 1) {
        if (!reports[static_cast<size_t>(lowest_rank(left))]) return false;
      }
      return true;
    }
    bool hopeless() const { return failed_epochs >= kFailedEpochsMax || killed_epochs >= kKilledEpochsMax; }
    const Report& report(int rank) const { return reports[static_cast<size_t>(rank)]->report; }
    controlplane::StepAcknowledged acknowledgement(int rank) const {
      return {step, rank, reports[static_cast<size_t>(rank)]->samples};
    }
  };

  // While an epoch runs, plans can be made and published.
  bool active() const { return active_; }
  bool empty() const { return flights_.empty(); }
  size_t size() const { return flights_.size(); }
  Flight& front() { return flights_.front(); }
  auto begin() { return flights_.begin(); }
  auto end() { return flights_.end(); }
  auto begin() const { return flights_.begin(); }
  auto end() const { return flights_.end(); }

  Flight& add(StepId step, RankMask ranks, Parcel parcel) {
    CHECK(active_, "nobody would run it");
    flights_.push_back({step, ranks, std::move(parcel), 0, 0, {}, {}});
    return flights_.back();
  }

  // Null: it is done, or was given up.
  Flight* find(StepId step) {
    const auto found =
        std::find_if(flights_.begin(), flights_.end(), [&](const Flight& one) { return one.step == step; });
    return found == flights_.end() ? nullptr : &*found;
  }
  // Takes what a rank reports; returns samples that an earlier attempt drew otherwise, as then and as now.
  std::vector<std::pair<Sample, Sample>> take(Flight& flight, int rank, Report report,
                                              std::vector<Sample> samples) {
    std::vector<std::pair<Sample, Sample>> differ;
    for (const Sample& now : samples) {
      for (const Sample& before : flight.drawn) {
        if (before.sample_index == now.sample_index && !same(before, now)) differ.emplace_back(before, now);
      }
    }
    flight.reports[static_cast<size_t>(rank)] = Reported{std::move(report), std::move(samples)};
    return differ;
  }
  // The next plan that is done, once.
  std::optional<Flight> take_done() {
    if (flights_.empty() || !flights_.front().done()) return std::nullopt;
    std::optional<Flight> done = std::move(flights_.front());
    flights_.pop_front();
    return done;
  }

  // ---- epochs
  // The epoch is over: no plan is made or published before the next one begins.
  void stop() { active_ = false; }
  // It was lost. What had arrived by then has been taken after stop(), and is before the next one begins.
  void epoch_lost(Loss loss) {
    CHECK(!active_, "it is over");
    if (flights_.empty()) return;
    Flight& first = flights_.front();
    ++(loss == Loss::kFailed ? first.failed_epochs : first.killed_epochs);
  }
  // All that is left has to be published again. Returns how many plans are abandoned instead.
  size_t epoch_begins() {
    const size_t abandoned = !flights_.empty() && flights_.front().hopeless() ? flights_.size() : 0;
    if (abandoned > 0) flights_.clear();
    active_ = true;
    for (Flight& flight : flights_) {
      for (auto& reported : flight.reports) {
        if (reported)
          flight.drawn.insert(flight.drawn.end(), reported->samples.begin(), reported->samples.end());
        reported.reset();
      }
    }
    return abandoned;
  }
  // They will not be run any more.
  void withdraw() {
    CHECK(!active_, "workers run them");
    flights_.clear();
  }

 private:
  static bool same(const Sample& a, const Sample& b) {
    return a.not_finite == b.not_finite && (a.not_finite || a.token == b.token);
  }

  std::deque<Flight> flights_;
  bool active_ = false;
};

}  // namespace weft::daemon
