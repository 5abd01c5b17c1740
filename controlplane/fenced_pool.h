// Hands out numbered things (pages, tables) that plans in flight may still name after they are given back.
//
// Each id is in exactly one of three states: free → taken → (in flight →) free. An id given back behind a
// fence is handed out again only when every step up to the fence has been acknowledged by all ranks. Keeps:
// free + taken + in flight == count. Order is deterministic: the id freed last is taken first (a pool that is
// never full touches little memory); at first 0, 1, 2, …
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "proto/vocab/check.h"
#include "proto/vocab/ids.h"

namespace weft::controlplane {

template <typename Id>
class FencedPool {
 public:
  explicit FencedPool(int64_t count) : state_(static_cast<size_t>(count), State::kFree) {
    free_.reserve(state_.size());
    for (int64_t id = count - 1; id >= 0; --id) free_.push_back(static_cast<Id>(id));
  }

  std::optional<Id> take() {
    if (free_.empty()) return std::nullopt;
    const Id id = free_.back();
    free_.pop_back();
    move(id, State::kFree, State::kTaken);
    return id;
  }

  // Fences never decrease from one call to the next, except those that are already complete.
  void give_back(Id id, StepId fence, StepId completed) {
    if (fence <= completed) {
      move(id, State::kTaken, State::kFree);
      free_.push_back(id);
      return;
    }
    CHECK(in_flight_.empty() || in_flight_.back().fence <= fence, "fences go back");
    move(id, State::kTaken, State::kInFlight);
    in_flight_.push_back({id, fence});
  }

  // All ranks have acknowledged every step up to `completed`.
  void complete(StepId completed) {
    while (!in_flight_.empty() && in_flight_.front().fence <= completed) {
      const Id id = in_flight_.front().id;
      in_flight_.pop_front();
      move(id, State::kInFlight, State::kFree);
      free_.push_back(id);
    }
  }

  int64_t count() const { return static_cast<int64_t>(state_.size()); }
  int64_t free_count() const { return static_cast<int64_t>(free_.size()); }
  int64_t in_flight_count() const { return static_cast<int64_t>(in_flight_.size()); }
  int64_t taken_count() const { return count() - free_count() - in_flight_count(); }
  bool is_taken(Id id) const { return state_.at(static_cast<size_t>(number(id))) == State::kTaken; }

  void check_invariants() const {
    int64_t taken = 0;
    for (const State state : state_) taken += state == State::kTaken ? 1 : 0;
    CHECK_EQ(taken, taken_count());
    for (const Id id : free_) CHECK(state_[number(id)] == State::kFree);
    for (const auto& waiting : in_flight_) CHECK(state_[number(waiting.id)] == State::kInFlight);
  }

 private:
  enum class State : uint8_t { kFree, kTaken, kInFlight };
  struct Waiting {
    Id id;
    StepId fence;
  };
  void move(Id id, State from, State to) {
    CHECK_LT(static_cast<size_t>(number(id)), state_.size());
    CHECK(state_[number(id)] == from, "id ", number(id), " given back twice or never taken");
    state_[number(id)] = to;
  }

  std::vector<State> state_;
  std::vector<Id> free_;  // a stack
  std::deque<Waiting> in_flight_;
};

}  // namespace weft::controlplane
