#include "controlplane/prefix_cache.h"

#include <algorithm>
#include <limits>

#include "proto/vocab/check.h"

namespace weft::controlplane {

std::vector<BlockId> PrefixCache::find(std::span<const kv::BlockHash> hashes) const {
  std::vector<BlockId> chain;
  for (const kv::BlockHash& hash : hashes) {
    const auto found = by_hash_.find(hash);
    if (found == by_hash_.end()) break;
    chain.push_back(found->second);
  }
  return chain;
}

bool PrefixCache::insert(BlockId id, const kv::BlockHash& hash, BlockId parent) {
  Block& block = blocks_.at(id);
  CHECK(!block.registered && block.references > 0);
  if (parent != kNoBlock && !blocks_.at(parent).registered) return false;
  if (!by_hash_.try_emplace(hash, id).second) return false;
  block.registered = true;
  block.hash = hash;
  block.parent = parent;
  block.previous_sibling = kNoBlock;
  block.next_sibling = kNoBlock;
  if (parent != kNoBlock) {
    Block& above = blocks_.at(parent);
    CHECK(above.references > 0, "a block is registered by a user of its parent");
    block.next_sibling = above.first_child;
    if (above.first_child != kNoBlock) blocks_.at(above.first_child).previous_sibling = id;
    above.first_child = id;
  }
  return true;
}

void PrefixCache::remove(BlockId id) {
  Block& block = blocks_.at(id);
  CHECK(block.registered && block.first_child == kNoBlock);
  if (block.references == 0) {
    remove_leaf(block);
    leave_chain(block);
    count_pages(block, -1);
  }
  if (block.next_sibling != kNoBlock)
    blocks_.at(block.next_sibling).previous_sibling = block.previous_sibling;
  if (block.previous_sibling != kNoBlock) {
    blocks_.at(block.previous_sibling).next_sibling = block.next_sibling;
  } else if (block.parent != kNoBlock) {
    Block& above = blocks_.at(block.parent);
    above.first_child = block.next_sibling;
    if (is_leaf(above)) add_leaf(above);
  }
  by_hash_.erase(block.hash);
  block.registered = false;
  block.parent = kNoBlock;
}

std::vector<BlockId> PrefixCache::subtree(BlockId id) const {
  std::vector<BlockId> found = {id};
  for (size_t at = 0; at < found.size(); ++at) {
    for (BlockId child = blocks_.at(found[at]).first_child; child != kNoBlock;
         child = blocks_.at(child).next_sibling) {
      found.push_back(child);
    }
  }
  return {found.rbegin(), found.rend()};  // breadth first, backwards: children before parents
}

void PrefixCache::used(BlockId id) {
  Block& block = blocks_.at(id);
  count_pages(block, -1);
  if (block.first_child == kNoBlock) remove_leaf(block);
  leave_chain(block);
}

void PrefixCache::unused(BlockId id) {
  Block& block = blocks_.at(id);
  CHECK(block.registered && block.references == 0);
  block.last_use = ++uses_;
  count_pages(block, +1);
  block.chain = current_;
  if (current_ != 0) ++chains_.at(current_).blocks;
  if (block.first_child == kNoBlock) add_leaf(block);
}

void PrefixCache::begin_unused(const Unused& chain) {
  if (policy_ == nullptr) return;
  // The chain before may have got no block.
  if (const auto last = chains_.find(current_); last != chains_.end() && last->second.blocks == 0) {
    changes_.erase({last->second.next_change, current_});
    chains_.erase(last);
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

void PrefixCache::advance(Time now) {
  now_ = std::max(now_, now);
  while (!changes_.empty() && changes_.begin()->first <= now_) {
    const uint64_t number = changes_.begin()->second;
    changes_.erase(changes_.begin());
    Chain& chain = chains_.at(number);
    const BlockId leaf = chain.leaf;
    if (leaf != kNoBlock) remove_leaf(blocks_.at(leaf));
    chain.worth = policy_->worth(chain.unused, now_);
    if (leaf != kNoBlock) add_leaf(blocks_.at(leaf));
    chain.next_change = policy_->next_change(chain.unused, now_);
    changes_.insert({chain.next_change, number});
  }
}

void PrefixCache::add_leaf(const Block& block) {
  leaves_.insert({worth(block), block.last_use, block.id});
  if (block.chain == 0) return;
  Chain& chain = chains_.at(block.chain);
  CHECK(chain.leaf == kNoBlock, "a chain is a path");
  chain.leaf = block.id;
}

void PrefixCache::remove_leaf(const Block& block) {
  CHECK_EQ(leaves_.erase({worth(block), block.last_use, block.id}), 1u);
  if (block.chain != 0) chains_.at(block.chain).leaf = kNoBlock;
}

void PrefixCache::leave_chain(Block& block) {
  const auto chain = chains_.find(block.chain);
  block.chain = 0;
  if (chain == chains_.end() || --chain->second.blocks > 0 || chain->first == current_) return;
  changes_.erase({chain->second.next_change, chain->first});
  chains_.erase(chain);
}

std::optional<BlockId> PrefixCache::victim(kv::Stream stream, int rank, StepId completed) const {
  if (evictable_.at(stream, rank) == 0) return std::nullopt;
  // A striped chain has a page of every pool within a run of kShards blocks or two. Long chains that lie on
  // other ranks altogether are walked to their start only when nothing else is left.
  for (const int64_t depth : {int64_t{2} * kv::kShards, std::numeric_limits<int64_t>::max()}) {
    for (const auto& [worth, last_use, id] : leaves_) {
      const Block& leaf = blocks_.at(id);
      if (leaf.fence <= completed && chain_holds(leaf, stream, rank, depth)) return id;
    }
  }
  return std::nullopt;
}

bool PrefixCache::chain_holds(const Block& leaf, kv::Stream stream, int rank, int64_t depth) const {
  for (const Block* block = &leaf; block->references == 0 && depth > 0; --depth) {
    for (const BlockPart& part : block->parts) {
      if (part.stream == stream && part.page[static_cast<size_t>(rank)] != kNoPage) return true;
    }
    if (block->parent == kNoBlock) return false;
    block = &blocks_.at(block->parent);
  }
  return false;
}

void PrefixCache::count_pages(const Block& block, int64_t sign) {
  block.for_each_page([&](kv::Stream stream, int rank, PageId) { evictable_.at(stream, rank) += sign; });
}

void PrefixCache::check_invariants() const {
  PageCounts evictable;
  size_t leaves = 0;
  size_t registered = 0;
  std::map<uint64_t, int64_t> chain_blocks;
  blocks_.for_each([&](const Block& block) {
    if (!block.registered) {
      CHECK(block.references > 0, "an unused block that nobody can find");
      CHECK(block.first_child == kNoBlock);
      return;
    }
    ++registered;
    CHECK(by_hash_.at(block.hash) == block.id);
    if (block.parent != kNoBlock) {
      const Block& above = blocks_.at(block.parent);
      CHECK(above.registered);
      CHECK_EQ(above.index + 1, block.index);
      CHECK_EQ(above.origin, block.origin);
      CHECK(above.references >= block.references, "a user of a block uses its parent");
      CHECK(above.fence >= block.fence || above.references > 0);
    }
    if (block.references > 0) {
      CHECK_EQ(block.chain, 0u);
      return;
    }
    if (block.chain != 0) ++chain_blocks[block.chain];
    block.for_each_page([&](kv::Stream stream, int rank, PageId) { ++evictable.at(stream, rank); });
    if (block.first_child == kNoBlock) {
      ++leaves;
      CHECK(leaves_.contains({worth(block), block.last_use, block.id}));
      CHECK(block.chain == 0 || chains_.at(block.chain).leaf == block.id);
    }
  });
  CHECK_EQ(leaves, leaves_.size());
  for (const auto& [number, chain] : chains_) {
    CHECK(chain.blocks > 0 || number == current_);
    CHECK_EQ(chain.blocks, chain_blocks[number]);
    CHECK(changes_.contains({chain.next_change, number}));
  }
  CHECK_EQ(changes_.size(), chains_.size());
  CHECK_EQ(registered, by_hash_.size());
  CHECK(evictable == evictable_);
}

}  // namespace weft::controlplane
