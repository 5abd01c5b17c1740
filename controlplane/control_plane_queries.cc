// What the control plane tells about itself, and checks.
#include "controlplane/control_plane.h"

#include <algorithm>

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
  snapshot.cached_tokens = sequence->cached;
  snapshot.computed_tokens = sequence->computed;
  snapshot.completion_tokens = sequence->answered();
  snapshot.max_tokens = sequence->max_tokens;
  snapshot.drafted_tokens = sequence->drafted;
  snapshot.accepted_tokens = sequence->accepted;
  snapshot.wish = sequence->wish;
  snapshot.placement = sequence->target();
  snapshot.origin = sequence->origin;
  snapshot.change_waits = sequence->next.has_value();
  snapshot.switching = sequence->next.has_value() || sequence->thin;
  snapshot.arrived = sequence->arrived;
  snapshot.admitted = sequence->admitted;
  snapshot.stored_bytes = stored_bytes(*sequence);
  return snapshot;
}

kv::StoredBytes ControlPlane::stored_bytes(const Sequence& sequence) const {
  kv::StoredBytes bytes{};
  for (const BlockId id : sequence.blocks) {
    const Block& block = memory_.block(id);
    if (block.index * limits_.geometry.block_tokens >= sequence.scheduled) break;
    block.for_each_page([&](kv::Stream stream, int rank, PageId) {
      bytes[static_cast<size_t>(stream)][static_cast<size_t>(rank)] += limits_.geometry.page_bytes(stream);
    });
  }
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
  if (deadlines_.empty()) return std::nullopt;
  return deadlines_.begin()->first;
}

Counters ControlPlane::counters() const {
  Counters counters = counters_;
  counters.evicted_blocks = memory_.evicted_blocks();
  return counters;
}

void ControlPlane::check_invariants() const {
  memory_.check_invariants();
  tables_.check_invariants();
  CHECK_EQ(sequences_.size(), running_.size() + waiting_.size());
  CHECK_LE(running_count(), limits_.max_running);
  CHECK_LE(waiting_count(), limits_.max_waiting);
  CHECK_LE(static_cast<int>(in_flight_.size()), limits_.plans_in_flight);
  PageCounts reserved;
  int64_t tables = 0;
  int64_t references = 0;
  for (const Sequence* sequence : running_) {
    const Sequence& s = *sequence;
    reserved += s.reserved;
    tables += s.has_table ? 1 : 0;
    references += static_cast<int64_t>(s.blocks.size());
    CHECK(s.running && s.cached <= s.computed && s.computed <= s.scheduled && s.scheduled <= s.row_count());
    CHECK(s.answered() <= s.samples_scheduled && s.samples_scheduled <= s.max_tokens);
    CHECK_LE(s.scheduled, static_cast<int64_t>(s.blocks.size()) * limits_.geometry.block_tokens);
    for (size_t i = 0; i < s.blocks.size(); ++i) {
      const Block& block = memory_.block(s.blocks[i]);
      CHECK(block.references > 0 && block.index == static_cast<int64_t>(i) && block.origin == s.origin);
    }
    CHECK_EQ(s.suspect_until > 0, std::find(suspects_.begin(), suspects_.end(), s.id) != suspects_.end());
    if (!s.needs_switch) CHECK(s.reserved == pages_to_take(s, memory_, s.placement.residency));
  }
  for (const Sequence* sequence : waiting_) CHECK(!sequence->running && sequence->blocks.empty());
  CHECK(reserved == memory_.reserved());
  CHECK(std::is_sorted(waiting_.begin(), waiting_.end(),
                       [](const Sequence* a, const Sequence* b) { return a->before(*b); }));
  // Nothing that could let the first waiting request in goes unnoticed.
  if (!waiting_.empty() && waiting_.front()->no_room_at == memory_.changes()) {
    CHECK(!running_.empty() && !can_admit(*waiting_.front(), memory_, true, turn_));
  }
  for (const auto& [at, id] : deadlines_) CHECK(sequences_.at(id)->deadline == at);
  CHECK_EQ(tables, tables_.taken_count());
  int64_t counted = 0;
  memory_.for_each_block([&](const Block& block) { counted += block.references; });
  CHECK_EQ(counted, references);
  if (in_flight_.empty()) CHECK(memory_.last_completed() == memory_.last_issued());
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
