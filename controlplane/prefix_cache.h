// The exact prefix cache: which full blocks can be shared, and which of them can be given up.
//
// Blocks are registered under their identity (kv/block_hash.h) as a tree of chains: a block is registered
// only behind a registered parent, and only by a sequence that itself uses that parent. Therefore
//   * who uses a block uses all its ancestors,
//   * below an unused block everything is unused, and all unused blocks can be evicted, children first.
// Equal identities are registered once; a second block with the same content stays private to its sequence.
//
// Eviction order, over the leaves: `lru`, the least recently used tail goes first; `reuse`, that of the chain
// whose blocks are worth least to a policy (reuse_policy.h), among equals the least recently used. A chain is
// what one request used and gave back last: begin_unused() says what is known of it, unused() then names its
// blocks. A worth is refreshed when its chain reaches the next age that counts, by advance(): O(log n) each.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "controlplane/block_store.h"
#include "controlplane/eviction_policy.h"
#include "controlplane/page_counts.h"

namespace weft::controlplane {

class PrefixCache {
 public:
  // `policy` null: lru.
  explicit PrefixCache(BlockStore& blocks, EvictionPolicy* policy = nullptr)
      : blocks_(blocks), policy_(policy) {}

  // The longest chain of registered blocks with these identities.
  std::vector<BlockId> find(std::span<const kv::BlockHash> hashes) const;
  // False, and nothing changes: the identity is taken, or the parent (kNoBlock: none) is not registered.
  bool insert(BlockId id, const kv::BlockHash& hash, BlockId parent);
  // Unregisters a block without children.
  void remove(BlockId id);
  // The block and everything registered below it, children before parents.
  std::vector<BlockId> subtree(BlockId id) const;

  // A registered block got its first user, or lost its last.
  void used(BlockId id);
  void unused(BlockId id);
  // What the blocks that become unused from now on belong to.
  void begin_unused(const Unused& chain);
  // Time has passed; it must not go back.
  void advance(Time now);
  // A page of an unused registered block is being taken away.
  void page_dropped(kv::Stream stream, int rank) { --evictable_.at(stream, rank); }

  // The leaf to evict for a page of this pool: of the chains whose unused part holds such a page, the one
  // whose tail was used least recently. Only leaves that no plan after `completed` names.
  std::optional<BlockId> victim(kv::Stream stream, int rank, StepId completed) const;
  int64_t registered() const { return std::ssize(by_hash_); }
  // Pages of unused registered blocks.
  int64_t evictable(kv::Stream stream, int rank) const { return evictable_.at(stream, rank); }

  void check_invariants() const;

 private:
  // Unused blocks that one request used last: a path, so that at most one of them is a leaf.
  struct Chain {
    Unused unused;
    double worth = 0;
    int64_t blocks = 0;
    BlockId leaf = kNoBlock;
    Time next_change{};
  };
  using Chains = std::unordered_map<uint64_t, Chain>;

  bool is_leaf(const Block& block) const { return block.references == 0 && block.first_child == kNoBlock; }
  double worth(const Block& block) const { return block.chain == 0 ? 0 : chains_.at(block.chain).worth; }
  void add_leaf(const Block& block);
  void remove_leaf(const Block& block);
  void leave_chain(Block& block);
  void count_pages(const Block& block, int64_t sign);
  bool chain_holds(const Block& leaf, kv::Stream stream, int rank, int64_t depth) const;

  BlockStore& blocks_;
  std::unordered_map<kv::BlockHash, BlockId, kv::BlockHashHasher> by_hash_;
  // Unused registered blocks without children: (worth, last use, block).
  std::set<std::tuple<double, uint64_t, BlockId>> leaves_;
  PageCounts evictable_;
  uint64_t uses_ = 0;

  EvictionPolicy* policy_;
  Chains chains_;
  std::set<std::pair<Time, uint64_t>> changes_;  // (when a chain's worth changes, its number)
  uint64_t chain_numbers_ = 0;
  uint64_t current_ = 0;  // the chain of what becomes unused now; 0: none
  Time now_{};
};

}  // namespace weft::controlplane
