#include "controlplane/admission.h"

#include <algorithm>
#include <limits>
#include <string>

#include "controlplane/host_context.h"
#include "proto/vocab/check.h"

namespace weft::controlplane {
namespace {

struct Choice {
  Placement placement;
  int origin = 0;
  PageCounts need;
  // Pages left in the tightest pool it uses; < 0: no room.
  int64_t slack = std::numeric_limits<int64_t>::min();
};

// The placement (rank of a dp wish) and origin that leave the tightest pool the most room. `hits` fix the
// origin and need pages only where they are not resident. `window`: of a context that lies on the host.
Choice choose(const Limits& limits, const GroupingWish& wish, const Memory* memory, const BlockPath& hits,
              int64_t block_count, const PageCounts& room, int turn, int64_t window) {
  Choice best;
  for (const int dp_rank : placement_choices(limits, wish.decode)) {
    const Placement placement = placement_of(limits, wish.decode, wish.index, dp_rank);
    PageCounts widening;
    const bool hit = hits.size() > 0;
    if (hit) memory->count_missing(hits, placement.residency, widening);
    const BlockNeeds needs(limits, placement.residency, hits.size(), block_count);
    for (int i = 0; i < limits.places(); ++i) {
      const int origin = hit ? memory->block(hits.tail).origin : (turn + i) % limits.places();
      Choice choice{placement, origin, needs.pages(origin), 0};
      if (window > 0)
        choice.need = host_context_pages(limits, placement.residency, origin, block_count, window);
      choice.need += widening;
      choice.slack = slack_of(room, choice.need, limits.rank_count);
      if (choice.slack > best.slack) best = choice;
      if (hit) break;
    }
  }
  return best;
}

Error too_large(const Limits& limits, const Choice& choice, const PageCounts& pools, int64_t prompt,
                int64_t max_tokens, const char* field) {
  std::string text =
      "prompt and answer of " + std::to_string(prompt) + " + " + std::to_string(max_tokens) + " tokens ";
  for (const kv::Stream stream : kv::kAllStreams) {
    for (int rank = 0; rank < limits.rank_count; ++rank) {
      if (choice.need.at(stream, rank) <= pools.at(stream, rank)) continue;
      return error(ErrorCode::kTooLarge,
                   text + "need " + std::to_string(choice.need.at(stream, rank)) + " pages of " +
                       kv::stream_name(stream) + " on rank " + std::to_string(rank) + " under " +
                       placement_name(limits, choice.placement) + "; its pool has " +
                       std::to_string(pools.at(stream, rank)) + ", for " +
                       std::to_string(pools.at(stream, rank) * limits.geometry.block_tokens) + " tokens",
                   field);
    }
  }
  return error(ErrorCode::kTooLarge, text + "do not fit the pools", field);
}

}  // namespace

Result<void> check_shape(const Limits& limits, int64_t prompt, int64_t max_tokens, const GroupingWish& wish) {
  TRY_VOID(kv::validate_decode(wish.decode, limits.places()));
  TRY_VOID(kv::validate_mechanisms(wish.mechanisms, wish.decode));
  // Subtracted, not added: max_tokens may be absurd.
  if (prompt >= limits.max_context || max_tokens > limits.max_context - prompt) {
    return error(ErrorCode::kTooLarge,
                 "prompt of " + std::to_string(prompt) + " tokens and max_tokens " +
                     std::to_string(max_tokens) + " exceed the context of " +
                     std::to_string(limits.max_context) + " tokens",
                 prompt >= limits.max_context ? "prompt" : "max_tokens");
  }
  return {};
}

Result<void> check_fits_alone(const Limits& limits, int64_t prompt, int64_t max_tokens,
                              const GroupingWish& wish, int64_t window) {
  TRY_VOID(check_shape(limits, prompt, max_tokens, wish));
  const int64_t copies = full_blocks(limits, prompt + max_tokens - 1), most = limits.host_copies();
  if (window > 0 && copies > most) {
    return error(ErrorCode::kTooLarge,
                 "prompt and answer of " + std::to_string(prompt) + " + " + std::to_string(max_tokens) +
                     " tokens need " + std::to_string(copies) + " blocks of the host pool, which has " +
                     std::to_string(most) + ", for " + std::to_string(most * limits.geometry.block_tokens) +
                     " tokens",
                 full_blocks(limits, prompt) > most ? "prompt" : "max_tokens");
  }
  PageCounts pools;
  for_each_pool(limits.rank_count,
                [&](kv::Stream stream, int rank) { pools.at(stream, rank) = limits.pages(stream, rank); });
  const auto best_for = [&](int64_t rows) {
    return choose(limits, wish, nullptr, {}, ceil_div(rows, limits.geometry.block_tokens), pools, 0, window);
  };
  const Choice whole = best_for(prompt + max_tokens - 1);
  if (whole.slack >= 0) return {};
  return too_large(limits, whole, pools, prompt, max_tokens,
                   best_for(prompt).slack < 0 ? "prompt" : "max_tokens");
}

int64_t slack_of(const PageCounts& room, const PageCounts& need, int rank_count) {
  int64_t slack = std::numeric_limits<int64_t>::max();
  for_each_pool(rank_count, [&](kv::Stream stream, int rank) {
    // A pool it takes nothing from can still be short: the hits may lie there on pages that others counted
    // on.
    const int64_t left = room.at(stream, rank) - need.at(stream, rank);
    if (need.at(stream, rank) > 0 || left < 0) slack = std::min(slack, left);
  });
  return slack;
}

Entry entry_of(const Sequence& sequence, const GroupingWish& wish, const Memory& memory, bool use_hits,
               int turn, const PageCounts& more) {
  const Limits& limits = memory.limits();
  Entry entry;
  if (use_hits && sequence.use_prefix_cache && !sequence.host_context) {
    const PrefixCache::Match found = memory.cache().find(sequence.hashes, sequence.likely_blocks);
    entry.hits.tail = found.tail;
    entry.hits.registered = found.blocks;
  }
  // Room once the hits are in use: their pages can no longer be evicted.
  entry.room = more;
  for_each_pool(limits.rank_count, [&](kv::Stream stream, int rank) {
    entry.room.at(stream, rank) += memory.room(stream, rank);
  });
  if (entry.hits.size() > 0) entry.room -= memory.cache().unused_pages(entry.hits.tail);
  const int64_t block_count = ceil_div(sequence.row_count(), limits.geometry.block_tokens);
  const Choice choice =
      choose(limits, wish, &memory, entry.hits, block_count, entry.room, turn, sequence.host_window);
  entry.placement = choice.placement;
  entry.origin = choice.origin;
  entry.need = choice.need;
  entry.slack = choice.slack;
  if (sequence.host_context)
    entry.slack = std::min(entry.slack, memory.host().room() - copies_to_lock(sequence, memory, use_hits));
  return entry;
}

bool try_admit(Sequence& sequence, const GroupingWish& wish, Memory& memory, bool use_hits, int turn) {
  const Entry entry = entry_of(sequence, wish, memory, use_hits, turn);
  if (entry.slack < 0) return false;
  const BlockPath& hits = entry.hits;

  memory.use({hits.tail, hits.registered}, sequence.blocks);
  const bool looks = use_hits && sequence.use_prefix_cache;
  sequence.load_first = hits.registered;
  sequence.load_blocks = looks ? memory.host().match(sequence.hashes, hits.registered) : 0;
  sequence.load_blocks = memory.host().lockable(sequence.hashes, sequence.load_first, sequence.load_blocks);
  memory.lock_host(sequence.hashes, sequence.load_first, sequence.load_blocks);
  for (int64_t i = 0; i < sequence.load_blocks; ++i) memory.extend(sequence.blocks, entry.origin);
  if (sequence.host_context) enter_host(sequence, memory);
  memory.reserve(entry.need);
  sequence.reserved = entry.need;
  sequence.placement = entry.placement;
  sequence.origin = entry.origin;
  sequence.hit_blocks = sequence.blocks.size();
  sequence.trusted_blocks =
      sequence.again ? std::min(sequence.trusted_blocks, sequence.hit_blocks) : sequence.hit_blocks;
  sequence.cached = sequence.hit_blocks * memory.limits().geometry.block_tokens;
  // Something must produce the first token: on a full hit the last row runs again.
  sequence.repeat_last_row = sequence.answered() == 0 && sequence.cached == sequence.prompt;
  if (sequence.repeat_last_row) --sequence.cached;
  sequence.computed = sequence.scheduled = sequence.cached;
  sequence.running = true;
  return true;
}

}  // namespace weft::controlplane
