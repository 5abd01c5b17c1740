// Everything that is counted in pages: pools, blocks, the prefix cache, and the room promised to sequences.
//
// A page is in exactly one state: free; used (by a block that a sequence uses); cached (by a block nobody
// uses, which can be evicted); in flight (given back, but plans in flight may name it). Keeps: free + used +
// cached + in flight == the pool's pages, and in every pool
//   room = free + in flight + cached − reserved ≥ 0,
// where `reserved` is what admitted sequences may still take. So a page that was reserved always comes: at
// once, or when the plans in flight are acknowledged.
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <vector>

#include "controlplane/block_store.h"
#include "controlplane/host_pool.h"
#include "controlplane/page_allocator.h"
#include "controlplane/page_counts.h"
#include "controlplane/plan.h"
#include "controlplane/prefix_cache.h"
#include "controlplane/reuse_policy.h"

namespace weft::controlplane {

// The blocks of one sequence: first those in the prefix cache, of which it holds a lock on the last one, then
// its own.
struct BlockPath {
  BlockId tail = kNoBlock;
  int64_t registered = 0;
  std::deque<BlockId> own;
  int64_t size() const { return registered + std::ssize(own); }
};

// Pages of entries that are a sequence's hot buffer, by rank: of no block.
using HotPages = std::array<std::vector<PageId>, kMaxRanks>;

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
                                                              : nullptr),
        host_(limits) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // A plan has been made; what is given back from now on may be named by it.
  void issued(StepId step) { issued_ = step; }
  void completed(StepId step) {
    allocator_.complete(step);
    host_.complete(step);
  }
  StepId last_issued() const { return issued_; }
  StepId last_completed() const { return allocator_.completed(); }

  // ---- the blocks of one sequence
  // Takes what the prefix cache has of its context; `path` is empty.
  void use(const PrefixCache::Match& found, BlockPath& path);
  // One block more, without pages.
  void extend(BlockPath& path, int origin);
  // The last one, which has no pages, is none of it.
  void shorten(BlockPath& path);
  // Registers the first private block. False: it stays private, and so will all behind it.
  bool insert(BlockPath& path, const kv::BlockHash& hash, const kv::Residency& residency);
  void release(BlockPath& path);
  void release_unknown(BlockPath& path);  // the same, of no request's chain
  BlockId at(const BlockPath& path, int64_t index) const;
  // Calls f(block) for blocks [first, size) in order; f takes no pages.
  template <typename F>
  void for_each(const BlockPath& path, int64_t first, F f) const {
    std::vector<const Run*> runs;  // last to first
    cache_.for_each_run(path.tail, [&](const Run& run, int64_t, int64_t end) {
      if (end > first) runs.push_back(&run);
    });
    for (auto run = runs.rbegin(); run != runs.rend(); ++run) {
      for (int64_t index = std::max((*run)->first_index, first); index < (*run)->end(); ++index) {
        f(blocks_.at((*run)->blocks[static_cast<size_t>(index - (*run)->first_index)]));
      }
    }
    for (int64_t index = std::max(path.registered, first); index < path.size(); ++index)
      f(block(at(path, index)));
  }
  // Pages that its blocks still lack under a residency.
  void count_missing(const BlockPath& path, const kv::Residency& residency, PageCounts& counts) const;
  // The first block that may lack pages, or valid ones, under a residency: those before it surely do not.
  int64_t first_unsure(const BlockPath& path, const kv::Residency& residency) const;
  // All its blocks have the pages that a residency wants.
  void now_covers(const BlockPath& path, const kv::Residency& residency) {
    cache_.now_covers(path.tail, residency);
  }
  // Pages of all its blocks.
  PageCounts pages(const BlockPath& path) const;

  // ---- one block
  Block& block(BlockId id) { return blocks_.at(id); }
  const Block& block(BlockId id) const { return blocks_.at(id); }
  bool exists(BlockId id) const { return blocks_.exists(id); }
  Block* find_block(BlockId id, uint64_t serial) { return blocks_.find(id, serial); }
  template <typename F>
  void for_each_block(F f) const {
    blocks_.for_each(f);
  }
  bool used(const Block& block) const { return cache_.used(block); }
  bool shared(const Block& block) const { return cache_.shared(block); }

  // Gives a block the pages its residency asks for, each taken out of `reserved`. False when a page is not
  // free now (the pages taken so far stay). New pages of an `empty` block are valid at once.
  bool hold(BlockId id, const kv::Residency& residency, PageCounts& reserved, bool empty);
  // A page that is free and not reserved, for a block of the prefix cache; not valid yet. False: there is
  // none.
  bool add_page(Block& block, int part, int rank);
  // Ranks on which a part of a block still lacks a page.
  RankMask missing(const Block& block, int part, const kv::Residency& residency) const;
  // Entries of a host block: no rank holds them.
  static bool only_on_host(const Block& block, int part) {
    return block.on_host && block.part(part).stream == kv::Stream::kEntries;
  }
  // Ranks that the residency gives a part of a block.
  RankMask wanted(const Block& block, int part, const kv::Residency& residency) const;
  void set_valid(Block& block, int part, int rank, bool valid);
  void drop(BlockId id, int part, int rank);
  int parts() const { return limits_.geometry.parts(); }  // of a block
  // Drops pages that hold nothing, of a block that nobody uses.
  void drop_invalid(BlockId id);

  // ---- prefix cache
  const PrefixCache& cache() const { return cache_; }
  // Takes a registered block and all below it out of the cache; copies on the host stay.
  void forget(BlockId id);
  // The same of a block whose bytes are not trusted: nor are copies of it.
  void distrust(BlockId id);
  int64_t evicted_blocks() const { return evicted_blocks_; }
  // limits.topology is another one: residencies mean other ranks.
  void topology_changed() {
    ++changes_;
    holders_.reset();
    cache_.forget_covers();
  }
  // Whoever else uses it: nothing of this context is evicted until it is unpinned.
  bool can_pin(BlockId tail) const;  // without taking room that is promised
  void pin(BlockId tail);
  void unpin(BlockId tail);
  // What a request computed that failed: it cannot be found.
  bool forgotten(BlockId id) const { return cache_.run(block(id).run).forgotten; }

  // ---- what eviction goes by. Times must not go back.
  void advance(Time now);
  // A request with this prompt is let in.
  ChainHistory chain_arrived(const Identities& prompt, Time arrived);
  // The blocks released from now on are those of a request that ended (or, with `begun`, has only begun). Its
  // prompt: the first so many blocks.
  void chain_unused(const ChainHistory& history, const Identities& identities, int64_t prompt,
                    bool begun = false);
  // The same, of a chain that another policy knows.
  void chain_unused(const Unused& chain) { cache_.order().begin_chain(chain); }

  // ---- the second tier. A block that makes room is first copied to the host, if there is room for it: its
  // pages are given up when the plan with its spill is acknowledged.
  const HostPool& host() const { return host_; }
  struct Spills {
    std::vector<HostCopy> copies;
    std::vector<HostCopyId> ids;
    int64_t bytes = 0;
  };
  // What the plan that is being made carries, asked for once when all else is in it; `ahead`: also what nobody
  // waits for.
  Spills take_spills(bool ahead);
  void spilled(const std::vector<HostCopyId>& copies);      // the plan is acknowledged
  void spills_lost(const std::vector<HostCopyId>& copies);  // it was abandoned
  // Copies that a sequence counts on: blocks [first, first + count) of its context.
  void lock_host(const Identities& identities, int64_t first, int64_t count);
  void unlock_host(const Identities& identities, int64_t first, int64_t count);
  void lock_host(const std::vector<kv::BlockHash>& hashes);
  void unlock_host(const std::vector<kv::BlockHash>& hashes);

  // ---- contexts that lie on the host (host_context.h)
  // The plan that is being made copies this block to the host under that name, behind its parent's copy, by a
  // promise of room.
  bool may_sink() const { return may_spill_more(); }
  HostPool::Room sink(const Block& block, const kv::BlockHash& copy, const kv::BlockHash& parent) {
    return spill(block, copy, parent, true);
  }
  // The block gives back its pages of entries; no residency wants any from now on.
  void move_to_host(BlockId id);
  // Room for so many copies; they are locked one by one, and what is not used is given back.
  void promise_host(int64_t copies) { host_.promise(copies); }
  void unpromise_host(int64_t copies) {
    changes_ += copies > 0 ? 1 : 0;
    host_.unpromise(copies);
  }
  void lock_promised(const kv::BlockHash& copy) {
    ++changes_;
    host_.unpromise(1);
    host_.lock(copy);
  }
  void distrust_copies(const std::vector<kv::BlockHash>& copies) { host_.forget(copies, issued_); }
  // Takes pages for a hot buffer until it has so many on each rank, out of `reserved`. False when one is not
  // free now.
  bool hold_hot(HotPages& hot, const PageCounts& pages, PageCounts& reserved);
  // Gives back its pages on these ranks; those above so many.
  void drop_hot(HotPages& hot, RankMask ranks);
  void trim_hot(HotPages& hot, const PageCounts& pages);

  // ---- room
  int64_t room(kv::Stream stream, int rank) const;
  // There is room for these beside all that is reserved, also when this context is locked.
  bool has_room(const PageCounts& counts, BlockId locked) const;
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
  // CHECKs that these sequences and pins hold exactly the locks there are.
  void check_locks(const std::vector<BlockId>& tails) const;

 private:
  void unlock(BlockId tail);
  HostPool::Room spill(const Block& block);
  HostPool::Room spill(const Block& block, const kv::BlockHash& copy, const kv::BlockHash& parent,
                       bool promised);
  bool waits_for_spill(const Block& tail);
  bool may_spill_more() const;
  void spill_ahead();
  std::optional<PageId> take_page(kv::Stream stream, int rank);
  PrefixCache::Forgotten take_out(BlockId id);
  void erase(BlockId id);  // and gives back its pages

  const Limits& limits_;
  struct Holders {
    kv::HolderTable table;
    kv::Topology ranks;
    Holders(kv::HolderTable of, kv::Topology active) : table(std::move(of)), ranks(active) {}
  };
  mutable std::optional<Holders> holders_;  // of the residency and origin asked for last
  PageAllocator allocator_;
  BlockStore blocks_;
  ReusePolicy reuse_;
  PrefixCache cache_;
  HostPool host_;
  Spills spills_;                                       // of the plan that is being made
  std::deque<std::pair<BlockId, uint64_t>> unwritten_;  // to be written through, with their serials
  bool pressed_ = false;                                // cached blocks made room for the plan being made
  PageCounts reserved_;
  PageCounts hot_;  // taken pages that are of no block
  StepId issued_{0};
  uint64_t changes_ = 1;
  int64_t evicted_blocks_ = 0;
  Time now_{};
};

}  // namespace weft::controlplane
