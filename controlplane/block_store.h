// The records of blocks: who holds them, and where they stand in the prefix cache.
//
// A block is P consecutive tokens of one or several sequences. Records are made and erased by memory.h; this
// only stores them. References to records stay valid until the record is erased; ids are reused, serials
// never.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "controlplane/page_counts.h"
#include "kv/block_hash.h"
#include "proto/vocab/check.h"

namespace weft::controlplane {

inline constexpr BlockId kNoBlock{0xffffffffu};

enum class RunId : uint32_t {};  // a run of the prefix cache (prefix_cache.h)
inline constexpr RunId kNoRun{0xffffffffu};

// One part of a block (kv::CacheGeometry numbers them): a page on each rank that holds it.
struct BlockPart {
  kv::Stream stream{};
  std::array<PageId, kMaxRanks> page;
  // Ranks whose page has (or, by the plans made so far, will have) all rows computed so far. A page outside
  // is allocated but waits for a copy, or was left behind by a change of grouping.
  RankMask valid = 0;
  // Targets of copies in the plan of step copy_step: no copy of that plan may read them.
  RankMask copied = 0;

  explicit BlockPart(kv::Stream of) : stream(of) { page.fill(kNoPage); }
  // Ranks with a page, valid or not.
  RankMask holders() const {
    RankMask mask = 0;
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      if (page[static_cast<size_t>(rank)] != kNoPage) mask |= mask_of(rank);
    }
    return mask;
  }
};

struct Block {
  BlockId id = kNoBlock;
  uint64_t serial = 0;  // distinguishes reuses of an id; 0: no record
  int64_t index = 0;    // b, its place in the sequence
  int origin = 0;       // of its chain
  std::vector<BlockPart> parts;
  StepId copy_step{0};
  bool on_host = false;  // its entries lie in the host pool alone (host_context.h)

  RunId run = kNoRun;  // of the prefix cache; none: it belongs to one sequence alone
  kv::BlockHash hash;  // its identity, in a run

  BlockPart& part(int number) { return parts.at(static_cast<size_t>(number)); }
  const BlockPart& part(int number) const { return parts.at(static_cast<size_t>(number)); }
  PageId page(int number, int rank) const { return part(number).page[static_cast<size_t>(rank)]; }
  PageId& page(int number, int rank) { return part(number).page[static_cast<size_t>(rank)]; }
  // Calls f(stream, rank, page) for every page.
  template <typename F>
  void for_each_page(F f) const {
    for (const BlockPart& one : parts) {
      for_each_rank(one.holders(),
                    [&](int rank) { f(one.stream, rank, one.page[static_cast<size_t>(rank)]); });
    }
  }
};

class BlockStore {
 public:
  explicit BlockStore(const kv::CacheGeometry& geometry);
  Block& create(int64_t index, int origin);
  void erase(BlockId id);
  Block& at(BlockId id) {
    Block& block = blocks_.at(number(id));
    CHECK(block.serial != 0, "block ", number(id), " does not exist");
    return block;
  }
  const Block& at(BlockId id) const { return const_cast<BlockStore*>(this)->at(id); }
  bool exists(BlockId id) const { return blocks_.at(number(id)).serial != 0; }
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
  std::vector<BlockPart> empty_parts_;
  std::deque<Block> blocks_;
  std::vector<BlockId> unused_;
  uint64_t serials_ = 0;
};

}  // namespace weft::controlplane
