#include "controlplane/host_context.h"

#include <algorithm>
#include <array>

#include "controlplane/placement.h"

namespace weft::controlplane {
namespace {

constexpr auto kEntries = kv::Stream::kEntries;

// Of a stream's pages of whole blocks, dealt out over c ranks, those of a window of them on one rank at most;
// any more would not come sooner.
int64_t window_pages(const Limits& limits, const kv::Residency& residency, int64_t window) {
  const int64_t c = residency.entries.c();
  return (ceil_div(window, c) + (c > 1 ? 1 : 0)) * limits.geometry.stream(kEntries).parts;
}

}  // namespace

Result<ContextPlace> parse_context_place(const std::string& text) {
  if (text == "auto") return ContextPlace::kAuto;
  if (text == "device") return ContextPlace::kDevice;
  if (text == "host") return ContextPlace::kHost;
  return error(ErrorCode::kInvalidArgument, "'" + text + "' is neither auto, device nor host");
}

PageCounts hot_buffer_pages(const Limits& limits, const kv::Residency& residency, int origin,
                            int64_t block_count) {
  PageCounts pages = BlockNeeds(limits, residency, 0, block_count).pages(origin);
  const int64_t c = residency.entries.c();
  const int64_t most = ceil_div(ceil_div(limits.hot_tokens, c), limits.geometry.block_tokens) *
                       limits.geometry.stream(kEntries).parts;
  for_each_pool(limits.rank_count, [&](kv::Stream stream, int rank) {
    int64_t& count = pages.at(stream, rank);
    count = stream == kEntries ? std::min(count, most) : 0;
  });
  return pages;
}

PageCounts host_context_pages(const Limits& limits, const kv::Residency& residency, int origin,
                              int64_t block_count, int64_t window) {
  PageCounts pages = BlockNeeds(limits, residency, 0, block_count).pages(origin);
  const PageCounts hot = hot_buffer_pages(limits, residency, origin, block_count);
  const int64_t most = window_pages(limits, residency, window);
  for (int rank = 0; rank < limits.rank_count; ++rank) {
    int64_t& count = pages.at(kEntries, rank);
    count = std::min(count, most) + hot.at(kEntries, rank);
  }
  return pages;
}

Result<void> check_host_contexts(const Limits& limits) {
  if (limits.index_topk == 0 || limits.window_layers > 0) {
    return error(
        ErrorCode::kUnsupported,
        "every layer of a model must select what it reads (an indexer) for its context to lie on the "
        "host",
        "context");
  }
  if (limits.host_pages[0] == 0) {
    return error(ErrorCode::kFailedPrecondition, "there is no host pool (--host-pool)", "context");
  }
  return {};
}

int64_t copies_to_lock(const Sequence& sequence, const Memory& memory, bool use_hits) {
  const int64_t all = full_blocks(memory.limits(), sequence.row_count());
  const int64_t there = use_hits ? std::min(all, memory.host().match(sequence.hashes, 0)) : 0;
  return all - there + memory.host().unlocked(sequence.hashes, 0, there);
}

void enter_host(Sequence& sequence, Memory& memory) {
  memory.promise_host(full_blocks(memory.limits(), sequence.row_count()) - sequence.load_blocks);
  sequence.host_promised = full_blocks(memory.limits(), sequence.row_count()) - sequence.load_blocks;
  memory.lock_host(sequence.hashes, 0, sequence.load_blocks);  // beside the locks of those who load
  for (int64_t block = 0; block < sequence.load_blocks; ++block) {
    memory.move_to_host(memory.at(sequence.blocks, block));
    sequence.host_copies.push_back(sequence.hashes[block]);
  }
}

void count_host_context_entries(const Sequence& sequence, const Memory& memory,
                                const kv::Residency& residency, PageCounts& need) {
  const Limits& limits = memory.limits();
  const int64_t block_count = ceil_div(sequence.row_count(), limits.geometry.block_tokens);
  const PageCounts all = BlockNeeds(limits, residency, 0, block_count).pages(sequence.origin);
  const PageCounts hot = hot_buffer_pages(limits, residency, sequence.origin, block_count);
  const int64_t most = window_pages(limits, residency, sequence.host_window);
  std::array<int64_t, kMaxRanks> held{}, missing{};
  memory.for_each(sequence.blocks, sequence.host_blocks_count(), [&](const Block& block) {
    for (int part = 0; part < memory.parts(); ++part) {
      if (block.part(part).stream != kEntries) continue;
      const RankMask wanted = memory.wanted(block, part, residency), holders = block.part(part).holders();
      for_each_rank(wanted,
                    [&](int rank) { ++(holds(holders, rank) ? held : missing)[static_cast<size_t>(rank)]; });
    }
  });
  for (int rank = 0; rank < limits.rank_count; ++rank) {
    const auto at = static_cast<size_t>(rank);
    const int64_t window = std::min(all.at(kEntries, rank), most);
    const int64_t lacks_hot = hot.at(kEntries, rank) - std::ssize(sequence.hot[at]);
    need.at(kEntries, rank) = std::max(missing[at], window - held[at]) + std::max<int64_t>(0, lacks_hot);
  }
}

bool begin_host_block(Sequence& sequence, Memory& memory, const kv::BlockHash& copy) {
  if (memory.host().state(copy) != HostPool::State::kThere) return false;
  memory.lock_promised(copy);
  --sequence.host_promised;
  memory.move_to_host(memory.at(sequence.blocks, sequence.host_blocks_count()));
  sequence.host_copies.push_back(copy);
  // What it gave up is its window's again.
  PageCounts after = sequence.reserved;
  count_host_context_entries(sequence, memory, sequence.target().residency, after);
  memory.unreserve(sequence.reserved);
  memory.reserve(after);
  sequence.reserved = after;
  return true;
}

void leave_host(Sequence& sequence, Memory& memory) {
  memory.unlock_host(sequence.host_copies);
  memory.unpromise_host(std::exchange(sequence.host_promised, 0));
  memory.drop_hot(sequence.hot, all_ranks(kMaxRanks));
  sequence.host_copies.clear();
  sequence.sinking = 0;
}

void extend_identities(Sequence& sequence, int64_t blocks, int64_t block_tokens) {
  while (sequence.hashes.size() < blocks) {
    const int64_t index = sequence.hashes.size();
    std::vector<uint32_t> tokens;
    sequence.tokens.read(index * block_tokens, block_tokens, tokens);
    sequence.hashes.push_back(
        kv::block_hash(index == 0 ? sequence.root : sequence.hashes[index - 1], tokens));
  }
}

namespace {

kv::BlockHash own_name(const Sequence& sequence, int64_t block) {
  const uint64_t id = number(sequence.id);
  const std::array<uint32_t, 2> own{static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32)};
  return kv::block_hash(sequence.hashes[block], own);
}

}  // namespace

kv::BlockHash host_copy_before(const Sequence& sequence, const Memory& memory, int64_t block) {
  if (block == 0) return {};
  if (block <= sequence.host_blocks_count()) return sequence.host_copies[static_cast<size_t>(block - 1)];
  const kv::BlockHash own = own_name(sequence, block - 1);  // on its way
  return memory.host().state(own) == HostPool::State::kNone ? sequence.hashes[block - 1] : own;
}

kv::BlockHash host_copy_name(const Sequence& sequence, const Memory& memory, int64_t block) {
  const auto leaves = [&](const kv::BlockHash& copy) {
    return memory.host().state(copy) == HostPool::State::kLeaving;
  };
  const kv::BlockHash& identity = sequence.hashes[block];
  const kv::BlockHash before = host_copy_before(sequence, memory, block);
  const bool known = block == 0 || (before == sequence.hashes[block - 1] && !leaves(before));
  return known && !leaves(identity) ? identity : own_name(sequence, block);
}

}  // namespace weft::controlplane
