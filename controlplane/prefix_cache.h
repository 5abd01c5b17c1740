// The exact prefix cache: which full blocks can be shared, and which of them can be given up.
//
// Blocks are registered under their identity (kv/block_hash.h) as a tree of chains: a block is registered
// only behind a registered parent, and only by a sequence that itself uses that parent. Therefore
//   * who uses a block uses all its ancestors,
//   * below an unused block everything is unused, and all unused blocks can be evicted, children first.
// Equal identities are registered once; a second block with the same content stays private to its sequence.
//
// Eviction order is plain LRU over the leaves: the least recently used tail goes first.
#pragma once

#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "controlplane/block_store.h"
#include "controlplane/page_counts.h"

namespace weft::controlplane {

class PrefixCache {
 public:
  explicit PrefixCache(BlockStore& blocks) : blocks_(blocks) {}

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
  // A page of an unused registered block is being taken away.
  void page_dropped(kv::Stream stream, int rank) { --evictable_.at(stream, rank); }

  // The leaf to evict for a page of this pool: of the chains whose unused part holds such a page, the one
  // whose tail was used least recently. Only leaves that no plan after `completed` names.
  std::optional<BlockId> victim(kv::Stream stream, int rank, StepId completed) const;
  // Pages of unused registered blocks.
  int64_t evictable(kv::Stream stream, int rank) const { return evictable_.at(stream, rank); }

  void check_invariants() const;

 private:
  bool is_leaf(const Block& block) const { return block.references == 0 && block.first_child == kNoBlock; }
  void count_pages(const Block& block, int64_t sign);
  bool chain_holds(const Block& leaf, kv::Stream stream, int rank, int64_t depth) const;

  BlockStore& blocks_;
  std::unordered_map<kv::BlockHash, BlockId, kv::BlockHashHasher> by_hash_;
  std::set<std::pair<uint64_t, BlockId>> leaves_;  // (last use, unused registered block without children)
  PageCounts evictable_;
  uint64_t uses_ = 0;
};

}  // namespace weft::controlplane
