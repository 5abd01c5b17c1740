// Room for a waiting request that finds none: see pressure.h for who gives it up.
//
// Order: cached blocks that nobody uses count as room; the first waiting request may come in as its thin
// wish; others as urgent, or less, are thinned; less urgent ones leave. One relief is under way at a time,
// and until it has come the room is kept for the first in the queue. Who leaves is planned no more, gives
// back what it has when its rows in flight are acknowledged, and is not asked again before it has computed
// something new. With nobody waiting and room to spare, thinned sequences get their copies back, one by one.
#include <algorithm>

#include "controlplane/admission.h"
#include "controlplane/control_plane.h"
#include "controlplane/host_context.h"
#include "proto/vocab/check.h"

namespace weft::controlplane {
namespace {

// A look that found nothing costs more than most others: it is repeated after so many plans, not at every
// change.
constexpr uint64_t kLookEvery = 16;
// Copies that come back leave one part of so many of each pool free.
constexpr int64_t kMargin = 8;

}  // namespace

// True: it came in after all.
bool ControlPlane::relieve(Time now, Sequence& first) {
  if (limits_.on_pressure == OnPressure::kNone || first.host_context) return false;
  const uint64_t plan = number(memory_.last_issued());
  thicken_at_ = plan + static_cast<uint64_t>(limits_.calm_plans);
  const GroupingWish thin = thin_wish(limits_, first.wish);
  if (!(thin == fitted(first.wish, limits_.places())) &&
      (try_admit(first, thin, memory_, true, turn_) ||
       (nobody_makes_room() && try_admit(first, thin, memory_, false, turn_)))) {
    came_in(now, first);
    set_thinned(first, true);
    ++counters_.thinned;
    pending_.emplace_back(PressureNotice{first.id, PressureNotice::What::kThinned});
    return true;
  }
  if (relieving_ || running_.empty()) return false;
  if (first.id == relief_for_ && plan < relief_at_ && !in_flight_.empty()) return false;
  // Beside pins, who leaves might not find again the room that it has now.
  const std::optional<Relief> relief = find_relief(first, running_, memory_, turn_);
  if (relief && (relief->leave.empty() || !any_pinned())) {
    ask_for_room(first, *relief);
  } else {
    relief_for_ = first.id;
    relief_at_ = plan + kLookEvery;
  }
  return false;
}

void ControlPlane::ask_for_room(const Sequence& first, const Relief& relief) {
  relieving_ = {first.id, {}, {}};
  for (Sequence* sequence : relief.thin) {
    const auto price = price_placement(*sequence, memory_, thin_wish(limits_, sequence->wish),
                                       {sequence->placement.grouping.base});
    CHECK(price && price->bytes_moved == 0, "thinning takes nothing");
    accept_regroup(*sequence, memory_, *price, true);
    set_thinned(*sequence, true);
    ++counters_.thinned;
    pending_.emplace_back(PressureNotice{sequence->id, PressureNotice::What::kThinned});
    relieving_->thin.push_back(sequence->id);
  }
  for (Sequence* sequence : relief.leave) {
    sequence->leaving = true;
    relieving_->leave.push_back(sequence->id);
  }
  advance_relief();
}

// Those who can leave do; it is over when all have, and who was thinned has dropped its pages, or when nobody
// waits for it any more.
void ControlPlane::advance_relief() {
  const Sequence* first = find(relieving_->first);
  if (first == nullptr || first->running) return give_up_relief();
  bool open = false;
  for (const RequestId id : relieving_->leave) {
    Sequence* sequence = find(id);
    if (sequence == nullptr || !sequence->leaving) continue;
    if (sequence->scheduled > sequence->computed) {
      open = true;
    } else {
      preempt(*sequence);
    }
  }
  for (const RequestId id : relieving_->thin) {
    const Sequence* sequence = find(id);
    open = open || (sequence != nullptr && sequence->runnable() && (sequence->next || sequence->trim));
  }
  if (!open) relieving_.reset();
}

void ControlPlane::give_up_relief() {
  if (!relieving_) return;
  for (const RequestId id : relieving_->leave) {
    if (Sequence* sequence = find(id)) sequence->leaving = false;
  }
  relieving_.reset();
  look_again();
}

void ControlPlane::preempt(Sequence& sequence) {
  sequence.leaving = false;
  sequence.owes_progress = true;
  ++sequence.preempted;
  ++counters_.preempted;
  pending_.emplace_back(PressureNotice{sequence.id, PressureNotice::What::kPreempted});
  if (sequence.use_prefix_cache) {
    const int64_t block_tokens = limits_.geometry.block_tokens;
    extend_identities(sequence, sequence.computed / block_tokens, block_tokens);
    sequence.likely_blocks = sequence.blocks.registered;
    const int64_t prompt = sequence.prompt / block_tokens;
    memory_.chain_unused(sequence.history, sequence.hashes, std::min(prompt, sequence.hashes.size()), true);
  }
  replay(sequence);
}

void ControlPlane::set_thinned(Sequence& sequence, bool thinned) {
  thinned_now_ += (thinned ? 1 : 0) - (sequence.thinned ? 1 : 0);
  sequence.thinned = thinned;
}

void ControlPlane::look_again() {
  relief_at_ = 0;
  if (!waiting_.empty()) waiting_.front()->no_room_at = 0;
}

// Who decodes first, then who came in last.
void ControlPlane::thicken() {
  const uint64_t plan = number(memory_.last_issued());
  if (plan < thicken_at_) return;
  thicken_at_ = plan + static_cast<uint64_t>(limits_.calm_plans);
  Sequence* chosen = nullptr;
  for (Sequence* sequence : running_) {
    if (!sequence->thinned || !sequence->runnable() || sequence->next || sequence->trim ||
        sequence->suspect_until > 0)
      continue;
    if (chosen == nullptr || chosen->prefilling() || !sequence->prefilling()) chosen = sequence;
  }
  if (chosen == nullptr) return;
  const GroupingWish wish = fitted(chosen->wish, limits_.places());
  const auto price = price_placement(*chosen, memory_, wish, {chosen->placement.grouping.base});
  if (!price) return;
  bool spare = true;
  for_each_pool(limits_.rank_count, [&](kv::Stream stream, int rank) {
    const int64_t more = price->need.at(stream, rank) - chosen->reserved.at(stream, rank);
    spare =
        spare && (more <= 0 || memory_.room(stream, rank) - more >= limits_.pages(stream, rank) / kMargin);
  });
  if (!spare) return;
  if (!(price->target == chosen->placement)) accept_regroup(*chosen, memory_, *price, false);
  set_thinned(*chosen, false);
  ++counters_.thickened;
  pending_.emplace_back(PressureNotice{chosen->id, PressureNotice::What::kThickened});
}

}  // namespace weft::controlplane
