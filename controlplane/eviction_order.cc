#include "controlplane/eviction_order.h"

#include <algorithm>

#include "proto/vocab/check.h"

namespace weft::controlplane {

void EvictionOrder::begin_chain(const Unused& chain) {
  if (policy_ == nullptr) return;
  // The chain before may have got no run.
  if (const auto last = chains_.find(current_); last != chains_.end() && last->second.runs == 0) {
    erase(current_);
  }
  current_ = 0;
  if (!chain.known) return;
  current_ = ++chain_numbers_;
  Chain& started = chains_[current_];
  started.unused = chain;
  started.worth = policy_->worth(chain, now_);
  started.next_change = policy_->next_change(chain, now_);
  changes_.insert({started.next_change, current_});
}

void EvictionOrder::advance(Time now) {
  now_ = std::max(now_, now);
  while (!changes_.empty() && changes_.begin()->first <= now_) {
    const uint64_t number = changes_.begin()->second;
    changes_.erase(changes_.begin());
    Chain& chain = chains_.at(number);
    const RunId leaf = chain.leaf;
    const Place place{chain.leaf_use, number};
    if (leaf != kNoRun) remove_leaf(leaf, place);
    chain.worth = policy_->worth(chain.unused, now_);
    if (leaf != kNoRun) add_leaf(leaf, place);
    chain.next_change = policy_->next_change(chain.unused, now_);
    changes_.insert({chain.next_change, number});
  }
}

EvictionOrder::Place EvictionOrder::enter() {
  if (current_ != 0) ++chains_.at(current_).runs;
  return {uses_, current_};
}

void EvictionOrder::leave(const Place& place) {
  if (place.chain == 0) return;
  if (--chains_.at(place.chain).runs == 0 && place.chain != current_) erase(place.chain);
}

void EvictionOrder::divide(const Place& place) {
  if (place.chain != 0) ++chains_.at(place.chain).runs;
}

void EvictionOrder::add_leaf(RunId run, const Place& place) {
  leaves_.insert({worth(place), place.last_use, run});
  if (place.chain == 0) return;
  Chain& chain = chains_.at(place.chain);
  CHECK(chain.leaf == kNoRun, "a chain is a path");
  chain.leaf = run;
  chain.leaf_use = place.last_use;
}

void EvictionOrder::remove_leaf(RunId run, const Place& place) {
  CHECK_EQ(leaves_.erase({worth(place), place.last_use, run}), 1u);
  if (place.chain != 0) chains_.at(place.chain).leaf = kNoRun;
}

void EvictionOrder::erase(uint64_t number) {
  changes_.erase({chains_.at(number).next_change, number});
  chains_.erase(number);
}

void EvictionOrder::check_invariants(const std::unordered_map<uint64_t, int64_t>& chain_runs) const {
  for (const auto& [number, chain] : chains_) {
    const auto counted = chain_runs.find(number);
    CHECK_EQ(chain.runs, counted == chain_runs.end() ? 0 : counted->second);
    CHECK(chain.runs > 0 || number == current_);
    CHECK(changes_.contains({chain.next_change, number}));
    if (chain.leaf != kNoRun) CHECK(leaves_.contains({chain.worth, chain.leaf_use, chain.leaf}));
  }
  for (const auto& [number, runs] : chain_runs) CHECK(number == 0 || chains_.contains(number));
  CHECK_EQ(changes_.size(), chains_.size());
}

}  // namespace weft::controlplane
