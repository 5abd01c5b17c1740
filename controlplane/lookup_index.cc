#include "controlplane/lookup_index.h"

#include <algorithm>
#include <limits>

#include "proto/vocab/check.h"

namespace weft::controlplane {
namespace {

constexpr size_t kFewestSlots = 16;

// Of the last `length` tokens before `end`, for every length up to the longest that fits.
template <typename Hashes>
void hash_runs(std::span<const uint32_t> text, int64_t end, int64_t longest, Hashes& hashes) {
  uint64_t hash = 0x9e3779b97f4a7c15u;
  for (int64_t length = 1; length <= longest; ++length) {
    hash = (hash ^ text[static_cast<size_t>(end - length)]) * 0xd6e8feb86659fd93u;
    hash ^= hash >> 32;
    hashes[static_cast<size_t>(length)] = hash;
  }
}

bool same_run(std::span<const uint32_t> text, int64_t length, int64_t a, int64_t b) {
  const auto run = [&](int64_t end) { return text.begin() + end - length; };
  return std::equal(run(a), run(a) + length, run(b));
}

// The slot of the run that ends at `end`: the one that holds it, else the empty one where it belongs.
size_t slot_of(std::span<const uint32_t> text, std::span<const uint32_t> slots, int64_t length, int64_t end,
               uint64_t hash) {
  const size_t mask = slots.size() - 1;
  size_t at = hash & mask;
  while (slots[at] != 0 && !same_run(text, length, slots[at], end)) at = (at + 1) & mask;
  return at;
}

}  // namespace

void LookupIndex::extend(std::span<const uint32_t> text) {
  const auto count = std::ssize(text);
  CHECK(count < std::numeric_limits<uint32_t>::max(), count);
  Hashes hashes;
  for (int64_t end = std::max(known_, kShortest); end < count; ++end) {
    const int64_t longest = std::min(kLongest, end);
    hash_runs(text, end, longest, hashes);
    for (int64_t length = kShortest; length <= longest; ++length)
      insert(text, length, end, hashes[static_cast<size_t>(length)]);
  }
  known_ = std::max(known_, count);
}

void LookupIndex::insert(std::span<const uint32_t> text, int64_t length, int64_t end, uint64_t hash) {
  Table& to = table(length);
  if (2 * (to.used + 1) > to.slots.size()) grow(text, length);
  uint32_t& slot = to.slots[slot_of(text, to.slots, length, end, hash)];
  if (slot == 0) ++to.used;
  slot = static_cast<uint32_t>(end);
}

void LookupIndex::grow(std::span<const uint32_t> text, int64_t length) {
  std::vector<uint32_t>& slots = table(length).slots;
  std::vector<uint32_t> larger(std::max(kFewestSlots, 2 * slots.size()), 0);
  Hashes hashes;
  for (const uint32_t end : slots) {
    if (end == 0) continue;
    hash_runs(text, end, length, hashes);
    larger[slot_of(text, larger, length, end, hashes[static_cast<size_t>(length)])] = end;
  }
  slots = std::move(larger);
}

int64_t LookupIndex::find(std::span<const uint32_t> text) const {
  const auto count = std::ssize(text);
  CHECK_EQ(count, known_);
  Hashes hashes;
  const int64_t longest = std::min(kLongest, count - 1);
  hash_runs(text, count, std::max<int64_t>(longest, 0), hashes);
  for (int64_t length = longest; length >= kShortest; --length) {
    const std::vector<uint32_t>& slots = table(length).slots;
    if (slots.empty()) continue;
    const uint32_t end = slots[slot_of(text, slots, length, count, hashes[static_cast<size_t>(length)])];
    if (end != 0) return end;
  }
  return 0;
}

}  // namespace weft::controlplane
