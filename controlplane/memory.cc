#include "controlplane/memory.h"

#include <algorithm>
#include <map>
#include <set>

#include "proto/vocab/check.h"

namespace weft::controlplane {

// ---- the blocks of one sequence -------------------------------------------------------------------------

void Memory::use(const PrefixCache::Match& found, BlockPath& path) {
  CHECK_EQ(path.size(), 0);
  if (found.blocks == 0) return;
  cache_.lock(found.tail);
  path.tail = found.tail;
  path.registered = found.blocks;
}

void Memory::extend(BlockPath& path, int origin) {
  path.own.push_back(blocks_.create(path.size(), origin).id);
}

void Memory::shorten(BlockPath& path) {
  erase(path.own.back());
  path.own.pop_back();
}

bool Memory::insert(BlockPath& path, const kv::BlockHash& hash, const kv::Residency& residency) {
  ++changes_;
  const BlockId id = path.own.front();
  if (!cache_.insert(id, hash, path.tail, residency)) return false;
  if (host_.on() && limits_.host_write == HostWrite::kThrough) unwritten_.emplace_back(id, block(id).serial);
  path.own.pop_front();
  path.tail = id;
  ++path.registered;
  return true;
}

void Memory::release(BlockPath& path) {
  ++changes_;
  for (auto id = path.own.rbegin(); id != path.own.rend(); ++id) erase(*id);
  if (path.tail != kNoBlock) unlock(path.tail);
  path = {};
}

void Memory::release_unknown(BlockPath& path) {
  cache_.order().begin_chain({});
  release(path);
}

void Memory::unlock(BlockId tail) {
  const PrefixCache::Unlocked unlocked = cache_.unlock(tail, issued_);
  for (const BlockId id : unlocked.gone) erase(id);
  for (const BlockId id : unlocked.invalid) drop_invalid(id);
}

bool Memory::can_pin(BlockId tail) const {
  const PageCounts pages = cache_.unused_pages(tail);
  bool can = true;
  for_each_pool(limits_.rank_count, [&](kv::Stream stream, int rank) {
    can = can && (pages.at(stream, rank) == 0 || room(stream, rank) >= pages.at(stream, rank));
  });
  return can;
}

void Memory::pin(BlockId tail) {
  ++changes_;
  cache_.lock(tail);
}

void Memory::unpin(BlockId tail) {
  ++changes_;
  cache_.order().begin_chain({});  // it is of no request's chain
  unlock(tail);
}

BlockId Memory::at(const BlockPath& path, int64_t index) const {
  return index < path.registered ? cache_.at(path.tail, index)
                                 : path.own.at(static_cast<size_t>(index - path.registered));
}

void Memory::count_missing(const BlockPath& path, const kv::Residency& residency, PageCounts& counts) const {
  const auto count = [&](BlockId id) {
    for (int part = 0; part < parts(); ++part) {
      for_each_rank(missing(block(id), part, residency),
                    [&](int rank) { ++counts.at(block(id).part(part).stream, rank); });
    }
  };
  cache_.for_each_run(path.tail, [&](const Run& run, int64_t first, int64_t end) {
    if (run.covers == residency) return;
    for (int64_t index = first; index < end; ++index) {
      count(run.blocks[static_cast<size_t>(index - run.first_index)]);
    }
  });
  for (const BlockId id : path.own) count(id);
}

int64_t Memory::first_unsure(const BlockPath& path, const kv::Residency& residency) const {
  int64_t first = path.registered;
  cache_.for_each_run(path.tail, [&](const Run& run, int64_t, int64_t) {
    if (run.covers != residency || run.invalid > 0) first = run.first_index;
  });
  return first;
}

PageCounts Memory::pages(const BlockPath& path) const {
  PageCounts sum;
  cache_.for_each_run(path.tail, [&](const Run& run, int64_t, int64_t) { sum += run.pages; });
  for (const BlockId id : path.own) {
    block(id).for_each_page([&](kv::Stream stream, int rank, PageId) { ++sum.at(stream, rank); });
  }
  return sum;
}

// ---- one block ------------------------------------------------------------------------------------------

bool Memory::hold(BlockId id, const kv::Residency& residency, PageCounts& reserved, bool empty) {
  Block& block = blocks_.at(id);
  CHECK(used(block));
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
      if (block.run != kNoRun) ++changes_;  // whoever shares it needs one page less
      if (empty) block.part(part).valid |= mask_of(rank);
      cache_.page_added(block, stream, rank, empty);
    }
  }
  return true;
}

bool Memory::add_page(Block& block, int part, int rank) {
  const kv::Stream stream = block.part(part).stream;
  if (room(stream, rank) < 1 || block.page(part, rank) != kNoPage) return false;
  const std::optional<PageId> page = allocator_.take(stream, rank);
  if (!page) return false;
  block.page(part, rank) = *page;
  cache_.page_added(block, stream, rank, false);
  return true;
}

RankMask Memory::wanted(const Block& block, int part, const kv::Residency& residency) const {
  if (only_on_host(block, part)) return 0;
  if (!holders_ || !holders_->table.is_of(residency, block.origin)) {
    const kv::Topology ranks = limits_.active();
    holders_.emplace(kv::HolderTable(limits_.geometry, residency, block.origin, ranks.count()), ranks);
  }
  return holders_->ranks.ranks_at(holders_->table.holders(block.index, part));
}

RankMask Memory::missing(const Block& block, int part, const kv::Residency& residency) const {
  return wanted(block, part, residency) & ~block.part(part).holders();
}

void Memory::set_valid(Block& block, int part, int rank, bool valid) {
  RankMask& mask = block.part(part).valid;
  if (holds(mask, rank) == valid) return;
  mask ^= mask_of(rank);
  cache_.validity_changed(block, valid);
}

void Memory::drop(BlockId id, int part, int rank) {
  Block& block = blocks_.at(id);
  const kv::Stream stream = block.part(part).stream;
  PageId& page = block.page(part, rank);
  CHECK(page != kNoPage);
  ++changes_;
  const bool in_run = block.run != kNoRun && cache_.run(block.run).covers;
  const bool breaks = in_run && holds(wanted(block, part, *cache_.run(block.run).covers), rank);
  cache_.page_dropped(block, stream, rank, holds(block.part(part).valid, rank), breaks);
  allocator_.give_back(stream, rank, page, issued_);
  page = kNoPage;
  block.part(part).valid &= ~mask_of(rank);
}

void Memory::drop_invalid(BlockId id) {
  const Block& block = blocks_.at(id);
  CHECK(!used(block));
  for (int part = 0; part < parts(); ++part) {
    for_each_rank(block.part(part).holders() & ~block.part(part).valid,
                  [&](int rank) { drop(id, part, rank); });
  }
}

PrefixCache::Forgotten Memory::take_out(BlockId id) {
  ++changes_;
  PrefixCache::Forgotten forgotten = cache_.forget(id);
  for (const BlockId gone : forgotten.gone) erase(gone);
  return forgotten;
}

void Memory::forget(BlockId id) { take_out(id); }

void Memory::distrust(BlockId id) { host_.forget(take_out(id).identities, issued_); }

void Memory::erase(BlockId id) {
  block(id).for_each_page(
      [&](kv::Stream stream, int rank, PageId page) { allocator_.give_back(stream, rank, page, issued_); });
  blocks_.erase(id);
}

// ---- what eviction goes by ------------------------------------------------------------------------------

void Memory::advance(Time now) {
  now_ = std::max(now_, now);
  if (limits_.eviction == Eviction::kReuse) reuse_.advance(now_);
  cache_.order().advance(now_);
}

ChainHistory Memory::chain_arrived(const Identities& prompt, Time arrived) {
  return limits_.eviction == Eviction::kLru ? ChainHistory{} : reuse_.arrived(prompt, arrived);
}

void Memory::chain_unused(const ChainHistory& history, const Identities& identities, int64_t prompt,
                          bool begun) {
  if (limits_.eviction == Eviction::kLru) return;
  cache_.order().begin_chain(begun ? reuse_.begun(history, identities, prompt, now_)
                                   : reuse_.ended(history, identities, prompt, now_));
}

std::optional<PageId> Memory::take_page(kv::Stream stream, int rank) {
  for (;;) {
    if (const auto page = allocator_.take(stream, rank)) return page;
    const std::optional<RunId> victim = cache_.victim(stream, rank, last_completed());
    if (!victim || waits_for_spill(block(cache_.run(*victim).tail()))) return std::nullopt;
    ++changes_;
    const StepId fence = cache_.run(*victim).fence;
    const Block& tail = block(cache_.remove_tail(*victim));
    host_.touch(tail.hash);
    // No plan in flight names it, so its pages are free at once.
    tail.for_each_page(
        [&](kv::Stream of, int holder, PageId page) { allocator_.give_back(of, holder, page, fence); });
    blocks_.erase(tail.id);
    ++evicted_blocks_;
  }
}

// ---- the second tier ------------------------------------------------------------------------------------

// The plan being made copies a registered block to the host, each part from one of its holders.
HostPool::Room Memory::spill(const Block& block) {
  const kv::BlockHash parent =
      block.index == 0 ? kv::BlockHash{} : this->block(cache_.at(block.id, block.index - 1)).hash;
  return spill(block, block.hash, parent, false);
}

HostPool::Room Memory::spill(const Block& block, const kv::BlockHash& name, const kv::BlockHash& parent,
                             bool promised) {
  const HostPool::Room room =
      promised ? host_.begin_promised(name, parent, issued_) : host_.begin(name, parent, issued_);
  if (room != HostPool::Room::kTaken) return room;
  spills_.ids.push_back(host_.id(name));
  spills_.bytes += limits_.geometry.block_tokens * limits_.geometry.token_bytes();
  const bool copied = number(block.copy_step) == number(issued_) + 1;
  for (int part = 0; part < parts(); ++part) {
    const BlockPart& held = block.part(part);
    std::vector<int> sources;
    for_each_rank(held.valid & ~(copied ? held.copied : RankMask{0}),
                  [&](int rank) { sources.push_back(rank); });
    CHECK(!sources.empty(), "part ", part, " of block ", block.index, " is nowhere");
    const int rank = sources[static_cast<size_t>(block.index + part) % sources.size()];  // in turns
    spills_.copies.push_back(
        {held.stream, rank, block.page(part, rank), host_.pages(name)[static_cast<size_t>(part)], {}});
  }
  return room;
}

// Whether what this block holds would be lost if it made room now, and need not be.
bool Memory::waits_for_spill(const Block& tail) {
  if (!host_.on()) return false;
  pressed_ = true;
  switch (host_.state(tail.hash)) {
    case HostPool::State::kThere:
    case HostPool::State::kLeaving:
      return false;
    case HostPool::State::kSpilling:
      return true;
    case HostPool::State::kNone:
      break;
  }
  return spill(tail) != HostPool::Room::kNone;
}

bool Memory::may_spill_more() const {
  return spills_.bytes < limits_.host_plan_bytes * limits_.rank_count &&
         std::ssize(spills_.copies) + parts() <= limits_.max_copies();
}

// Who needed room needs more of it soon: what is next in order goes to the host now, so that it can be given
// up at once later.
void Memory::spill_ahead() {
  int64_t left = 2 * ceil_div(limits_.max_step_rows, limits_.geometry.block_tokens);
  cache_.for_each_victim([&](const Block& block) {
    if (--left < 0 || !may_spill_more()) return false;
    return host_.state(block.hash) != HostPool::State::kNone || spill(block) == HostPool::Room::kTaken;
  });
}

Memory::Spills Memory::take_spills(bool ahead) {
  if (!ahead) return std::exchange(spills_, {});
  if (std::exchange(pressed_, false)) spill_ahead();
  for (; !unwritten_.empty() && may_spill_more(); unwritten_.pop_front()) {
    const auto [id, serial] = unwritten_.front();
    const Block* block = blocks_.find(id, serial);
    if (block == nullptr || block->run == kNoRun || cache_.run(block->run).forgotten ||
        host_.state(block->hash) != HostPool::State::kNone) {
      continue;
    }
    if (spill(*block) == HostPool::Room::kLater) break;
  }
  return std::exchange(spills_, {});
}

void Memory::spilled(const std::vector<HostCopyId>& copies) {
  changes_ += copies.empty() ? 0 : 1;  // what has a copy can make room
  for (const HostCopyId& copy : copies) host_.arrived(copy);
}

void Memory::spills_lost(const std::vector<HostCopyId>& copies) {
  changes_ += copies.empty() ? 0 : 1;
  for (const HostCopyId& copy : copies) host_.lost(copy, issued_);
}

void Memory::lock_host(const Identities& identities, int64_t first, int64_t count) {
  for (int64_t index = first; index < first + count; ++index) host_.lock(identities[index]);
}

// From the end: it is the first to make room.
void Memory::unlock_host(const Identities& identities, int64_t first, int64_t count) {
  changes_ += count > 0 ? 1 : 0;
  for (int64_t index = first + count - 1; index >= first; --index) host_.unlock(identities[index], issued_);
}

void Memory::lock_host(const std::vector<kv::BlockHash>& hashes) {
  for (const kv::BlockHash& hash : hashes) host_.lock(hash);
}

void Memory::unlock_host(const std::vector<kv::BlockHash>& hashes) {
  changes_ += hashes.empty() ? 0 : 1;
  for (auto hash = hashes.rbegin(); hash != hashes.rend(); ++hash) host_.unlock(*hash, issued_);
}

// ---- contexts that lie on the host -----------------------------------------------------------------------

void Memory::move_to_host(BlockId id) {
  Block& block = blocks_.at(id);
  CHECK(block.run == kNoRun && !block.on_host);
  block.on_host = true;
  for (int part = 0; part < parts(); ++part) {
    if (block.part(part).stream != kv::Stream::kEntries) continue;
    for_each_rank(block.part(part).holders(), [&](int rank) { drop(id, part, rank); });
  }
}

bool Memory::hold_hot(HotPages& hot, const PageCounts& pages, PageCounts& reserved) {
  constexpr auto kEntries = kv::Stream::kEntries;
  for (int rank = 0; rank < limits_.rank_count; ++rank) {
    std::vector<PageId>& held = hot[static_cast<size_t>(rank)];
    while (std::ssize(held) < pages.at(kEntries, rank)) {
      const std::optional<PageId> page = take_page(kEntries, rank);
      if (!page) return false;
      CHECK_GT(reserved.at(kEntries, rank), 0);
      --reserved.at(kEntries, rank);
      --reserved_.at(kEntries, rank);
      ++hot_.at(kEntries, rank);
      held.push_back(*page);
    }
  }
  return true;
}

void Memory::drop_hot(HotPages& hot, RankMask ranks) {
  PageCounts pages;
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    if (!holds(ranks, rank))
      pages.at(kv::Stream::kEntries, rank) = std::ssize(hot[static_cast<size_t>(rank)]);
  }
  trim_hot(hot, pages);
}

void Memory::trim_hot(HotPages& hot, const PageCounts& pages) {
  constexpr auto kEntries = kv::Stream::kEntries;
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    std::vector<PageId>& held = hot[static_cast<size_t>(rank)];
    for (; std::ssize(held) > pages.at(kEntries, rank); held.pop_back()) {
      ++changes_;
      allocator_.give_back(kEntries, rank, held.back(), issued_);
      --hot_.at(kEntries, rank);
    }
  }
}

// ---- room -----------------------------------------------------------------------------------------------

int64_t Memory::room(kv::Stream stream, int rank) const {
  const auto& pool = allocator_.pool(stream, rank);
  return pool.free_count() + pool.in_flight_count() + cache_.evictable(stream, rank) -
         reserved_.at(stream, rank);
}

bool Memory::has_room(const PageCounts& counts, BlockId locked) const {
  const PageCounts kept = locked == kNoBlock ? PageCounts{} : cache_.unused_pages(locked);
  bool has = true;
  for_each_pool(limits_.rank_count, [&](kv::Stream stream, int rank) {
    const int64_t need = counts.at(stream, rank);
    has = has && room(stream, rank) - kept.at(stream, rank) >= need;
  });
  return has;
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
  host_.check_invariants();
  PageCounts owned;
  std::set<std::pair<int, PageId>> seen;
  blocks_.for_each([&](const Block& block) {
    block.for_each_page([&](kv::Stream stream, int rank, PageId page) {
      CHECK(rank < limits_.rank_count);
      CHECK(allocator_.pool(stream, rank).is_taken(page));
      CHECK(seen.insert({static_cast<int>(stream) * kMaxRanks + rank, page}).second, "a page of two blocks");
      ++owned.at(stream, rank);
    });
    const Run* run = block.run == kNoRun ? nullptr : &cache_.run(block.run);
    for (int part = 0; part < parts(); ++part) {
      const BlockPart& held = block.part(part);
      CHECK_EQ(held.valid & ~held.holders(), 0u);
      if (run == nullptr || run->forgotten)
        continue;  // forgotten: what a device lost, for as long as it is pinned
      CHECK(held.valid != 0, "a cached block without bytes");
      if (run->covers) CHECK_EQ(missing(block, part, *run->covers), 0u);
    }
  });
  for_each_pool(limits_.rank_count, [&](kv::Stream stream, int rank) {
    CHECK_EQ(owned.at(stream, rank) + hot_.at(stream, rank), allocator_.pool(stream, rank).taken_count());
    CHECK_GE(reserved_.at(stream, rank), 0);
    CHECK_GE(room(stream, rank), 0);
  });
}

void Memory::check_locks(const std::vector<BlockId>& tails) const {
  std::map<RunId, int64_t> users;
  for (const BlockId tail : tails) {
    if (tail != kNoBlock) CHECK(cache_.run(block(tail).run).tail() == tail, "a lock in the middle of a run");
    cache_.for_each_run(tail, [&](const Run& run, int64_t, int64_t) { ++users[run.id]; });
  }
  blocks_.for_each([&](const Block& block) {
    if (block.run == kNoRun) return;
    const auto found = users.find(block.run);
    CHECK_EQ(cache_.run(block.run).users, found == users.end() ? 0 : found->second);
  });
}

}  // namespace weft::controlplane
