// The records of blocks: who holds them, who uses them, where they stand in the prefix cache.
//
// A block is P consecutive tokens of one or several sequences. Records are made and erased by memory.h; this
// only stores them. References to records stay valid until the record is erased; ids are reused, serials
// never.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "controlplane/plan.h"
#include "kv/block_hash.h"

namespace weft::controlplane {

inline constexpr BlockId kNoBlock{0xffffffffu};

struct Block {
  BlockId id = kNoBlock;
  uint64_t serial = 0;  // distinguishes reuses of an id; 0: no record
  int64_t index = 0;    // b, its place in the sequence
  int origin = 0;       // of its chain
  int references = 0;   // sequences that use it
  BlockPages pages;
  // Ranks whose page has (or, by the plans made so far, will have) all rows computed so far. A page outside
  // is allocated but waits for a copy, or was left behind by a change of grouping.
  std::array<RankMask, kv::kStreams> valid{};
  // Targets of copies in the plan of step copy_step: no copy of that plan may read them.
  StepId copy_step{0};
  std::array<RankMask, kv::kStreams> copied{};
  StepId fence{0};  // last step that may name it; set when its last user leaves

  // Prefix cache: identity and place in the tree of chains.
  bool registered = false;
  kv::BlockHash hash;
  uint64_t last_use = 0;
  BlockId parent = kNoBlock;
  BlockId first_child = kNoBlock, next_sibling = kNoBlock, previous_sibling = kNoBlock;

  PageId page(kv::Stream stream, int rank) const {
    return pages.page[static_cast<size_t>(stream)][static_cast<size_t>(rank)];
  }
  PageId& page(kv::Stream stream, int rank) {
    return pages.page[static_cast<size_t>(stream)][static_cast<size_t>(rank)];
  }
  RankMask& valid_in(kv::Stream stream) { return valid[static_cast<size_t>(stream)]; }
  RankMask valid_in(kv::Stream stream) const { return valid[static_cast<size_t>(stream)]; }
  // Ranks with a page, valid or not.
  RankMask holders(kv::Stream stream) const {
    RankMask mask = 0;
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      if (page(stream, rank) != kNoPage) mask |= mask_of(rank);
    }
    return mask;
  }
};

class BlockStore {
 public:
  Block& create(int64_t index, int origin);
  void erase(BlockId id);
  Block& at(BlockId id) {
    Block& block = blocks_.at(number(id));
    CHECK(block.serial != 0, "block ", number(id), " does not exist");
    return block;
  }
  const Block& at(BlockId id) const { return const_cast<BlockStore*>(this)->at(id); }
  // The record, if it is still the one with this serial.
  Block* find(BlockId id, uint64_t serial) {
    Block& block = blocks_.at(number(id));
    return block.serial == serial ? &block : nullptr;
  }
  int64_t count() const { return static_cast<int64_t>(blocks_.size() - unused_.size()); }
  template <typename F>
  void for_each(F f) const {
    for (const Block& block : blocks_) {
      if (block.serial != 0) f(block);
    }
  }

 private:
  std::deque<Block> blocks_;
  std::vector<BlockId> unused_;
  uint64_t serials_ = 0;
};

}  // namespace weft::controlplane
