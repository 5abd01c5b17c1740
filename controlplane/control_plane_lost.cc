// Memory that is lost with a device: what lay there alone is computed again.
//
// Blocks keep what lies on other ranks. One that is left without a part leaves the prefix cache, with all
// that hangs below it. A sequence that used one gives back what it has and comes in again, before all that
// came later: it finds its beginning in the prefix cache and computes the rest from tokens that are known,
// its own among them, without drawing any of them a second time. All others go on, with copies where a reader
// lost its page.
#include <algorithm>
#include <utility>

#include "controlplane/control_plane.h"
#include "controlplane/host_context.h"
#include "proto/vocab/check.h"

namespace weft::controlplane {

// Those in flight will not be run: nothing is counted on that they were to do. A change of workers that was
// under way ends, back at ranks whose pages are all there.
void ControlPlane::drop_plans(Time now, Error why, Notices& notices) {
  withdraw();
  give_up_relief();
  if (change_ && change_->stage == TopologyChange::Stage::kMoving) {
    change_->plan.reset();
    undo_moves();  // which restores who needs a new table, before all do
  }
  for (Sequence* sequence : running_) unschedule(*sequence);
  if (change_) end_change(now, std::move(why), notices);
}

void ControlPlane::on(Time now, const MemoryLost& event, Notices& notices) {
  CHECK(event.rank >= 0 && event.rank < limits_.rank_count, event.rank);
  drop_plans(now,
             error(ErrorCode::kUnavailable, "memory of rank " + std::to_string(event.rank) + " was lost"),
             notices);

  std::vector<BlockId> lost;  // ascending
  std::vector<BlockId> touched;
  memory_.for_each_block([&](const Block& block) {
    if (std::any_of(block.parts.begin(), block.parts.end(),
                    [&](const BlockPart& part) { return holds(part.holders(), event.rank); }))
      touched.push_back(block.id);
  });
  for (const BlockId id : touched) {
    Block& block = memory_.block(id);
    bool whole = true;
    for (int part = 0; part < memory_.parts(); ++part) {
      memory_.set_valid(block, part, event.rank, false);
      whole = whole && (block.part(part).valid != 0 || memory_.only_on_host(block, part));
    }
    if (!whole) lost.push_back(id);
  }
  counters_.lost_blocks += std::ssize(lost);
  std::vector<Sequence*> affected;
  for (Sequence* sequence : running_) {
    bool uses = false;
    memory_.for_each(sequence->blocks, 0, [&](const Block& block) {
      if (block.index * limits_.geometry.block_tokens >= sequence->computed)
        return;  // nothing was written yet
      uses = uses || std::binary_search(lost.begin(), lost.end(), block.id);
    });
    if (uses) affected.push_back(sequence);
  }
  for (const BlockId id : lost) {
    if (memory_.exists(id) && memory_.block(id).run != kNoRun) memory_.forget(id);
  }
  shorten_pins();
  for (const BlockId id : touched) {
    if (memory_.exists(id) && !memory_.used(memory_.block(id))) memory_.drop_invalid(id);
  }
  for (Sequence* sequence : affected) {
    memory_.chain_unused({});  // it has not ended
    replay(*sequence);
  }
}

// A pin ends where its context can no longer be found: it keeps no room for what is gone.
void ControlPlane::shorten_pins() {
  for (auto& [number, pin] : pins_) {
    const auto found = [&](const kv::BlockHash& copy) {
      return memory_.host().state(copy) == HostPool::State::kThere;
    };
    const auto lost = std::find_if_not(pin.host.begin(), pin.host.end(), found);
    memory_.unlock_host(std::vector(lost, pin.host.end()));
    pin.host.erase(lost, pin.host.end());
    BlockId tail = kNoBlock;
    int64_t blocks = 0;
    memory_.cache().for_each_run(pin.tail, [&](const Run& run, int64_t, int64_t end) {
      if (run.forgotten || tail != kNoBlock) return;
      tail = run.blocks[static_cast<size_t>(end - 1 - run.first_index)];
      blocks = end;
    });
    if (tail == pin.tail) continue;
    if (tail != kNoBlock) memory_.pin(tail);
    memory_.unpin(pin.tail);
    pin.tail = tail;
    pin.blocks = blocks;
  }
}

// Its rows in plans that will not be run.
void ControlPlane::unschedule(Sequence& sequence) {
  sequence.scheduled = sequence.computed;
  sequence.samples_scheduled = sequence.answered();
  sequence.trim_step = StepId{0};
  // Copies it relied on may not have happened, and pages it read may be gone: the next plan looks at every
  // block.
  sequence.needs_switch = true;
}

// It gives back what it has and waits to come in again. Nothing of it is in flight.
void ControlPlane::replay(Sequence& sequence) {
  unlock_host(sequence);
  leave_host(sequence, memory_);
  memory_.release(sequence.blocks);
  memory_.unreserve(sequence.reserved);
  sequence.reserved = {};
  if (sequence.has_table) tables_.give_back(sequence.table, memory_.last_issued());
  sequence.has_table = false;
  sequence.next.reset();
  sequence.widened = 0;
  sequence.needs_switch = true;
  sequence.trim = false;
  set_thinned(sequence, false);
  sequence.registers = true;
  sequence.hit_blocks = sequence.held_blocks = 0;
  // The row of the last token that is known draws the next one.
  sequence.replay =
      sequence.answered() > 0 ? sequence.tokens.size() - 1 : std::max(sequence.replay, sequence.computed);
  sequence.again = true;
  sequence.computed = sequence.scheduled = sequence.cached = 0;
  sequence.running = false;
  sequence.no_room_at = 0;
  std::erase(running_, &sequence);
  if (sequence.suspect_until > 0) {
    sequence.suspect_until = 0;
    std::erase(suspects_, sequence.id);
  }
  enqueue(sequence);
}

}  // namespace weft::controlplane
