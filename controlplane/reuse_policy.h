// Which unused chains of blocks are worth keeping, judged by how chains like them came back before. For
// agents: a session comes back again and again, some within seconds, some after a human has thought.
//
// A chain is followed from request to request through the identities of its blocks, also while none of them
// is cached. What is known of it (how often it came back, after what gaps) puts it into one kind of each of
// two systems; a GapTable for each kind learns when chains of it return. A chain's worth is the mean over
// both systems. The price of room is one over the time the cache takes to turn over, times a factor.
//
// Pure and deterministic: time comes with the calls and must not go back. Not thread-safe. Bounded: the
// histories of the chains that ended longest ago are dropped beyond kHistories.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <unordered_map>
#include <vector>

#include "controlplane/eviction_policy.h"
#include "controlplane/gap_table.h"
#include "controlplane/shared_list.h"
#include "kv/block_hash.h"
#include "proto/vocab/clock.h"

namespace weft::controlplane {

// What is known of one chain's returns. Gaps count as natural logarithms of seconds, at least one second.
struct ChainHistory {
  int64_t gaps = 0;
  double last = 0, sum = 0;
  double weight = 0, longs = 0;            // lately: gaps, and those that were long
  double short_weight = 0, short_sum = 0;  // lately: gaps that were not
  void add(double seconds);
};

class ReusePolicy : public EvictionPolicy {
 public:
  static constexpr size_t kHistories = 16384;

  // A request with these blocks is let in, having come at `now`: what is known of the chain it continues.
  ChainHistory arrived(const Identities& prompt, Time now);
  // The chain of a request is unused from now on. Its next request is recognised by the blocks of the prompt,
  // the first so many: the answer may come back changed.
  Unused ended(const ChainHistory& history, const Identities& identities, int64_t prompt, Time now);
  // The same when a request has only begun but its blocks can be evicted already: gaps are counted from its
  // beginning to the next one's, and say nothing about other chains' rest. ended() may follow.
  Unused begun(const ChainHistory& history, const Identities& identities, int64_t prompt, Time now);

  double worth(const Unused& unused, Time now) override;
  Time next_change(const Unused& unused, Time now) const override;
  // So many blocks of `cached` have been evicted up to now.
  void evicted(int64_t blocks, int64_t cached, Time now);

 private:
  struct Record {
    ChainHistory history;
    Unused begun, ended;
    std::array<kv::BlockHash, 2> marks;
    size_t mark_count = 0;
  };
  using Records = std::list<Record>;  // in order of the last use

  Unused open(const ChainHistory& history, bool begun, Time now);
  Record& record_of(const ChainHistory& history, const Identities& identities, int64_t prompt);
  void drop_marks(Records::iterator record);
  GapTable& table(uint32_t kind) { return tables_.at(kind); }

  Records records_;
  std::unordered_map<kv::BlockHash, Records::iterator, kv::BlockHashHasher> by_mark_;
  std::map<uint32_t, GapTable> tables_;
  double price_ = 0;  // of a block's room, in hits per second
  double evictions_ = 0;
  Time counted_{};
};

}  // namespace weft::controlplane
