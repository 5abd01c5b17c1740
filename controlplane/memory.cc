#include "controlplane/memory.h"

#include <algorithm>
#include <set>

#include "proto/vocab/check.h"

namespace weft::controlplane {

BlockId Memory::create(int64_t index, int origin) {
  Block& block = blocks_.create(index, origin);
  block.references = 1;
  return block.id;
}

void Memory::reference(BlockId id) {
  Block& block = blocks_.at(id);
  if (block.references == 0) cache_.used(id);
  ++block.references;
}

void Memory::release(BlockId id) {
  Block& block = blocks_.at(id);
  CHECK_GT(block.references, 0);
  ++changes_;
  if (--block.references > 0) return;
  block.fence = issued_;
  if (block.registered) {
    cache_.unused(id);
    drop_invalid(id);
  } else {
    give_back_pages(block);
    blocks_.erase(id);
  }
}

bool Memory::hold(BlockId id, const kv::Residency& residency, PageCounts& reserved, bool empty) {
  Block& block = blocks_.at(id);
  CHECK_GT(block.references, 0);
  for (int part = 0; part < parts(); ++part) {
    const kv::Stream stream = block.part(part).stream;
    RankMask lacking = missing(block, part, residency);
    for (; lacking != 0; lacking &= lacking - 1) {
      const int rank = lowest_rank(lacking);
      const std::optional<PageId> page = take_page(stream, rank);
      if (!page) return false;
      CHECK_GT(reserved.at(stream, rank), 0);
      --reserved.at(stream, rank);
      --reserved_.at(stream, rank);
      block.page(part, rank) = *page;
      if (block.registered) ++changes_;  // whoever shares it needs one page less
      if (empty) block.part(part).valid |= mask_of(rank);
    }
  }
  return true;
}

RankMask Memory::wanted(const Block& block, int part, const kv::Residency& residency) const {
  return kv::part_holders(limits_.geometry, residency, block.index, part, block.origin, limits_.rank_count);
}

RankMask Memory::missing(const Block& block, int part, const kv::Residency& residency) const {
  return wanted(block, part, residency) & ~block.part(part).holders();
}

void Memory::count_missing(const Block& block, const kv::Residency& residency, PageCounts& counts) const {
  for (int part = 0; part < parts(); ++part) {
    for_each_rank(missing(block, part, residency),
                  [&](int rank) { ++counts.at(block.part(part).stream, rank); });
  }
}

void Memory::drop(BlockId id, int part, int rank) {
  Block& block = blocks_.at(id);
  const kv::Stream stream = block.part(part).stream;
  PageId& page = block.page(part, rank);
  CHECK(page != kNoPage);
  ++changes_;
  if (block.registered && block.references == 0) cache_.page_dropped(stream, rank);
  allocator_.give_back(stream, rank, page, issued_);
  page = kNoPage;
  block.part(part).valid &= ~mask_of(rank);
}

void Memory::drop_invalid(BlockId id) {
  const Block& block = blocks_.at(id);
  CHECK_EQ(block.references, 0);
  for (int part = 0; part < parts(); ++part) {
    for_each_rank(block.part(part).holders() & ~block.part(part).valid,
                  [&](int rank) { drop(id, part, rank); });
  }
}

void Memory::forget(BlockId id) {
  ++changes_;
  for (const BlockId member : cache_.subtree(id)) {
    cache_.remove(member);
    Block& block = blocks_.at(member);
    if (block.references > 0) continue;
    give_back_pages(block);
    blocks_.erase(member);
  }
}

void Memory::advance(Time now) {
  now_ = std::max(now_, now);
  if (limits_.eviction == Eviction::kReuse) {
    reuse_.evicted(evicted_blocks_ - evicted_told_, cache_.registered(), now_);
    evicted_told_ = evicted_blocks_;
  }
  cache_.advance(now_);
}

ChainHistory Memory::chain_arrived(std::span<const kv::BlockHash> prompt, Time arrived) {
  return limits_.eviction == Eviction::kLru ? ChainHistory{} : reuse_.arrived(prompt, arrived);
}

void Memory::chain_unused(const ChainHistory& history, std::span<const kv::BlockHash> prompt, bool begun) {
  if (limits_.eviction == Eviction::kLru) return;
  cache_.begin_unused(begun ? reuse_.begun(history, prompt, now_) : reuse_.ended(history, prompt, now_));
}

std::optional<PageId> Memory::take_page(kv::Stream stream, int rank) {
  for (;;) {
    if (const auto page = allocator_.take(stream, rank)) return page;
    const std::optional<BlockId> victim = cache_.victim(stream, rank, last_completed());
    if (!victim) return std::nullopt;
    ++changes_;
    cache_.remove(*victim);
    // No plan in flight names it, so its pages are free at once.
    Block& block = blocks_.at(*victim);
    block.for_each_page(
        [&](kv::Stream of, int holder, PageId page) { allocator_.give_back(of, holder, page, block.fence); });
    blocks_.erase(*victim);
    ++evicted_blocks_;
  }
}

void Memory::give_back_pages(const Block& block) {
  block.for_each_page(
      [&](kv::Stream stream, int rank, PageId page) { allocator_.give_back(stream, rank, page, issued_); });
}

int64_t Memory::room(kv::Stream stream, int rank) const {
  const auto& pool = allocator_.pool(stream, rank);
  return pool.free_count() + pool.in_flight_count() + cache_.evictable(stream, rank) -
         reserved_.at(stream, rank);
}

PoolCounts Memory::pool(kv::Stream stream, int rank) const {
  const auto& pool = allocator_.pool(stream, rank);
  PoolCounts counts;
  counts.pages = pool.count();
  counts.free = pool.free_count();
  counts.in_flight = pool.in_flight_count();
  counts.cached = cache_.evictable(stream, rank);
  counts.used = pool.taken_count() - counts.cached;
  counts.reserved = reserved_.at(stream, rank);
  return counts;
}

void Memory::check_invariants() const {
  allocator_.check_invariants();
  cache_.check_invariants();
  PageCounts owned;
  std::set<std::pair<int, PageId>> seen;
  blocks_.for_each([&](const Block& block) {
    block.for_each_page([&](kv::Stream stream, int rank, PageId page) {
      CHECK(rank < limits_.rank_count);
      CHECK(allocator_.pool(stream, rank).is_taken(page));
      CHECK(seen.insert({static_cast<int>(stream) * kMaxRanks + rank, page}).second, "a page of two blocks");
      ++owned.at(stream, rank);
    });
    for (const BlockPart& part : block.parts) {
      CHECK_EQ(part.valid & ~part.holders(), 0u);
      if (block.registered) CHECK(part.valid != 0, "a cached block without bytes");
      if (block.references == 0) CHECK_EQ(part.valid, part.holders());
    }
  });
  for_each_pool(limits_.rank_count, [&](kv::Stream stream, int rank) {
    CHECK_EQ(owned.at(stream, rank), allocator_.pool(stream, rank).taken_count());
    CHECK_GE(reserved_.at(stream, rank), 0);
    CHECK_GE(room(stream, rank), 0);
  });
}

}  // namespace weft::controlplane
