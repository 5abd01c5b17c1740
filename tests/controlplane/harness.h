// Drives one control plane and simulated workers step by step, for tests that say exactly what happens.
#pragma once

#include <gtest/gtest.h>

#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "controlplane/control_plane.h"
#include "tests/simulation/workers.h"

namespace weft::controlplane {

using simulation::kVocabulary;
using simulation::Truth;

// P = 4, both streams, equal pools.
inline Limits small_limits(int rank_count, int64_t pages) {
  Limits limits;
  limits.rank_count = rank_count;
  limits.geometry.block_tokens = 4;
  limits.geometry.streams = {kv::StreamGeometry{2, 16}, kv::StreamGeometry{1, 8}};
  limits.pool_pages.assign(static_cast<size_t>(rank_count), {pages, pages});
  limits.max_context = 256;
  limits.max_running = 8;
  limits.max_waiting = 16;
  limits.max_samples = 8;
  limits.max_step_rows = 256;
  limits.table_count = 12;
  return limits;
}

inline std::vector<uint32_t> text(uint32_t seed, int64_t count) {
  std::vector<uint32_t> tokens;
  for (int64_t i = 0; i < count; ++i)
    tokens.push_back((seed * 7 + static_cast<uint32_t>(i) * 3) % kVocabulary);
  return tokens;
}

inline GroupingWish wish(kv::DecodeKind kind, int c = 1, kv::IndexWish index = {}) {
  GroupingWish out;
  out.decode = {kind, c};
  out.index = index;
  return out;
}
inline const GroupingWish kTpWish = wish(kv::DecodeKind::kTp);

class Harness {
 public:
  explicit Harness(const Limits& limits) : limits(limits), plane(this->limits), workers(this->limits) {}

  struct Outcome {
    std::vector<uint32_t> tokens;
    std::vector<int64_t> prefill_done;
    std::vector<DraftNotice> drafts;
    std::optional<FinishedNotice> finished;
  };

  RequestArrived arrival(std::vector<uint32_t> prompt, int64_t max_tokens, GroupingWish grouping = kTpWish,
                         const std::string& salt = "") {
    RequestArrived out;
    out.request = RequestId{++requests_};
    out.prompt = std::move(prompt);
    out.max_tokens = max_tokens;
    out.grouping = grouping;
    out.root = kv::namespace_hash("model", "format", salt);
    out.hashes = kv::block_hashes(out.root, out.prompt, limits.geometry.block_tokens);
    return out;
  }
  RequestId submit(const RequestArrived& arrived, int64_t nan_row = -1) {
    workers.add(arrived.request, truth_of(arrived.prompt, arrived.max_tokens, arrived.stop_tokens, nan_row));
    feed(arrived);
    return arrived.request;
  }
  RequestId submit(std::vector<uint32_t> prompt, int64_t max_tokens, GroupingWish grouping = kTpWish,
                   const std::string& salt = "") {
    return submit(arrival(std::move(prompt), max_tokens, grouping, salt));
  }

  // A turn that goes on from an ended request.
  RequestArrived turn(RequestId parent, const std::vector<uint32_t>& behind, int64_t max_tokens,
                      GroupingWish grouping = kTpWish) {
    RequestArrived out;
    out.request = RequestId{++requests_};
    out.parent = parent;
    out.prompt = behind;
    out.max_tokens = max_tokens;
    out.grouping = grouping;
    const std::optional<ContextTail> context = plane.context(parent);
    if (!context) return out;
    out.root = context->root;
    std::vector<uint32_t> rest = context->rest;
    rest.insert(rest.end(), behind.begin(), behind.end());
    out.hashes = kv::block_hashes(context->last, rest, limits.geometry.block_tokens);
    return out;
  }
  // `whole`: the text that the turn is about.
  RequestId submit_turn(RequestArrived arrived, const std::vector<uint32_t>& whole) {
    workers.add(arrived.request, truth_of(whole, arrived.max_tokens, arrived.stop_tokens));
    feed(arrived);
    return arrived.request;
  }
  // What a request should come to.
  Truth truth_of(std::vector<uint32_t> prompt, int64_t max_tokens,
                 const std::vector<uint32_t>& stop_tokens = {}, int64_t nan_row = -1) const {
    return simulation::truth_of(limits.geometry, 0, std::move(prompt), max_tokens, stop_tokens, nan_row);
  }

  void feed(const Event& event) {
    for (const Notice& notice : plane.handle(now, {&event, 1})) take(notice);
    plane.check_invariants();
  }
  void pass_time(Time now) {
    for (const Notice& notice : plane.handle(now, {})) take(notice);
    plane.check_invariants();
  }
  // Makes a plan and publishes it; not executed yet.
  std::optional<Plan> plan() {
    auto made = plane.next_plan(now);
    plane.check_invariants();
    if (made) {
      std::vector<std::shared_ptr<const Plan>> others;
      for (const Plan& other : in_flight) others.push_back(std::make_shared<const Plan>(other));
      workers.write_tables(*made, others);
      in_flight.push_back(*made);
    }
    return made;
  }
  // All ranks run a plan, in an epoch of its own; after so many written slots and pages they die.
  std::vector<Sample> execute(const Plan& plan, int64_t writes = std::numeric_limits<int64_t>::max()) {
    workers.begin_epoch();
    for (int rank = 0; rank < limits.rank_count; ++rank)
      workers.results(rank).clear();  // of a plan that not all have done
    workers.publish(std::make_shared<const Plan>(plan));
    std::vector<Sample> samples;
    for (bool any = true; any;) {
      any = false;
      for (int rank = 0; rank < limits.rank_count; ++rank) {
        if (!workers.ready(rank)) continue;
        if (!workers.run(rank, &writes)) return {};
        any = true;
      }
    }
    for (int rank = 0; rank < limits.rank_count; ++rank) {
      for (const auto& outcome : workers.results(rank))
        samples.insert(samples.end(), outcome.samples.begin(), outcome.samples.end());
      workers.results(rank).clear();
    }
    return samples;
  }
  // Executes the oldest plan; all ranks acknowledge it.
  void run_oldest() {
    ASSERT_FALSE(in_flight.empty());
    const Plan done = in_flight.front();
    in_flight.pop_front();
    std::vector<Sample> samples = execute(done);
    for_each_rank(done.ranks, [&](int rank) {
      feed(StepAcknowledged{done.step, rank, std::exchange(samples, {})});
    });
  }
  // One step, nothing overlapping. False: there was nothing to run.
  bool step() {
    if (!plan()) return false;
    run_oldest();
    return true;
  }
  void run_all() {
    while (step()) {
    }
  }

  PoolCounts entries(int rank = 0) const { return plane.pool(kv::Stream::kEntries, rank); }
  const Outcome& outcome(RequestId id) { return outcomes[id]; }
  const FinishedNotice& finished(RequestId id) { return outcomes[id].finished.value(); }
  // The answer is the one the request gets alone.
  void expect_right(RequestId id) {
    const Truth& truth = workers.truth(id);
    const std::vector<uint32_t> answer(truth.tokens.begin() + truth.prompt, truth.tokens.end());
    EXPECT_EQ(outcomes[id].tokens, answer);
    ASSERT_TRUE(outcomes[id].finished.has_value());
    EXPECT_EQ(finished(id).reason, truth.reason);
  }

  const Limits limits;
  Time now{};
  ControlPlane plane;
  simulation::Workers workers;
  std::deque<Plan> in_flight;
  std::map<RequestId, Outcome> outcomes;
  std::vector<RegroupedNotice> regrouped;
  std::vector<PinNotice> pins;
  std::vector<TopologyNotice> topologies;
  std::vector<PressureNotice> pressed;

 private:
  void take(const Notice& notice) {
    if (const auto* token = std::get_if<TokenNotice>(&notice)) {
      EXPECT_EQ(token->index, static_cast<int64_t>(outcomes[token->request].tokens.size()));
      outcomes[token->request].tokens.push_back(token->token);
    } else if (const auto* drafts = std::get_if<DraftNotice>(&notice)) {
      outcomes[drafts->request].drafts.push_back(*drafts);
    } else if (const auto* prefill = std::get_if<PrefillNotice>(&notice)) {
      outcomes[prefill->request].prefill_done.push_back(prefill->done);
    } else if (const auto* finished = std::get_if<FinishedNotice>(&notice)) {
      EXPECT_FALSE(outcomes[finished->request].finished.has_value());
      outcomes[finished->request].finished = *finished;
    } else if (const auto* pin = std::get_if<PinNotice>(&notice)) {
      pins.push_back(*pin);
    } else if (const auto* topology = std::get_if<TopologyNotice>(&notice)) {
      topologies.push_back(*topology);
    } else if (const auto* pressure = std::get_if<PressureNotice>(&notice)) {
      pressed.push_back(*pressure);
    } else {
      regrouped.push_back(std::get<RegroupedNotice>(notice));
    }
  }
  uint64_t requests_ = 0;
};

}  // namespace weft::controlplane
