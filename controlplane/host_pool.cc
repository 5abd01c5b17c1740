#include "controlplane/host_pool.h"

#include <algorithm>
#include <array>
#include <unordered_set>

namespace weft::controlplane {

HostPool::HostPool(const Limits& limits)
    : geometry_(limits.geometry), on_(limits.host_pages[0] + limits.host_pages[1] > 0) {
  for (const int64_t pages : limits.host_pages) pools_.emplace_back(pages);
  capacity_ = limits.host_copies();
}

HostPool::State HostPool::state(const kv::BlockHash& hash) const {
  const auto found = copies_.find(hash);
  if (found == copies_.end()) return State::kNone;
  if (found->second.forgotten) return State::kLeaving;
  return found->second.there ? State::kThere : State::kSpilling;
}

int64_t HostPool::match(const Identities& identities, int64_t first) const {
  if (copies_.empty()) return 0;
  int64_t index = first;
  while (has(identities, index)) ++index;
  return index - first;
}

int64_t HostPool::unlocked(const Identities& identities, int64_t first, int64_t count) const {
  int64_t copies = 0;
  for (int64_t index = first; index < first + count; ++index)
    copies += copies_.at(identities[index]).locks == 0 ? 1 : 0;
  return copies;
}

int64_t HostPool::lockable(const Identities& identities, int64_t first, int64_t count) const {
  int64_t left = room();
  for (int64_t index = first; index < first + count; ++index) {
    if (copies_.at(identities[index]).locks == 0 && --left < 0) return index - first;
  }
  return count;
}

HostPool::Room HostPool::begin(const kv::BlockHash& hash, const kv::BlockHash& parent, StepId fence) {
  return room() < 1 ? Room::kNone : take(hash, parent, fence, false);
}

HostPool::Room HostPool::take(const kv::BlockHash& hash, const kv::BlockHash& parent, StepId fence,
                              bool promised) {
  CHECK(!copies_.contains(hash));
  bool now = true;
  for (const kv::Stream stream : kv::kAllStreams) {
    const int64_t need = geometry_.stream(stream).used_parts();
    const auto coming = [&] { return pool(stream).free_count() + pool(stream).in_flight_count(); };
    if (pool(stream).count() < need) return Room::kNone;
    while (coming() < need && !order_.empty()) erase(copies_.find(order_.front()), fence);
    if (coming() < need) return Room::kNone;
    now = now && pool(stream).free_count() >= need;
  }
  if (!now) return Room::kLater;
  Copy& copy = copies_[hash];
  copy.serial = ++serials_;
  copy.parent = parent;
  copy.promised = promised;
  bound_ += binds(copy);
  for (int part = 0; part < geometry_.parts(); ++part)
    copy.pages.push_back(pool(geometry_.stream_of(part)).take().value());
  return Room::kTaken;
}

void HostPool::arrived(const HostCopyId& copy) {
  const auto found = copies_.find(copy.hash);
  if (found == copies_.end() || found->second.serial != copy.serial) return;
  bound_ -= binds(found->second);
  found->second.there = true;
  enter(copy.hash, found->second);
}

void HostPool::lost(const HostCopyId& copy, StepId fence) {
  const auto found = copies_.find(copy.hash);
  if (found != copies_.end() && found->second.serial == copy.serial) erase(found, fence);
}

void HostPool::lock(const kv::BlockHash& hash) {
  Copy& copy = copies_.at(hash);
  CHECK(copy.there);
  if (copy.locks == 0) leave(copy);
  bound_ += copy.locks++ == 0 ? 1 : 0;
}

void HostPool::unlock(const kv::BlockHash& hash, StepId fence) {
  const auto found = copies_.find(hash);
  CHECK(found != copies_.end());
  Copy& copy = found->second;
  CHECK_GT(copy.locks, 0);
  if (--copy.locks > 0) return;
  --bound_;
  enter(hash, copy);
  if (copy.forgotten) erase(found, fence);
}

void HostPool::touch(const kv::BlockHash& hash) {
  const auto found = copies_.find(hash);
  if (found == copies_.end() || !evictable(found->second)) return;
  order_.splice(order_.end(), order_, found->second.place);
}

void HostPool::forget(const std::vector<kv::BlockHash>& hashes, StepId fence) {
  if (copies_.empty()) return;
  std::unordered_multimap<kv::BlockHash, kv::BlockHash, kv::BlockHashHasher> children;
  for (const auto& [hash, copy] : copies_) children.emplace(copy.parent, hash);
  std::vector<kv::BlockHash> below;
  std::unordered_set<kv::BlockHash, kv::BlockHashHasher> seen;  // a chain hangs below each of its own blocks
  const auto add = [&](const kv::BlockHash& hash) {
    if (seen.insert(hash).second) below.push_back(hash);
  };
  for (const kv::BlockHash& hash : hashes) add(hash);
  for (size_t i = 0; i < below.size(); ++i) {
    const auto [first, last] = children.equal_range(below[i]);
    for (auto child = first; child != last; ++child) add(child->second);
  }
  for (const kv::BlockHash& hash : below) {
    const auto found = copies_.find(hash);
    if (found == copies_.end()) continue;
    if (found->second.locks > 0) {
      found->second.forgotten = true;
    } else {
      erase(found, fence);
    }
  }
}

void HostPool::complete(StepId completed) {
  completed_ = completed;
  for (auto& pool : pools_) pool.complete(completed);
}

void HostPool::enter(const kv::BlockHash& hash, Copy& copy) {
  copy.place = order_.insert(order_.end(), hash);
}
void HostPool::leave(Copy& copy) { order_.erase(copy.place); }

void HostPool::erase(Copies::iterator copy, StepId fence) {
  if (evictable(copy->second)) leave(copy->second);
  bound_ -= binds(copy->second);
  for (int part = 0; part < geometry_.parts(); ++part) {
    pool(geometry_.stream_of(part))
        .give_back(copy->second.pages[static_cast<size_t>(part)], fence, completed_);
  }
  copies_.erase(copy);
}

HostCounts HostPool::counts(kv::Stream stream) const {
  const FencedPool<PageId>& pages = pools_[static_cast<size_t>(stream)];
  HostCounts counts;
  counts.pages = pages.count();
  counts.free = pages.free_count();
  counts.in_flight = pages.in_flight_count();
  counts.cached = static_cast<int64_t>(order_.size()) * geometry_.stream(stream).used_parts();
  counts.used = pages.taken_count() - counts.cached;
  return counts;
}

void HostPool::check_invariants() const {
  std::array<int64_t, kv::kStreams> owned{};
  std::array<std::unordered_set<uint32_t>, kv::kStreams> seen;
  size_t in_order = 0;
  int64_t bound = 0;
  for (const auto& [hash, copy] : copies_) {
    CHECK_EQ(static_cast<int>(copy.pages.size()), geometry_.parts());
    for (int part = 0; part < geometry_.parts(); ++part) {
      const auto stream = static_cast<size_t>(geometry_.stream_of(part));
      const PageId page = copy.pages[static_cast<size_t>(part)];
      CHECK(pools_[stream].is_taken(page) && seen[stream].insert(number(page)).second,
            "a host page of two blocks");
      ++owned[stream];
    }
    CHECK(copy.there || copy.locks == 0);
    bound += binds(copy);
    if (!evictable(copy)) continue;
    ++in_order;
    CHECK(*copy.place == hash);
  }
  CHECK_EQ(in_order, order_.size());
  CHECK_EQ(bound, bound_);
  CHECK_GE(promised_, 0);
  for (size_t stream = 0; stream < pools_.size(); ++stream) {
    pools_[stream].check_invariants();
    CHECK_EQ(owned[stream], pools_[stream].taken_count());
  }
}

void HostPool::check_locks(const std::vector<kv::BlockHash>& locks) const {
  std::unordered_map<kv::BlockHash, int64_t, kv::BlockHashHasher> wanted;
  for (const kv::BlockHash& hash : locks) {
    CHECK(copies_.contains(hash), "a lock on a copy that is not there");
    ++wanted[hash];
  }
  for (const auto& [hash, copy] : copies_) {
    const auto found = wanted.find(hash);
    CHECK_EQ(copy.locks, found == wanted.end() ? 0 : found->second);
  }
}

}  // namespace weft::controlplane
