// In which order the unused runs of the prefix cache give up their tails.
//
// `lru`: the run that was given back first. With a policy: the one whose chain is worth least to it, among
// equals the one given back first. A chain is what one request used and gave back last: a path of runs, so
// that at most one of them is a leaf. A worth is refreshed when its chain reaches the next age that counts,
// by advance(): O(log n) each. Knows no block; prefix_cache.h tells it what becomes of runs.
#pragma once

#include <cstdint>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "controlplane/block_store.h"
#include "controlplane/eviction_policy.h"

namespace weft::controlplane {

class EvictionOrder {
 public:
  // Where an unused run stands.
  struct Place {
    uint64_t last_use = 0;  // equal for what was given back together
    uint64_t chain = 0;     // 0: nothing is known of it
    friend bool operator==(const Place&, const Place&) = default;
  };
  using Leaf = std::tuple<double, uint64_t, RunId>;  // (worth, last use, run)

  // `policy` null: lru.
  explicit EvictionOrder(EvictionPolicy* policy) : policy_(policy) {}

  // What becomes unused from now on belongs to this chain.
  void begin_chain(const Unused& chain);
  // Runs that one sequence gives back follow.
  void begin_use() { ++uses_; }
  // Time has passed; it must not go back.
  void advance(Time now);

  // A run becomes unused now.
  Place enter();
  // It is used again, or gone.
  void leave(const Place& place);
  // It was cut in two: one run more stands there.
  void divide(const Place& place);

  // An unused run got rid of its last child, or is about to get one, or to leave.
  void add_leaf(RunId run, const Place& place);
  void remove_leaf(RunId run, const Place& place);
  const std::set<Leaf>& leaves() const { return leaves_; }
  bool is_leaf(RunId run, const Place& place) const {
    return leaves_.contains({worth(place), place.last_use, run});
  }
  // CHECKs that so many unused runs stand in each chain.
  void check_invariants(const std::unordered_map<uint64_t, int64_t>& chain_runs) const;

 private:
  struct Chain {
    Unused unused;
    double worth = 0;
    int64_t runs = 0;
    RunId leaf = kNoRun;
    uint64_t leaf_use = 0;
    Time next_change{};
  };
  double worth(const Place& place) const { return place.chain == 0 ? 0 : chains_.at(place.chain).worth; }
  void erase(uint64_t number);

  EvictionPolicy* policy_;
  std::set<Leaf> leaves_;
  uint64_t uses_ = 0;
  std::unordered_map<uint64_t, Chain> chains_;
  std::set<std::pair<Time, uint64_t>> changes_;  // (when a chain's worth changes, its number)
  uint64_t chain_numbers_ = 0;
  uint64_t current_ = 0;  // the chain of what becomes unused now; 0: none
  Time now_{};
};

}  // namespace weft::controlplane
