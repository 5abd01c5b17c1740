// Everything that is counted in pages: pools, blocks, the prefix cache, and the room promised to sequences.
//
// A page is in exactly one state: free; used (by a block that a sequence uses); cached (by a block nobody
// uses, which can be evicted); in flight (given back, but plans in flight may name it). Keeps: free + used +
// cached + in flight == the pool's pages, and in every pool
//   room = free + in flight + cached − reserved ≥ 0,
// where `reserved` is what admitted sequences may still take. So a page that was reserved always comes: at
// once, or when the plans in flight are acknowledged.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "controlplane/block_store.h"
#include "controlplane/page_allocator.h"
#include "controlplane/page_counts.h"
#include "controlplane/prefix_cache.h"
#include "controlplane/reuse_policy.h"

namespace weft::controlplane {

struct PoolCounts {
  int64_t pages = 0, free = 0, used = 0, cached = 0, in_flight = 0, reserved = 0;
};

class Memory {
 public:
  // `policy` in place of the one that limits.eviction names; null: that one.
  explicit Memory(const Limits& limits, EvictionPolicy* policy = nullptr)
      : limits_(limits),
        allocator_(limits),
        blocks_(limits.geometry),
        cache_(blocks_, policy != nullptr                     ? policy
                        : limits.eviction == Eviction::kReuse ? &reuse_
                                                              : nullptr) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // A plan has been made; what is given back from now on may be named by it.
  void issued(StepId step) { issued_ = step; }
  void completed(StepId step) { allocator_.complete(step); }
  StepId last_issued() const { return issued_; }
  StepId last_completed() const { return allocator_.completed(); }

  // ---- blocks
  BlockId create(int64_t index, int origin);  // one reference, no pages
  void reference(BlockId id);
  void release(BlockId id);
  Block& block(BlockId id) { return blocks_.at(id); }
  const Block& block(BlockId id) const { return blocks_.at(id); }
  Block* find_block(BlockId id, uint64_t serial) { return blocks_.find(id, serial); }
  template <typename F>
  void for_each_block(F f) const {
    blocks_.for_each(f);
  }

  // Gives a block the pages its residency asks for, each taken out of `reserved`. False when a page is not
  // free now (the pages taken so far stay). New pages of an `empty` block are valid at once.
  bool hold(BlockId id, const kv::Residency& residency, PageCounts& reserved, bool empty);
  // Ranks on which a part of a block still lacks a page.
  RankMask missing(const Block& block, int part, const kv::Residency& residency) const;
  // Adds the pages that a block still lacks.
  void count_missing(const Block& block, const kv::Residency& residency, PageCounts& counts) const;
  // Ranks that the residency gives a part of a block.
  RankMask wanted(const Block& block, int part, const kv::Residency& residency) const;
  void drop(BlockId id, int part, int rank);
  int parts() const { return limits_.geometry.parts(); }  // of a block
  // Drops pages that hold nothing, of a block that nobody uses.
  void drop_invalid(BlockId id);

  // ---- prefix cache
  const PrefixCache& cache() const { return cache_; }
  bool insert(BlockId id, const kv::BlockHash& hash, BlockId parent) {
    ++changes_;
    return cache_.insert(id, hash, parent);
  }
  // Takes a registered block and all below it out of the cache.
  void forget(BlockId id);
  int64_t evicted_blocks() const { return evicted_blocks_; }

  // ---- what eviction goes by. Times must not go back.
  void advance(Time now);
  // A request with this prompt is let in.
  ChainHistory chain_arrived(std::span<const kv::BlockHash> prompt, Time arrived);
  // The blocks released from now on are those of a request that ended (or, with `begun`, has only begun).
  void chain_unused(const ChainHistory& history, std::span<const kv::BlockHash> prompt, bool begun = false);
  // The same, of a chain that another policy knows.
  void chain_unused(const Unused& chain) { cache_.begin_unused(chain); }

  // ---- room
  int64_t room(kv::Stream stream, int rank) const;
  void reserve(const PageCounts& counts) { reserved_ += counts; }
  void unreserve(const PageCounts& counts) {
    ++changes_;
    reserved_ -= counts;
  }
  const PageCounts& reserved() const { return reserved_; }
  // Grows with everything that can make room: who found none need not look again before.
  uint64_t changes() const { return changes_; }
  PoolCounts pool(kv::Stream stream, int rank) const;

  const Limits& limits() const { return limits_; }
  void check_invariants() const;

 private:
  std::optional<PageId> take_page(kv::Stream stream, int rank);
  void give_back_pages(const Block& block);  // of a record that is erased next

  const Limits& limits_;
  PageAllocator allocator_;
  BlockStore blocks_;
  ReusePolicy reuse_;
  PrefixCache cache_;
  PageCounts reserved_;
  StepId issued_{0};
  uint64_t changes_ = 1;
  int64_t evicted_blocks_ = 0, evicted_told_ = 0;
  Time now_{};
};

}  // namespace weft::controlplane
