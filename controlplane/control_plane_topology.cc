// Workers that come and go: see topology_change.h.
#include <algorithm>
#include <set>
#include <utility>

#include "controlplane/admission.h"
#include "controlplane/control_plane.h"
#include "proto/vocab/check.h"

namespace weft::controlplane {
namespace {

using Stage = TopologyChange::Stage;

Error refused(const std::string& why) { return error(ErrorCode::kFailedPrecondition, why, "rank"); }

Error about(RequestId request, const std::string& what, Error why) {
  why.message = "request " + std::to_string(number(request)) + " " + what + ": " + why.message;
  why.field = "rank";
  return why;
}

// Blocks by what `wanted` says of them; memory must not change meanwhile.
template <typename F>
std::vector<BlockId> blocks_where(const Memory& memory, F wanted) {
  std::vector<BlockId> found;
  memory.for_each_block([&](const Block& block) {
    if (std::any_of(block.parts.begin(), block.parts.end(), wanted)) found.push_back(block.id);
  });
  return found;
}

}  // namespace

Result<kv::Topology> ControlPlane::topology_with(const TopologyRequested& event) const {
  const kv::Topology now = limits_.active();
  const std::string rank = "rank " + std::to_string(event.rank);
  if (change_) return refused("another change of workers is under way");
  if (event.rank < 0 || event.rank >= limits_.rank_count) {
    return error(ErrorCode::kNotFound, "no " + rank + ": there are " + std::to_string(limits_.rank_count),
                 "rank");
  }
  if (event.joins == now.contains(event.rank)) {
    return refused(rank + (event.joins ? " takes part already" : " takes no part already"));
  }
  if (!event.joins && now.count() == 1) return refused(rank + " is the last one that computes");
  return kv::Topology(now.ranks() ^ mask_of(event.rank));
}

void ControlPlane::on(Time now, const TopologyRequested& event, Notices& notices) {
  if (event.gone) {
    drop_plans(now, error(ErrorCode::kUnavailable, "rank " + std::to_string(event.rank) + " was lost"),
               notices);
  }
  const Result<kv::Topology> after = topology_with(event);
  if (!after) {
    notices.emplace_back(TopologyNotice{event.command, limits_.active().ranks(), 0, 0, 0, 0, after.error()});
    return;
  }
  give_up_relief();
  change_.emplace();
  change_->command = event.command;
  change_->before = limits_.active();
  change_->after = *after;
  change_->movers = event.gone ? *after : change_->before;
}

void ControlPlane::set_topology(const kv::Topology& topology) {
  limits_.topology = topology;
  memory_.topology_changed();
}

// As far as it goes now: after the last plan in flight, and after each that moved something.
void ControlPlane::advance_change(Time now, Notices& notices) {
  if (!change_ || !in_flight_.empty() || change_->plan) return;
  Result<void> going;
  if (change_->stage == Stage::kQuiet) {
    change_->stage = Stage::kMoving;
    set_topology(change_->after);
    going = begin_moving();
  }
  if (going) going = plan_moves();
  if (!going) {
    undo_moves();
    return end_change(now, going.error(), notices);
  }
  if (change_->plan) return;
  commit_change();
  end_change(now, error(ErrorCode::kOk, ""), notices);
}

void ControlPlane::end_change(Time now, Error failure, Notices& notices) {
  const TopologyChange done = std::move(*change_);
  change_.reset();
  TopologyNotice notice;
  notice.command = done.command;
  notice.ranks = limits_.active().ranks();
  notice.error = std::move(failure);
  if (notice.error.code == ErrorCode::kOk) {
    ++counters_.topology_changes;
    notice.bytes_moved = done.bytes_moved;
    notice.sequences_moved = done.sequences_moved;
    notice.blocks_moved = done.blocks_moved;
    notice.blocks_dropped = done.blocks_dropped;
  }
  notices.emplace_back(std::move(notice));
  for (const auto& event : done.deferred) {
    std::visit([&](const auto& e) { on(now, e, notices); }, event);
  }
}

// ---- a place and room for everybody ---------------------------------------------------------------------

// Under both topologies, while one may become the other.
Result<void> ControlPlane::check_fits(int64_t prompt, int64_t max_tokens, const GroupingWish& wish,
                                      int64_t window) const {
  TRY_VOID(check_fits_alone(limits_, prompt, max_tokens, wish, window));
  if (!change_) return {};
  Limits other = limits_;
  for (const kv::Topology& topology : {change_->before, change_->after}) {
    other.topology = topology;
    TRY_VOID(check_fits_alone(other, prompt, max_tokens, fitted(wish, topology.count()), window));
  }
  return {};
}

// For every running sequence, and for every waiting one if it were alone.
Result<void> ControlPlane::begin_moving() {
  for (const Sequence* sequence : waiting_) {
    const auto fits = check_fits_alone(limits_, sequence->prompt, sequence->max_tokens,
                                       fitted(sequence->wish, limits_.places()), sequence->host_window);
    if (!fits) return about(sequence->id, "waits, and would not fit", fits.error());
    if (!sequence->again || !any_pinned()) continue;  // who ran before must find room beside pins, too
    const auto beside = check_fits_alone(beside_pins(), sequence->prompt, sequence->max_tokens,
                                         fitted(sequence->wish, limits_.places()), sequence->host_window);
    if (!beside)
      return about(sequence->id, "waits to come in again, and would not fit beside pins", beside.error());
  }
  memory_.for_each_block([&](const Block& block) {
    if (!memory_.used(block)) return;
    TopologyChange::Held held{block.id, block.serial, {}};
    for (const BlockPart& part : block.parts) held.holders.push_back(part.holders());
    change_->held.push_back(std::move(held));
  });
  for (Sequence* sequence : running_) {
    const GroupingWish wish = wish_in_force(limits_, *sequence);
    const Result<RegroupPrice> price =
        price_placement(*sequence, memory_, wish, bases_after(*sequence, wish));
    if (!price) return about(sequence->id, "cannot move", price.error());
    if (sequence->next) sequence->needs_switch = true;  // one change at a time: at once, if this one fails
    change_->sequences.push_back(
        {sequence->id, sequence->next, sequence->needs_switch, sequence->trim, price->bytes_moved == 0});
    accept_regroup(*sequence, memory_, *price, true);
  }
  find_strays();
  return {};
}

// What pins leave of the pools, at least: what lies on a rank that leaves may come to any other.
Limits ControlPlane::beside_pins() const {
  Limits left = limits_;
  const RankMask stay = change_->after.ranks();
  std::set<BlockId> pinned;
  for (const auto& [number, pin] : pins_) {
    memory_.cache().for_each_run(pin.tail, [&](const Run& run, int64_t first, int64_t end) {
      for (int64_t index = first; index < end; ++index)
        pinned.insert(run.blocks[static_cast<size_t>(index - run.first_index)]);
    });
  }
  const auto take = [](int64_t& pages) { pages = std::max<int64_t>(0, pages - 1); };
  for (const BlockId id : pinned) {
    for (const BlockPart& part : memory_.block(id).parts) {
      const RankMask ranks = part.holders() | ((part.valid & stay) == 0 ? stay : RankMask{0});
      for_each_rank(ranks, [&](int rank) {
        take(left.pool_pages[static_cast<size_t>(rank)][static_cast<size_t>(part.stream)]);
      });
    }
  }
  for (const kv::Stream stream : kv::kAllStreams) {
    int64_t& pages = left.host_pages[static_cast<size_t>(stream)];
    pages = std::max<int64_t>(0, pages - pinned_host_blocks() * left.geometry.stream(stream).used_parts());
  }
  return left;
}

// A sequence of one rank stays there if it can.
std::vector<int> ControlPlane::bases_after(const Sequence& sequence, const GroupingWish& wish) const {
  std::vector<int> bases = placement_choices(limits_, wish.decode);
  const kv::Grouping& now = sequence.target().grouping;
  if (wish.decode.kind != kv::DecodeKind::kDp || wish.decode.width > 1 || now.width > 1) return bases;
  const int rank = change_->before.rank(now.base);
  if (change_->after.contains(rank)) bases = {change_->after.place(rank)};
  return bases;
}

void ControlPlane::find_strays() {
  const RankMask stay = change_->after.ranks();
  for (const BlockId id :
       blocks_where(memory_, [&](const BlockPart& part) { return (part.valid & stay) == 0; })) {
    const Block& block = memory_.block(id);
    // Who uses a forgotten one takes its bytes along.
    if (block.run == kNoRun || memory_.forgotten(id)) continue;
    change_->strays.push_back({id, block.serial, block.index});
  }
  // Beginnings first: without them nothing behind is found.
  std::sort(change_->strays.begin(), change_->strays.end(), [](const auto& a, const auto& b) {
    return std::pair(a.index, a.serial) < std::pair(b.index, b.serial);
  });
}

// ---- moving ---------------------------------------------------------------------------------------------

// The next plan that copies: sequences first, whose room is reserved; then, of the prefix cache, what finds
// some. None: everything has moved.
Result<void> ControlPlane::plan_moves() {
  PlanBuilder builder(memory_, tables_, StepId{number(memory_.last_issued()) + 1}, 0);
  bool full = false;
  for (TopologyChange::Before& one : change_->sequences) {
    Sequence* sequence = find(one.request);
    if (sequence == nullptr || one.staged || full) continue;
    full = !builder.add_move(*sequence);
    one.staged = !full;
    change_->sequences_moved += one.staged ? 1 : 0;
  }
  for (size_t& at = change_->strays_done; at < change_->strays.size() && !full; ++at) {
    Block* block = memory_.find_block(change_->strays[at].block, change_->strays[at].serial);
    if (block == nullptr || block->run == kNoRun) continue;
    const int first = kv::residue_class(block->index, change_->after.count()) + block->origin;
    const PlanBuilder::Stray stray = builder.add_stray(*block, change_->after, first);
    full = stray == PlanBuilder::Stray::kPlanFull;
    if (full) break;
    change_->blocks_moved += stray == PlanBuilder::Stray::kMoved ? 1 : 0;
    if (stray == PlanBuilder::Stray::kNoRoom && memory_.used(*block)) {
      undo(builder.record());  // its copies will not happen
      return error(ErrorCode::kResourceExhausted, "no free page for a pinned block of the prefix cache",
                   "rank");
    }
  }
  builder.add_spills();  // some may have to be made before there is room
  if (builder.empty()) {
    CHECK(!full, "with nothing in flight, what was reserved is there");
    return {};
  }
  change_->bytes_moved += builder.copied_bytes();
  change_->plan = issue(builder);
  return {};
}

// Nothing is in flight, and whoever is used has valid pages wherever the new topology reads it.
void ControlPlane::commit_change() {
  const RankMask leaving = change_->before.ranks() & ~change_->after.ranks();
  for (Sequence* sequence : running_) {
    sequence->placement = sequence->target();
    sequence->next.reset();
    sequence->needs_switch = true;  // the next plan writes a new table
    sequence->trim = false;
    trim_blocks(*sequence, memory_);
    memory_.drop_hot(sequence->hot, leaving);
    for_each_rank(leaving, [&](int rank) {
      for (const kv::Stream stream : kv::kAllStreams) CHECK_EQ(sequence->reserved.at(stream, rank), 0);
    });
  }
  const int64_t registered = memory_.cache().registered();
  for (const BlockId id :
       blocks_where(memory_, [&](const BlockPart& part) { return (part.holders() & leaving) != 0; })) {
    drop_from(id, leaving);
  }
  change_->blocks_dropped = registered - memory_.cache().registered();
  turn_ %= limits_.places();
  for (Sequence* sequence : waiting_) sequence->no_room_at = 0;
}

// A block that is left without a part goes, with all that hangs below it.
void ControlPlane::drop_from(BlockId id, RankMask ranks) {
  if (!memory_.exists(id)) return;  // hung below one that went
  const Block& block = memory_.block(id);
  // Who runs may have pages there that hold nothing yet: of rows to come, or of what is on the host.
  const bool lost = std::any_of(block.parts.begin(), block.parts.end(), [&](const BlockPart& part) {
    return part.valid != 0 && (part.valid & ~ranks) == 0;
  });
  if (lost && !memory_.used(block)) return memory_.forget(id);
  CHECK(!lost || block.run == kNoRun || memory_.forgotten(id), "a block in use was left behind");
  for (int part = 0; part < memory_.parts(); ++part) {
    for_each_rank(memory_.block(id).part(part).holders() & ranks,
                  [&](int rank) { memory_.drop(id, part, rank); });
  }
}

// ---- back -----------------------------------------------------------------------------------------------

// The old topology is in force again, and pages that were taken for the new one are given back. Nothing is in
// flight.
void ControlPlane::undo_moves() {
  set_topology(change_->before);
  for (const TopologyChange::Before& one : change_->sequences) {
    Sequence* sequence = find(one.request);
    if (sequence == nullptr) continue;
    sequence->next = one.next;
    sequence->held_blocks = 0;
    sequence->needs_switch = one.needs_switch;
    sequence->trim = one.trim;
  }
  drop_moved();
  for (const TopologyChange::Before& one : change_->sequences) {
    Sequence* sequence = find(one.request);
    if (sequence == nullptr) continue;
    memory_.unreserve(sequence->reserved);
    sequence->reserved = pages_to_take(*sequence, memory_, sequence->target().residency);
    memory_.reserve(sequence->reserved);
  }
}

// Pages that blocks in use had not, and whatever came to a rank that was to join. Copies of blocks that
// nobody uses can be evicted.
void ControlPlane::drop_moved() {
  for (const TopologyChange::Held& one : change_->held) {
    const Block* block = memory_.find_block(one.block, one.serial);
    if (block == nullptr || !memory_.used(*block)) continue;
    for (int part = 0; part < memory_.parts(); ++part) {
      const RankMask held = one.holders[static_cast<size_t>(part)];
      for_each_rank(block->part(part).holders() & ~held,
                    [&](int rank) { memory_.drop(one.block, part, rank); });
    }
  }
  const RankMask joining = change_->after.ranks() & ~change_->before.ranks();
  for (const BlockId id :
       blocks_where(memory_, [&](const BlockPart& part) { return (part.holders() & joining) != 0; })) {
    drop_from(id, joining);
  }
}

}  // namespace weft::controlplane
