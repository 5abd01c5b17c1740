// What the control plane tells about itself, and checks.
#include "controlplane/control_plane.h"

#include <algorithm>
#include <unordered_set>

#include "controlplane/admission.h"
#include "proto/vocab/check.h"

namespace weft::controlplane {

Sequence* ControlPlane::find(RequestId id) {
  const auto found = sequences_.find(id);
  return found == sequences_.end() ? nullptr : found->second.get();
}

std::optional<RequestSnapshot> ControlPlane::request(RequestId id) const {
  const Sequence* sequence = find(id);
  if (sequence == nullptr) return std::nullopt;
  RequestSnapshot snapshot;
  snapshot.request = id;
  snapshot.state = !sequence->running                      ? RequestState::kWaiting
                   : sequence->computed < sequence->prompt ? RequestState::kPrefill
                                                           : RequestState::kDecode;
  snapshot.paused = sequence->paused;
  snapshot.prompt_tokens = sequence->prompt;
  snapshot.cached_tokens = std::min(sequence->cached, sequence->prompt);
  snapshot.computed_tokens = sequence->computed;
  snapshot.completion_tokens = sequence->answered();
  snapshot.max_tokens = sequence->max_tokens;
  snapshot.drafted_tokens = sequence->drafted;
  snapshot.accepted_tokens = sequence->accepted;
  snapshot.wish = sequence->wish;
  snapshot.placement = sequence->target();
  snapshot.origin = sequence->origin;
  snapshot.host_context = sequence->host_context;
  snapshot.host_window = sequence->host_window;
  snapshot.host_blocks = sequence->host_blocks_count();
  snapshot.change_waits = sequence->next.has_value();
  snapshot.thinned = sequence->thinned;
  snapshot.preempted = sequence->preempted;
  snapshot.switching = sequence->next.has_value() || sequence->trim;
  snapshot.arrived = sequence->arrived;
  snapshot.admitted = sequence->admitted;
  snapshot.stored_bytes = stored_bytes(*sequence);
  return snapshot;
}

kv::StoredBytes ControlPlane::stored_bytes(const Sequence& sequence) const {
  PageCounts pages = memory_.pages(sequence.blocks);
  memory_.for_each(
      sequence.blocks, ceil_div(sequence.scheduled, limits_.geometry.block_tokens),
      [&](const Block& block) {  // not written yet
        block.for_each_page([&](kv::Stream stream, int rank, PageId) { --pages.at(stream, rank); });
      });
  kv::StoredBytes bytes{};
  for_each_pool(limits_.rank_count, [&](kv::Stream stream, int rank) {
    bytes[static_cast<size_t>(stream)][static_cast<size_t>(rank)] =
        pages.at(stream, rank) * limits_.geometry.page_bytes(stream);
  });
  return bytes;
}

Result<RegroupPrice> ControlPlane::price(RequestId id, const GroupingWish& wish) const {
  const Sequence* sequence = find(id);
  if (sequence == nullptr) return error(ErrorCode::kNotFound, "no such request is running", "request");
  if (!sequence->running)
    return error(ErrorCode::kFailedPrecondition, "the request is still waiting", "request");
  return price_regroup(*sequence, memory_, wish);
}

std::optional<Time> ControlPlane::next_deadline() const {
  if (!pending_.empty()) return Time{};
  if (deadlines_.empty()) return std::nullopt;
  return deadlines_.begin()->first;
}

std::vector<PinSnapshot> ControlPlane::pins() const {
  std::vector<PinSnapshot> out;
  for (const auto& [number, pin] : pins_)
    out.push_back({number, pin.request, pin.blocks, std::ssize(pin.host), pin.since});
  return out;
}

int64_t ControlPlane::pinned_blocks() const {
  std::map<RunId, int64_t> runs;
  for (const auto& [number, pin] : pins_) {
    memory_.cache().for_each_run(pin.tail, [&](const Run& run, int64_t first, int64_t end) {
      runs[run.id] = std::max(runs[run.id], end - first);
    });
  }
  int64_t blocks = 0;
  for (const auto& [run, count] : runs) blocks += count;
  return blocks;
}

int64_t ControlPlane::pinned_host_blocks() const {
  std::unordered_set<kv::BlockHash, kv::BlockHashHasher> hashes;
  for (const auto& [number, pin] : pins_) hashes.insert(pin.host.begin(), pin.host.end());
  return std::ssize(hashes);
}

std::optional<ContextTail> ControlPlane::context(RequestId id) const {
  const Context* context = contexts_.look(id);
  if (context == nullptr) return std::nullopt;
  ContextTail tail;
  tail.tokens = context->tokens.size();
  tail.blocks = context->hashes.size();
  tail.root = context->root;
  tail.last = tail.blocks == 0 ? context->root : context->hashes[tail.blocks - 1];
  const int64_t hashed = tail.blocks * limits_.geometry.block_tokens;
  context->tokens.read(hashed, tail.tokens - hashed, tail.rest);
  return tail;
}

Counters ControlPlane::counters() const {
  Counters counters = counters_;
  counters.evicted_blocks = memory_.evicted_blocks();
  for (const Sequence* sequence : running_) counters.host_contexts += sequence->host_context ? 1 : 0;
  counters.thinned_now = thinned_now_;
  return counters;
}

void ControlPlane::check_invariants() const {
  memory_.check_invariants();
  tables_.check_invariants();
  contexts_.check_invariants();
  CHECK_EQ(sequences_.size(), running_.size() + waiting_.size());
  CHECK_LE(running_count(), limits_.max_running);
  const auto again =
      std::count_if(waiting_.begin(), waiting_.end(), [](const Sequence* s) { return s->again; });
  CHECK_LE(waiting_count() - again, limits_.max_waiting);  // who ran before is not turned away
  CHECK_LE(static_cast<int>(in_flight_.size()), limits_.plans_in_flight);
  PageCounts reserved;
  int64_t tables = 0, thinned = 0;
  std::vector<BlockId> locks;
  int64_t own_blocks = 0, promised = 0;
  for (const Sequence* sequence : running_) {
    const Sequence& s = *sequence;
    reserved += s.reserved;
    tables += s.has_table ? 1 : 0;
    locks.push_back(s.blocks.tail);
    own_blocks += std::ssize(s.blocks.own);
    CHECK(s.running && s.cached <= s.computed && s.computed <= s.scheduled && s.scheduled <= s.row_count());
    CHECK(s.answered() <= s.samples_scheduled && s.samples_scheduled <= s.max_tokens);
    CHECK_LE(s.scheduled, s.blocks.size() * limits_.geometry.block_tokens);
    int64_t index = 0;
    memory_.for_each(s.blocks, 0, [&](const Block& block) {
      CHECK(memory_.used(block) && block.index == index && block.origin == s.origin);
      CHECK_EQ(block.run != kNoRun, index < s.blocks.registered);
      CHECK_EQ(block.on_host, index < s.host_blocks_count());
      ++index;
    });
    CHECK_EQ(index, s.blocks.size());
    CHECK_EQ(s.suspect_until > 0, std::find(suspects_.begin(), suspects_.end(), s.id) != suspects_.end());
    promised += s.host_promised;
    int64_t sinking = 0;
    for (const PlanRecord& record : in_flight_) {
      for (const Sunk& sunk : record.sunk) sinking += sunk.request == s.id ? 1 : 0;
    }
    CHECK_EQ(sinking, s.sinking);
    thinned += s.thinned ? 1 : 0;
    CHECK(!s.leaving || (relieving_ && std::find(relieving_->leave.begin(), relieving_->leave.end(), s.id) !=
                                           relieving_->leave.end()));
    if (!s.needs_switch && !s.next) CHECK(s.reserved == pages_to_take(s, memory_, s.placement.residency));
    if (s.widening()) {
      const PageCounts old = pages_to_take(s, memory_, s.placement.residency);
      const PageCounts need = pages_to_take(s, memory_, s.next->residency);
      for_each_pool(limits_.rank_count, [&](kv::Stream stream, int rank) {
        CHECK_GE(s.reserved.at(stream, rank), old.at(stream, rank));
        CHECK_GE(s.reserved.at(stream, rank), need.at(stream, rank));
      });
    }
  }
  for (const Prefetch& one : prefetches_) {
    locks.push_back(one.path.tail);
    own_blocks += std::ssize(one.path.own);
  }
  for (const Sequence* s : waiting_)
    CHECK(!s->running && s->blocks.size() == 0 && !s->thinned && !s->leaving);
  CHECK_EQ(thinned, thinned_now_);
  CHECK(reserved == memory_.reserved());
  CHECK_EQ(promised, memory_.host().promised());
  CHECK(std::is_sorted(waiting_.begin(), waiting_.end(),
                       [](const Sequence* a, const Sequence* b) { return a->before(*b); }));
  // Nothing that could let the first waiting request in goes unnoticed.
  if (!waiting_.empty() && waiting_.front()->no_room_at == memory_.changes() &&
      waiting_.front()->asked_others) {
    const Sequence& first = *waiting_.front();
    CHECK(!nobody_makes_room() && entry_of(first, first.wish, memory_, true, turn_).slack < 0);
    if (limits_.on_pressure != OnPressure::kNone && !first.host_context)
      CHECK_LT(entry_of(first, thin_wish(limits_, first.wish), memory_, true, turn_).slack, 0);
  }
  for (const auto& [at, id] : deadlines_) CHECK(sequences_.at(id)->deadline == at);
  CHECK_EQ(tables, tables_.taken_count());
  for (const auto& [number, pin] : pins_) locks.push_back(pin.tail);
  memory_.check_locks(locks);
  std::vector<kv::BlockHash> copies;
  for (const auto& [id, s] : sequences_) {
    for (int64_t i = 0; i < s->load_blocks; ++i) copies.push_back(s->hashes[s->load_first + i]);
    copies.insert(copies.end(), s->host_copies.begin(), s->host_copies.end());
  }
  for (const Prefetch& one : prefetches_) copies.insert(copies.end(), one.hashes.begin(), one.hashes.end());
  for (const auto& [number, pin] : pins_) copies.insert(copies.end(), pin.host.begin(), pin.host.end());
  memory_.host().check_locks(copies);
  memory_.for_each_block([&](const Block& block) { own_blocks -= block.run == kNoRun ? 1 : 0; });
  CHECK_EQ(own_blocks, 0);
  if (in_flight_.empty()) CHECK(memory_.last_completed() == memory_.last_issued());
}

const char* pressure_name(PressureNotice::What what) {
  switch (what) {
    case PressureNotice::What::kThinned:
      return "thinned";
    case PressureNotice::What::kThickened:
      return "thickened";
    case PressureNotice::What::kPreempted:
      return "preempted";
  }
  return "?";
}

const char* finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kError:
      return "error";
  }
  return "?";
}

const char* request_state_name(RequestState state) {
  switch (state) {
    case RequestState::kWaiting:
      return "waiting";
    case RequestState::kPrefill:
      return "prefill";
    case RequestState::kDecode:
      return "decode";
  }
  return "?";
}

}  // namespace weft::controlplane
