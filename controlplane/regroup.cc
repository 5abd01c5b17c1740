#include "controlplane/regroup.h"
#include "controlplane/host_context.h"

#include <algorithm>
#include <limits>
#include <optional>

namespace weft::controlplane {
namespace {

RegroupPrice price_of(const Sequence& sequence, const Memory& memory, const Placement& target) {
  const Limits& limits = memory.limits();
  RegroupPrice price;
  price.target = target;
  price.need = pages_to_take(sequence, memory, target.residency);
  memory.for_each(sequence.blocks, 0, [&](const Block& block) {
    const bool has_rows = block.index * limits.geometry.block_tokens < sequence.scheduled;
    for (int part = 0; part < memory.parts(); ++part) {
      const BlockPart& held = block.part(part);
      const RankMask wanted = memory.wanted(block, part, target.residency);
      // What is on the host alone is loaded to where it is wanted.
      if (has_rows && held.valid != 0)
        price.bytes_moved += kv::change_bytes(limits.geometry, held.stream, held.valid, wanted);
      if (!memory.shared(block)) price.pages_dropped += rank_count_of(held.holders() & ~wanted);
    }
  });
  return price;
}

// Pages left in the tightest pool that it takes from.
int64_t slack_of(const Sequence& sequence, const Memory& memory, const PageCounts& need) {
  int64_t slack = std::numeric_limits<int64_t>::max();
  for_each_pool(memory.limits().rank_count, [&](kv::Stream stream, int rank) {
    if (need.at(stream, rank) == 0) return;
    slack = std::min(slack,
                     memory.room(stream, rank) + sequence.reserved.at(stream, rank) - need.at(stream, rank));
  });
  return slack;
}

Error no_room(const Sequence& sequence, const Memory& memory, const RegroupPrice& price) {
  std::string text = placement_name(memory.limits(), price.target) + " needs more pages than are free:";
  for_each_pool(memory.limits().rank_count, [&](kv::Stream stream, int rank) {
    const int64_t need = price.need.at(stream, rank);
    const int64_t room = memory.room(stream, rank) + sequence.reserved.at(stream, rank);
    if (need <= room) return;
    text += " rank " + std::to_string(rank) + " " + kv::stream_name(stream) + " needs " +
            std::to_string(need) + ", free " + std::to_string(room) + ";";
  });
  text.pop_back();
  return error(ErrorCode::kResourceExhausted, text, "decode");
}

}  // namespace

PageCounts pages_to_take(const Sequence& sequence, const Memory& memory, const kv::Residency& residency) {
  const Limits& limits = memory.limits();
  const int64_t block_count = ceil_div(sequence.row_count(), limits.geometry.block_tokens);
  const BlockNeeds to_come(limits, residency, sequence.blocks.size(), block_count);
  PageCounts need = to_come.pages(sequence.origin);
  memory.count_missing(sequence.blocks, residency, need);
  if (sequence.host_context) count_host_context_entries(sequence, memory, residency, need);
  return need;
}

Result<RegroupPrice> price_regroup(const Sequence& sequence, const Memory& memory, const GroupingWish& wish) {
  const Limits& limits = memory.limits();
  TRY_VOID(kv::validate_decode(wish.decode, limits.places()));
  TRY_VOID(kv::validate_mechanisms(wish.mechanisms, wish.decode));
  std::vector<int> ranks = placement_choices(limits, wish.decode);
  const Placement& now = sequence.target();
  if (wish.decode.kind == kv::DecodeKind::kDp && now.grouping.width == wish.decode.width) {
    ranks = {now.grouping.base};
  }
  return price_placement(sequence, memory, wish, ranks);
}

Result<RegroupPrice> price_placement(const Sequence& sequence, const Memory& memory, const GroupingWish& wish,
                                     const std::vector<int>& bases) {
  RegroupPrice best;
  int64_t best_slack = std::numeric_limits<int64_t>::min();
  for (const int base : bases) {
    const RegroupPrice price =
        price_of(sequence, memory, placement_of(memory.limits(), wish.decode, wish.index, base));
    const int64_t slack = slack_of(sequence, memory, price.need);
    if (slack > best_slack) {
      best = price;
      best_slack = slack;
    }
  }
  if (best_slack < 0) return no_room(sequence, memory, best);
  return best;
}

namespace {

// What it takes to go on under the old placement meanwhile.
std::optional<PageCounts> need_of_both(const Sequence& sequence, const Memory& memory,
                                       const RegroupPrice& price) {
  const Limits& limits = memory.limits();
  // Pages outside its placement that an earlier change left will be dropped, in use or not.
  const bool settled =
      sequence.has_table && !sequence.needs_switch && (!sequence.trim || sequence.widening());
  if (!settled || sequence.prefilling() || price.bytes_moved <= limits.copy_plan_bytes) return {};
  PageCounts need = pages_to_take(sequence, memory, sequence.placement.residency);
  need += price.need;
  if (slack_of(sequence, memory, need) < 0) return {};
  return need;
}

void reserve_instead(Sequence& sequence, Memory& memory, const PageCounts& need) {
  memory.unreserve(sequence.reserved);
  sequence.reserved = need;
  memory.reserve(need);
}

}  // namespace

void accept_regroup(Sequence& sequence, Memory& memory, const RegroupPrice& price, bool at_once) {
  // What a context on the host has on devices moves at once.
  const bool may_spread = !at_once && memory.limits().copy_plan_bytes > 0 && !sequence.host_context;
  const auto both = may_spread ? need_of_both(sequence, memory, price) : std::nullopt;
  reserve_instead(sequence, memory, both.value_or(price.need));
  sequence.next = price.target;
  sequence.widened = 0;
  sequence.trim = true;
  if (both) {
    sequence.trim_step = StepId{0};
    return;
  }
  sequence.held_blocks = 0;
  sequence.needs_switch = true;
}

void apply_next(Sequence& sequence, Memory& memory) {
  reserve_instead(sequence, memory, pages_to_take(sequence, memory, sequence.next->residency));
  sequence.held_blocks = 0;
  sequence.needs_switch = true;
}

void trim_blocks(const Sequence& sequence, Memory& memory) {
  memory.for_each(sequence.blocks, 0, [&](const Block& block) {
    if (memory.shared(block)) return;
    for (int part = 0; part < memory.parts(); ++part) {
      const RankMask excess =
          block.part(part).holders() & ~memory.wanted(block, part, sequence.placement.residency);
      for_each_rank(excess, [&](int rank) { memory.drop(block.id, part, rank); });
    }
  });
}

}  // namespace weft::controlplane
