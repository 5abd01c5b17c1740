// Which unused chains of blocks are worth keeping, judged by how chains like them came back before. For
// agents: a session comes back again and again, some within seconds, some after a human has thought.
//
// A chain is followed from request to request through the identities of its blocks, also while none of them
// is cached. What is known of it (after what gaps it came back, how often, how long it is and how much longer
// it got, how long it was served) says how likely it is to come back at each age: ReturnOdds, which learn
// from every chain that is followed, one for requests that have begun and one for those that have ended. The
// chain that promises least for a second of room makes room first.
//
// Pure and deterministic: time comes with the calls and must not go back. Not thread-safe. Bounded: the
// histories of the chains that ended longest ago are dropped beyond kHistories. O(log n) for each request and
// for each age that a chain passes, of which there are few: each is a fifth longer than the one before.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <set>
#include <unordered_map>
#include <utility>

#include "controlplane/eviction_policy.h"
#include "controlplane/return_odds.h"
#include "controlplane/shared_list.h"
#include "kv/block_hash.h"
#include "proto/vocab/clock.h"

namespace weft::controlplane {

// A mean in which older values count less; before any, and beside the first ones, `typical` ones.
struct FadingMean {
  double sum = 0, weight = 0;
  void add(double value, double keep) {
    sum = sum * keep + value;
    weight = weight * keep + 1;
  }
  double mean(double typical, double typical_weight) const {
    return (sum + typical * typical_weight) / (weight + typical_weight);
  }
};

// What is known of one chain. Gaps, from the end of a request to the next one, and services, from arrival to
// end, count as natural logarithms of seconds, at least one second.
struct ChainHistory {
  int64_t gaps = 0;
  double last = 0, before = 0;     // the latest one, and the one before it
  FadingMean recent, all, longs, shorts;  // gaps; all of them; the share of long ones; those that were not
  FadingMean services;
  int64_t blocks = 0, growth = 0;  // of the latest prompt, and beyond the one before it
  Time arrived{};                  // its request
  void add_gap(double seconds);
};

class ReusePolicy : public EvictionPolicy {
 public:
  static constexpr size_t kHistories = 16384;
  ReusePolicy() : ReusePolicy(ReturnOdds::begun(), ReturnOdds::ended()) {}
  ReusePolicy(const ReturnOdds& begun, const ReturnOdds& ended) : begun_(begun), ended_(ended) {}

  // A request with these blocks is let in, having come at `now`: what is known of the chain it continues.
  ChainHistory arrived(const Identities& prompt, Time now);
  // The chain of a request is unused from now on. Its next request is recognised by the blocks of the prompt,
  // the first so many: the answer may come back changed.
  Unused ended(const ChainHistory& history, const Identities& identities, int64_t prompt, Time now);
  // The same when a request has only begun but its blocks can be evicted already. ended() may follow.
  Unused begun(const ChainHistory& history, const Identities& identities, int64_t prompt, Time now);

  double worth(const Unused& unused, Time now) override;
  Time next_change(const Unused& unused, Time now) const override;
  void advance(Time now);
  const ReturnOdds& odds(bool begun) const { return begun ? begun_ : ended_; }

 private:
  // A chain as it was when it became unused, and the age that the odds learn of next.
  struct Watch {
    Unused unused;
    int age = 0;
  };
  struct Record {
    uint64_t number = 0;
    ChainHistory history;
    Watch begun, ended;
    std::array<kv::BlockHash, 2> marks;
    size_t mark_count = 0;
  };
  using Records = std::list<Record>;  // in order of the last use
  // When a watch passes its age, and whose it is.
  struct Due {
    Time when;
    uint64_t record;
    bool begun;
    friend auto operator<=>(const Due&, const Due&) = default;
  };

  ReturnOdds& odds(bool begun) { return begun ? begun_ : ended_; }
  static Due due(const Record& record, const Watch& watch);
  Record& record_of(const Identities& identities, int64_t prompt);
  void follow(const Record& record, const Watch& watch);
  void unfollow(const Record& record, const Watch& watch);
  Unused begin_watch(Record& record, Watch& watch, const Unused& unused);
  void returned(const Watch& watch, Time now);
  void erase(Records::iterator record);

  Records records_;
  std::unordered_map<kv::BlockHash, Records::iterator, kv::BlockHashHasher> by_mark_;
  std::unordered_map<uint64_t, Records::iterator> by_number_;
  uint64_t numbers_ = 0;
  std::set<Due> due_;
  ReturnOdds begun_, ended_;
};

}  // namespace weft::controlplane
