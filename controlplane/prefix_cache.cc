#include "controlplane/prefix_cache.h"

#include <algorithm>
#include <utility>

#include "proto/vocab/check.h"

namespace weft::controlplane {

PrefixCache::Match PrefixCache::find(const Identities& identities, int64_t likely) const {
  const int64_t count = identities.size();
  const auto known = [&](int64_t blocks) { return by_hash_.contains(identities[blocks - 1]); };
  // Known prefixes are at least `low` blocks long, and less than `high`.
  int64_t low = 0, high = count + 1;
  likely = std::min(likely, count);
  if (likely > 0) {
    if (known(likely)) {
      low = likely;
      for (int64_t step = 1; low + step < high; step *= 2) {
        if (!known(low + step)) {
          high = low + step;
        } else {
          low += step;
        }
      }
    } else {
      high = likely;
    }
  }
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (known(middle) ? low : high) = middle;
  }
  if (low == 0) return {};
  return {by_hash_.at(identities[low - 1]), low};
}

// ---- locks ----------------------------------------------------------------------------------------------

void PrefixCache::lock(BlockId tail) {
  const Block& block = blocks_.at(tail);
  CHECK(block.run != kNoRun);
  if (run(block.run).tail() != tail) split(block.run, block.index + 1);
  for (RunId id = block.run; id != kNoRun; id = at(id).parent) {
    Run& locked = at(id);
    if (locked.users++ > 0) continue;
    evictable_ -= locked.pages;
    if (locked.first_child == kNoRun) order_.remove_leaf(id, locked.place);
    order_.leave(std::exchange(locked.place, {}));
  }
}

bool PrefixCache::insert(BlockId id, const kv::BlockHash& hash, BlockId tail,
                         const kv::Residency& residency) {
  Block& block = blocks_.at(id);
  CHECK(block.run == kNoRun);
  const RunId above = tail == kNoBlock ? kNoRun : blocks_.at(tail).run;
  if (above != kNoRun) {
    CHECK(run(above).tail() == tail && run(above).users > 0, "a block is registered by a user of its parent");
    if (run(above).forgotten) return false;
  }
  if (!by_hash_.try_emplace(hash, id).second) return false;
  block.hash = hash;
  const bool grows = above != kNoRun && run(above).users == 1 && run(above).first_child == kNoRun;
  Run& into = grows ? at(above) : create(block.index);
  if (grows) {
    if (into.covers != residency) into.covers.reset();
  } else {
    if (above != kNoRun) adopt(at(above), into);
    into.users = 1;
    into.covers = residency;
  }
  block.run = into.id;
  into.blocks.push_back(id);
  count(into, block, +1);
  return true;
}

PrefixCache::Unlocked PrefixCache::unlock(BlockId tail, StepId fence) {
  order_.begin_use();
  Unlocked out;
  for (RunId id = blocks_.at(tail).run, next; id != kNoRun; id = next) {
    Run& left = at(id);
    next = left.parent;
    CHECK_GT(left.users, 0);
    if (--left.users == 0 && left.forgotten) {
      CHECK(left.first_child == kNoRun);
      take_blocks(left, out.gone);
      remove(left);
      continue;
    }
    if (left.users == 0) {
      left.fence = fence;
      left.place = order_.enter();
      evictable_ += left.pages;
      if (is_leaf(left)) order_.add_leaf(id, left.place);
      for (const BlockId of : left.blocks) {
        if (left.invalid == 0) break;
        const auto& parts = blocks_.at(of).parts;
        if (std::any_of(parts.begin(), parts.end(),
                        [](const BlockPart& part) { return part.valid != part.holders(); })) {
          out.invalid.push_back(of);
        }
      }
    }
    merge_with_child(id);
  }
  return out;
}

// ---- what is given up -----------------------------------------------------------------------------------

std::optional<RunId> PrefixCache::victim(kv::Stream stream, int rank, StepId completed) const {
  if (evictable_.at(stream, rank) == 0) return std::nullopt;
  // A striped context has a page of every pool within a run of kShards blocks or two. Long ones that have to
  // give up much else first are taken only when nothing else is left.
  constexpr int64_t kNear = int64_t{2} * kv::kShards;
  for (const bool near : {true, false}) {
    for (const auto& [worth, last_use, id] : order_.leaves()) {
      const Run& leaf = run(id);
      if (leaf.fence > completed) continue;
      if (near ? tail_holds(leaf, stream, rank, kNear) : path_holds(leaf, stream, rank)) return id;
    }
  }
  return std::nullopt;
}

bool PrefixCache::path_holds(const Run& leaf, kv::Stream stream, int rank) const {
  for (const Run* on = &leaf; on->users == 0; on = &run(on->parent)) {
    if (on->pages.at(stream, rank) > 0) return true;
    if (on->parent == kNoRun) return false;
  }
  return false;
}

bool PrefixCache::tail_holds(const Run& leaf, kv::Stream stream, int rank, int64_t depth) const {
  for (const Run* on = &leaf; on->users == 0; on = &run(on->parent)) {
    for (auto id = on->blocks.rbegin(); id != on->blocks.rend(); ++id, --depth) {
      if (depth == 0) return false;
      for (const BlockPart& part : blocks_.at(*id).parts) {
        if (part.stream == stream && part.page[static_cast<size_t>(rank)] != kNoPage) return true;
      }
    }
    if (on->parent == kNoRun) return false;
  }
  return false;
}

BlockId PrefixCache::remove_tail(RunId id) {
  Run& leaf = at(id);
  CHECK(is_leaf(leaf));
  Block& block = blocks_.at(leaf.tail());
  by_hash_.erase(block.hash);
  evictable_ -= leaf.pages;
  count(leaf, block, -1);
  evictable_ += leaf.pages;
  leaf.blocks.pop_back();
  block.run = kNoRun;
  if (leaf.blocks.empty()) {
    const RunId parent = leaf.parent;
    order_.remove_leaf(id, leaf.place);
    order_.leave(leaf.place);
    remove(leaf);
    if (parent != kNoRun) merge_with_child(parent);
  }
  return block.id;
}

PrefixCache::Forgotten PrefixCache::forget(BlockId id) {
  const Block& first = blocks_.at(id);
  CHECK(first.run != kNoRun);
  if (run(first.run).first_index != first.index) split(first.run, first.index);
  std::vector<RunId> below = {first.run};
  for (size_t i = 0; i < below.size(); ++i) {
    for (RunId child = run(below[i]).first_child; child != kNoRun; child = run(child).next_sibling) {
      below.push_back(child);
    }
  }
  Forgotten out;
  for (auto which = below.rbegin(); which != below.rend(); ++which) {  // children before parents
    Run& lost = at(*which);
    if (!std::exchange(lost.forgotten, true)) {
      for (const BlockId block : lost.blocks) {
        by_hash_.erase(blocks_.at(block).hash);
        out.identities.push_back(blocks_.at(block).hash);
      }
    }
    if (lost.users > 0) continue;
    evictable_ -= lost.pages;
    order_.remove_leaf(lost.id, lost.place);
    order_.leave(lost.place);
    take_blocks(lost, out.gone);
    remove(lost);
  }
  return out;
}

// ---- pages ----------------------------------------------------------------------------------------------

void PrefixCache::page_added(const Block& block, kv::Stream stream, int rank, bool valid) {
  if (block.run == kNoRun) return;
  Run& of = at(block.run);
  ++of.pages.at(stream, rank);
  of.invalid += valid ? 0 : 1;
  if (of.users == 0) ++evictable_.at(stream, rank);
}

void PrefixCache::page_dropped(const Block& block, kv::Stream stream, int rank, bool was_valid, bool breaks) {
  if (block.run == kNoRun) return;
  Run& of = at(block.run);
  --of.pages.at(stream, rank);
  of.invalid -= was_valid ? 0 : 1;
  if (breaks) of.covers.reset();
  if (of.users == 0) --evictable_.at(stream, rank);
}

void PrefixCache::validity_changed(const Block& block, bool valid) {
  if (block.run != kNoRun) at(block.run).invalid += valid ? -1 : 1;
}

void PrefixCache::now_covers(BlockId tail, const kv::Residency& residency) {
  for_each_run(tail, [&](const Run& of, int64_t, int64_t) { at(of.id).covers = residency; });
}

void PrefixCache::count(Run& run, const Block& block, int64_t sign) const {
  block.for_each_page([&](kv::Stream stream, int rank, PageId) { run.pages.at(stream, rank) += sign; });
  for (const BlockPart& part : block.parts) {
    run.invalid += sign * rank_count_of(part.holders() & ~part.valid);
  }
}

PageCounts PrefixCache::unused_pages(BlockId tail) const {
  PageCounts sum;
  for_each_run(tail, [&](const Run& of, int64_t first, int64_t end) {
    if (of.users > 0) return;
    Run part;  // what is counted one by one: the smaller part
    const bool front = end - first <= of.end() - end;
    for (int64_t index = front ? first : end; index < (front ? end : of.end()); ++index) {
      count(part, blocks_.at(of.blocks[static_cast<size_t>(index - of.first_index)]), +1);
    }
    if (front) {
      sum += part.pages;
    } else {
      sum += of.pages;
      sum -= part.pages;
    }
  });
  return sum;
}

BlockId PrefixCache::at(BlockId tail, int64_t index) const {
  RunId id = blocks_.at(tail).run;
  while (run(id).first_index > index) id = run(id).parent;
  return run(id).blocks.at(static_cast<size_t>(index - run(id).first_index));
}

// ---- the tree of runs -----------------------------------------------------------------------------------

Run& PrefixCache::create(int64_t first_index) {
  RunId id{static_cast<uint32_t>(runs_.size())};
  if (unused_ids_.empty()) {
    runs_.emplace_back();
  } else {
    id = unused_ids_.back();
    unused_ids_.pop_back();
  }
  Run& fresh = at(id);
  fresh = Run{};
  fresh.id = id;
  fresh.first_index = first_index;
  return fresh;
}

void PrefixCache::erase(Run& run) {
  unused_ids_.push_back(std::exchange(run.id, kNoRun));
  run.blocks.clear();
}

void PrefixCache::adopt(Run& parent, Run& child) {
  if (is_leaf(parent)) order_.remove_leaf(parent.id, parent.place);
  child.parent = parent.id;
  child.next_sibling = parent.first_child;
  if (parent.first_child != kNoRun) at(parent.first_child).previous_sibling = child.id;
  parent.first_child = child.id;
}

void PrefixCache::abandon(Run& child) {
  if (child.next_sibling != kNoRun) at(child.next_sibling).previous_sibling = child.previous_sibling;
  if (child.previous_sibling != kNoRun) {
    at(child.previous_sibling).next_sibling = child.next_sibling;
  } else if (child.parent != kNoRun) {
    at(child.parent).first_child = child.next_sibling;
  }
  child.parent = child.next_sibling = child.previous_sibling = kNoRun;
}

// `by` stands in the tree where `child` stood.
void PrefixCache::replace_child(RunId parent, RunId child, RunId by) {
  Run& old = at(child);
  Run& next = at(by);
  next.parent = parent;
  next.next_sibling = std::exchange(old.next_sibling, kNoRun);
  next.previous_sibling = std::exchange(old.previous_sibling, kNoRun);
  if (next.next_sibling != kNoRun) at(next.next_sibling).previous_sibling = by;
  if (next.previous_sibling != kNoRun) {
    at(next.previous_sibling).next_sibling = by;
  } else if (parent != kNoRun) {
    at(parent).first_child = by;
  }
}

void PrefixCache::remove(Run& run) {
  CHECK(run.blocks.empty() && run.first_child == kNoRun);
  const RunId parent = run.parent;
  abandon(run);
  erase(run);
  if (parent != kNoRun && is_leaf(at(parent))) order_.add_leaf(parent, at(parent).place);
}

void PrefixCache::take_blocks(Run& run, std::vector<BlockId>& to) {
  for (auto id = run.blocks.rbegin(); id != run.blocks.rend(); ++id) {
    blocks_.at(*id).run = kNoRun;
    to.push_back(*id);
  }
  run.blocks.clear();
}

// Cuts a run in two before block `index`. The smaller part moves to a new run; children stay with the lower
// one.
void PrefixCache::split(RunId id, int64_t index) {
  const int64_t first = at(id).first_index;
  const int64_t upper_count = index - first, lower_count = at(id).end() - index;
  CHECK(upper_count > 0 && lower_count > 0);
  const bool moves_upper = upper_count < lower_count;
  Run& fresh = create(moves_upper ? first : index);
  Run& old = at(id);
  if (is_leaf(old)) order_.remove_leaf(id, old.place);
  fresh.users = old.users;
  fresh.forgotten = old.forgotten;
  fresh.covers = old.covers;
  fresh.place = old.place;
  fresh.fence = old.fence;
  if (old.users == 0) order_.divide(old.place);
  for (int64_t n = std::min(upper_count, lower_count); n > 0; --n) {
    Block& block = blocks_.at(moves_upper ? old.blocks.front() : old.blocks.back());
    block.run = fresh.id;
    count(fresh, block, +1);
    if (moves_upper) {
      fresh.blocks.push_back(block.id);
      old.blocks.pop_front();
    } else {
      fresh.blocks.push_front(block.id);
      old.blocks.pop_back();
    }
  }
  old.pages -= fresh.pages;
  old.invalid -= fresh.invalid;
  if (moves_upper) {
    old.first_index = index;
    replace_child(old.parent, id, fresh.id);
    old.parent = fresh.id;
    fresh.first_child = id;
  } else {
    fresh.first_child = old.first_child;
    for (RunId child = fresh.first_child; child != kNoRun; child = at(child).next_sibling) {
      at(child).parent = fresh.id;
    }
    fresh.parent = id;
    old.first_child = fresh.id;
  }
  Run& lower = moves_upper ? old : fresh;
  if (is_leaf(lower)) order_.add_leaf(lower.id, lower.place);
}

RunId PrefixCache::only_child(const Run& run) const {
  const RunId child = run.first_child;
  return child != kNoRun && this->run(child).next_sibling == kNoRun ? child : kNoRun;
}

// Where a branch is gone, or its end was given back together with what is below: one run again. The smaller
// one moves.
void PrefixCache::merge_with_child(RunId id) {
  const RunId below = only_child(at(id));
  if (below == kNoRun) return;
  Run& upper = at(id);
  Run& lower = at(below);
  // Equal users: nobody's context ends between them.
  if (upper.users != lower.users || upper.forgotten != lower.forgotten || upper.place != lower.place ||
      (upper.users == 0 && upper.fence != lower.fence)) {
    return;
  }
  const bool into_upper = upper.blocks.size() >= lower.blocks.size();
  Run& kept = into_upper ? upper : lower;
  Run& moved = into_upper ? lower : upper;
  const bool leaf = is_leaf(lower);
  if (leaf) order_.remove_leaf(below, lower.place);
  if (upper.users == 0) order_.leave(moved.place);
  while (!moved.blocks.empty()) {
    const BlockId block = into_upper ? moved.blocks.front() : moved.blocks.back();
    blocks_.at(block).run = kept.id;
    if (into_upper) {
      kept.blocks.push_back(block);
      moved.blocks.pop_front();
    } else {
      kept.blocks.push_front(block);
      moved.blocks.pop_back();
    }
  }
  kept.pages += moved.pages;
  kept.invalid += moved.invalid;
  if (kept.covers != moved.covers) kept.covers.reset();
  if (into_upper) {
    upper.first_child = lower.first_child;
    for (RunId child = upper.first_child; child != kNoRun; child = at(child).next_sibling) {
      at(child).parent = id;
    }
  } else {
    lower.first_index = upper.first_index;
    replace_child(upper.parent, id, below);
  }
  if (leaf) order_.add_leaf(kept.id, kept.place);
  erase(moved);
}

void PrefixCache::check_invariants() const {
  PageCounts evictable;
  size_t leaves = 0;
  size_t registered = 0;
  std::unordered_map<uint64_t, int64_t> chain_runs;
  for (const Run& one : runs_) {
    if (one.id == kNoRun) continue;
    CHECK(!one.blocks.empty());
    Run counted;
    int64_t index = one.first_index;
    for (const BlockId id : one.blocks) {
      const Block& block = blocks_.at(id);
      CHECK(block.run == one.id && block.index == index++);
      CHECK_EQ(block.origin, blocks_.at(one.blocks.front()).origin);
      count(counted, block, +1);
      const auto found = by_hash_.find(block.hash);
      CHECK((found != by_hash_.end() && found->second == id) == !one.forgotten);
    }
    registered += one.forgotten ? 0 : one.blocks.size();
    CHECK(counted.pages == one.pages);
    CHECK_EQ(counted.invalid, one.invalid);
    int64_t users_below = 0;
    RunId previous = kNoRun;
    for (RunId child = one.first_child; child != kNoRun; child = run(child).next_sibling) {
      const Run& below = run(child);
      CHECK(below.parent == one.id && below.previous_sibling == previous && below.first_index == one.end());
      CHECK_EQ(blocks_.at(below.tail()).origin, blocks_.at(one.tail()).origin);
      CHECK(below.forgotten || !one.forgotten);
      CHECK(one.users > 0 || one.fence >= below.fence);
      users_below += below.users;
      previous = child;
    }
    CHECK(one.users >= users_below, "a user of a block uses its parent");
    if (one.users > 0) {
      CHECK(one.place == EvictionOrder::Place{});
      continue;
    }
    CHECK(!one.forgotten, "a forgotten run that nobody uses");
    CHECK_EQ(one.invalid, 0);
    ++chain_runs[one.place.chain];
    evictable += one.pages;
    if (one.first_child != kNoRun) continue;
    ++leaves;
    CHECK(order_.is_leaf(one.id, one.place));
  }
  CHECK_EQ(leaves, order_.leaves().size());
  CHECK_EQ(registered, by_hash_.size());
  CHECK(evictable == evictable_);
  chain_runs.erase(0);
  order_.check_invariants(chain_runs);
}

}  // namespace weft::controlplane
