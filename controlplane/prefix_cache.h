// The exact prefix cache: which full blocks can be shared, and which of them can be given up.
//
// Registered blocks form a tree of contexts under their identities (kv/block_hash.h), kept as *runs*: paths
// of consecutive blocks that the same sequences use. A user (a sequence, a pin) holds a *lock* on the last
// registered block of its context, which ends a run; a run counts the locks on it and below. Therefore
//   * looking up, locking and unlocking a context costs O(log blocks + runs on its path), not O(blocks):
//   where
//     nothing branched a conversation is one run, however long,
//   * an identity is registered only if its parent's is, so the longest known prefix is found by bisection,
//   * below an unused block everything is unused, and all unused blocks can be evicted, tails first
//     (eviction_order.h).
// Equal identities are registered once; a second block with the same content stays private to its sequence.
// A forgotten run can no longer be found or grow; it goes when its last user leaves.
#pragma once

#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

#include "controlplane/block_store.h"
#include "controlplane/eviction_order.h"
#include "controlplane/page_counts.h"
#include "controlplane/shared_list.h"

namespace weft::controlplane {

// Blocks of one path, in order. Its children hang on its last block.
struct Run {
  RunId id = kNoRun;  // kNoRun: no record
  int64_t first_index = 0;
  std::deque<BlockId> blocks;  // never empty
  RunId parent = kNoRun, first_child = kNoRun, next_sibling = kNoRun, previous_sibling = kNoRun;
  int64_t users = 0;  // locks on it and below
  bool forgotten = false;
  PageCounts pages;     // of its blocks
  int64_t invalid = 0;  // of them, pages that are not valid
  // Every block has a page wherever this residency wants one.
  std::optional<kv::Residency> covers;
  // While unused.
  EvictionOrder::Place place;
  StepId fence{0};  // last step that may name its blocks

  int64_t end() const { return first_index + std::ssize(blocks); }
  BlockId tail() const { return blocks.back(); }
};

class PrefixCache {
 public:
  // `policy` null: lru.
  PrefixCache(BlockStore& blocks, EvictionPolicy* policy) : blocks_(blocks), order_(policy) {}

  struct Match {
    BlockId tail = kNoBlock;  // kNoBlock: nothing
    int64_t blocks = 0;
  };
  // The longest registered prefix. `likely`: how many blocks are probably there, where it looks first.
  Match find(const Identities& identities, int64_t likely = 0) const;

  // ---- locks
  void lock(BlockId tail);
  // Registers a block behind `tail` (kNoBlock: as a first one) for the holder of a lock on it, whose lock
  // then is on the block. False, and nothing changes: the identity is taken, or `tail` is forgotten.
  // `residency`: one that the block's pages cover.
  bool insert(BlockId id, const kv::BlockHash& hash, BlockId tail, const kv::Residency& residency);
  struct Unlocked {
    std::vector<BlockId> gone;     // forgotten blocks without users, children first: no longer of a run
    std::vector<BlockId> invalid;  // unused blocks with pages that are not valid
  };
  // No plan after `fence` names the blocks.
  Unlocked unlock(BlockId tail, StepId fence);

  // ---- what is given up
  // The run to evict the tail of, for a page of this pool: the first in order whose unused path holds one.
  // Only runs that no plan after `completed` names.
  std::optional<RunId> victim(kv::Stream stream, int rank, StepId completed) const;
  // Calls f(block) for unused blocks, about in the order that they are given up in, until it says false. What
  // lies below several of them may be seen more than once.
  template <typename F>
  void for_each_victim(F f) const {
    for (const auto& [worth, last_use, id] : order_.leaves()) {
      for (const Run* on = &run(id); on->users == 0; on = &run(on->parent)) {
        for (auto block = on->blocks.rbegin(); block != on->blocks.rend(); ++block) {
          if (!f(blocks_.at(*block))) return;
        }
        if (on->parent == kNoRun) break;
      }
    }
  }
  // The tail of an unused leaf is no longer registered; its pages are the caller's.
  BlockId remove_tail(RunId run);
  // A block and everything registered below it cannot be found any more.
  struct Forgotten {
    std::vector<BlockId> gone;              // those without users, children first
    std::vector<kv::BlockHash> identities;  // of all
  };
  Forgotten forget(BlockId id);

  // ---- what changes in blocks of runs; of private ones it takes no notice
  void page_added(const Block& block, kv::Stream stream, int rank, bool valid);
  // `breaks`: the residency that its run covers wants this page.
  void page_dropped(const Block& block, kv::Stream stream, int rank, bool was_valid, bool breaks);
  void validity_changed(const Block& block, bool valid);
  // All blocks of this context now have the pages that a residency wants.
  void now_covers(BlockId tail, const kv::Residency& residency);

  // Residencies mean other ranks from now on.
  void forget_covers() {
    for (Run& run : runs_) run.covers.reset();
  }

  // ---- eviction policy
  EvictionOrder& order() { return order_; }

  // ---- queries
  const Run& run(RunId id) const { return runs_.at(number(id)); }
  bool used(const Block& block) const { return block.run == kNoRun || run(block.run).users > 0; }
  // More than one sequence or pin uses it.
  bool shared(const Block& block) const { return block.run != kNoRun && run(block.run).users > 1; }
  // Block `index` of the context that ends in `tail`.
  BlockId at(BlockId tail, int64_t index) const;
  // Calls f(run, first index, end index) for the runs of a context, last to first.
  template <typename F>
  void for_each_run(BlockId tail, F f) const {
    if (tail == kNoBlock) return;
    int64_t end = blocks_.at(tail).index + 1;
    for (RunId id = blocks_.at(tail).run; id != kNoRun; id = run(id).parent) {
      f(run(id), run(id).first_index, end);
      end = run(id).first_index;
    }
  }
  // Pages of the unused blocks of a context: they could not be evicted if it were locked.
  PageCounts unused_pages(BlockId tail) const;
  int64_t registered() const { return std::ssize(by_hash_); }
  // Pages of unused registered blocks.
  int64_t evictable(kv::Stream stream, int rank) const { return evictable_.at(stream, rank); }
  const PageCounts& evictable() const { return evictable_; }

  void check_invariants() const;

 private:
  Run& at(RunId id) { return runs_.at(number(id)); }
  bool is_leaf(const Run& run) const { return run.users == 0 && run.first_child == kNoRun; }
  RunId only_child(const Run& run) const;
  Run& create(int64_t first_index);
  void erase(Run& run);
  void adopt(Run& parent, Run& child);
  void abandon(Run& child);
  void replace_child(RunId parent, RunId child, RunId by);
  void remove(Run& run);  // a run without blocks
  void count(Run& run, const Block& block, int64_t sign) const;
  void split(RunId id, int64_t index);
  void merge_with_child(RunId id);
  void take_blocks(Run& run, std::vector<BlockId>& to);
  bool path_holds(const Run& leaf, kv::Stream stream, int rank) const;
  bool tail_holds(const Run& leaf, kv::Stream stream, int rank, int64_t depth) const;

  BlockStore& blocks_;
  std::unordered_map<kv::BlockHash, BlockId, kv::BlockHashHasher> by_hash_;
  std::deque<Run> runs_;
  std::vector<RunId> unused_ids_;
  PageCounts evictable_;
  EvictionOrder order_;
};

}  // namespace weft::controlplane
