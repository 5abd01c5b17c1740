#include "tests/simulation/ledger.h"

#include <algorithm>

namespace weft::simulation {

void Ledger::arrived(const RequestArrived& arrival, Time now, bool unknown_parent) {
  Live& live = live_[arrival.request];
  arriving_ = arrival.request;
  live.arrival = arrival;
  live.unknown_parent = unknown_parent;
  count(Mark::kTurns, number(arrival.parent) != 0 && !unknown_parent);
  if (arrival.deadline) live.deadline = now + *arrival.deadline;
}

// Of a request that shares with nobody and is not between two placements, the residency says what it stores.
void Ledger::remember(const ControlPlane& plane) {
  for (auto& [id, live] : live_) {
    live.before.reset();
    live.places = plane.limits().active();
    if (live.arrival.use_prefix_cache && !live.on_host) continue;
    const auto snapshot = plane.request(id);
    if (snapshot && snapshot->state != RequestState::kWaiting && !snapshot->switching) live.before = snapshot;
  }
}

void Ledger::place(const ControlPlane& plane) {
  for (auto& [id, live] : live_) {
    if (live.placed) continue;
    const auto snapshot = plane.request(id);
    if (!snapshot) continue;
    live.placed = true;
    live.on_host = snapshot->host_context;
    const ContextPlace asked = live.arrival.context;
    verdict_.expect(Checker::kNotices,
                    live.on_host
                        ? asked != ContextPlace::kDevice && host_refusal(live.arrival) == ErrorCode::kOk
                        : asked != ContextPlace::kHost,
                    "request ", number(id), " has its context ", live.on_host ? "on the host" : "on devices");
    count(Mark::kOnHost, live.on_host);
    count(Mark::kAutoOnHost, live.on_host && asked == ContextPlace::kAuto);
  }
}

void Ledger::memory_lost(const ControlPlane& plane) {
  for (auto& [id, live] : live_) {
    live.prefilled = 0;
    if (!live.before || live.before->host_blocks == 0) continue;
    const auto snapshot = plane.request(id);
    count(Mark::kHostReplayed, snapshot && snapshot->state == RequestState::kWaiting);
  }
}

// With which error a request must be refused that asks for its context on the host; kOk: with none.
ErrorCode Ledger::host_refusal(const RequestArrived& arrival) const {
  if (limits_.index_topk == 0) return ErrorCode::kUnsupported;
  if (limits_.host_pages[0] == 0) return ErrorCode::kFailedPrecondition;
  return arrival.use_prefix_cache ? ErrorCode::kOk : ErrorCode::kInvalidArgument;
}

void Ledger::take(std::span<const Notice> notices) {
  for (const Notice& notice : notices) {
    std::visit([&](const auto& n) { on(n); }, notice);
  }
  arriving_ = RequestId{0};
}

Ledger::Live& Ledger::find(RequestId id) {
  const auto found = live_.find(id);
  verdict_.expect(Checker::kNotices, found != live_.end(), "a notice of request ", number(id),
                  ", which has ended or never was");
  return found == live_.end() ? live_[id] : found->second;
}

void Ledger::on(const TokenNotice& notice) {
  Live& live = find(notice.request);
  const Truth& truth = workers_.truth(notice.request);
  verdict_.expect(Checker::kNotices, notice.index == live.answered, "request ", number(notice.request),
                  " got token ", notice.index, " after ", live.answered);
  ++live.answered;
  ++sums_.generated_tokens;
  const int64_t position = truth.prompt + notice.index;
  verdict_.expect(Checker::kTokens, position < truth.rows() && notice.token == truth.token(position),
                  "request ", number(notice.request), " token ", notice.index, " is ", notice.token,
                  ", not the oracle's ",
                  position < truth.rows() ? std::to_string(truth.token(position)) : "end");
}

void Ledger::on(const DraftNotice& notice) {
  Live& live = find(notice.request);
  const Speculation& speculation = live.arrival.speculation;
  verdict_.expect(Checker::kNotices,
                  speculation.on() && notice.drafted <= speculation.draft_tokens &&
                      notice.accepted <= notice.drafted &&
                      notice.start == workers_.truth(notice.request).prompt + live.answered - 1,
                  "request ", number(notice.request), " was told of drafts that it cannot have");
  live.drafted += notice.drafted;
  live.accepted += notice.accepted;
  sums_.drafted_tokens += notice.drafted;
  sums_.accepted_tokens += notice.accepted;
  count(Mark::kGuessesHold, speculation.source == DraftSource::kMtp && notice.accepted > 0);
  count(notice.accepted == 0                ? Mark::kNoDraftHolds
        : notice.accepted == notice.drafted ? Mark::kAllDraftsHold
                                            : Mark::kSomeDraftsHold);
}

void Ledger::on(const PrefillNotice& notice) {
  Live& live = find(notice.request);
  verdict_.expect(Checker::kNotices,
                  notice.done <= notice.total && notice.done >= live.prefilled &&
                      notice.total == workers_.truth(notice.request).prompt,
                  "request ", number(notice.request), " has read ", notice.done, " of ", notice.total,
                  " after ", live.prefilled);
  live.prefilled = notice.done;
}

void Ledger::on(const RegroupedNotice& notice) {
  if (notice.error.code == ErrorCode::kOk) {
    count(Mark::kRegrouped);
    count(Mark::kRegroupMoved, notice.bytes_moved > 0);
    count(Mark::kRegroupThinned, notice.pages_dropped > 0);
    const auto live = live_.find(notice.request);
    count(Mark::kHostRegrouped, live != live_.end() && live->second.on_host &&
                                    notice.before != notice.after && notice.bytes_moved > 0);
    return;
  }
  count(Mark::kRegroupRefused);
  const ErrorCode code = notice.error.code;
  // One that waited while the topology changed may fit no more, or its request is gone.
  const bool late = changed_ever_ && (code == ErrorCode::kInvalidArgument || code == ErrorCode::kNotFound);
  verdict_.expect(Checker::kNotices,
                  notice.before == notice.after &&
                      (late || code == ErrorCode::kResourceExhausted || code == ErrorCode::kTooLarge),
                  "a regroup was refused with ", notice.error.text());
}

void Ledger::on(const PinNotice& notice) {
  if (notice.error.code != ErrorCode::kOk) {
    const bool known =
        notice.error.code == ErrorCode::kNotFound || notice.error.code == ErrorCode::kResourceExhausted;
    verdict_.expect(Checker::kNotices, known, "a pin was refused with ", notice.error.text());
    return count(Mark::kPinsRefused);
  }
  if (pinned_.erase(notice.pin) > 0) return;
  pinned_.insert(notice.pin);
  count(Mark::kPinned);
}

void Ledger::on(const PressureNotice& notice) {
  find(notice.request);
  using What = PressureNotice::What;
  count(notice.what == What::kThinned     ? Mark::kThinned
        : notice.what == What::kThickened ? Mark::kThickened
                                          : Mark::kPreempted);
}

void Ledger::on(const TopologyNotice& notice) {
  if (refusals_.erase(notice.command) > 0) {
    verdict_.expect(Checker::kNotices, notice.error.code == ErrorCode::kFailedPrecondition,
                    "two changes of ranks at once");
    return;
  }
  verdict_.expect(Checker::kNotices, change_ && change_->command == notice.command,
                  "a topology was told that nobody asked for");
  const Change change = *std::exchange(change_, std::nullopt);
  const bool done = notice.error.code == ErrorCode::kOk;
  verdict_.expect(Checker::kNotices, notice.ranks == (done ? change.after : change.before),
                  "the topology is not the one asked for, or not the one before");
  if (done) {
    verdict_.expect(Checker::kCopies, notice.bytes_moved == change.moved, "a change of ranks moved ",
                    change.moved, " bytes and told ", notice.bytes_moved);
    topology_ = notice.ranks;
    ++sums_.topology_changes;
    count(Mark::kGoneMoved, change.gone);
    count(Mark::kTopologyChanged);
    count(Mark::kHostMoved, std::any_of(live_.begin(), live_.end(), [](const auto& one) {
            return one.second.before && one.second.before->host_blocks > 0;
          }));
    return count(Mark::kTopologyMoved, change.moved > 0);
  }
  if (change.gone) topology_ = change.before;
  const ErrorCode code = notice.error.code;
  verdict_.expect(Checker::kNotices,
                  code == ErrorCode::kNotFound || code == ErrorCode::kFailedPrecondition ||
                      code == ErrorCode::kInvalidArgument ||  // of mechanisms that the new number forbids
                      code == ErrorCode::kResourceExhausted || code == ErrorCode::kTooLarge ||
                      code == ErrorCode::kUnavailable,
                  "a change of ranks was refused with ", notice.error.text());
  count(code == ErrorCode::kUnavailable || change.moved > 0 ? Mark::kTopologyFailed : Mark::kTopologyRefused);
}

void Ledger::on(const FinishedNotice& notice) {
  const Live live = find(notice.request);
  const Truth& truth = workers_.truth(notice.request);
  live_.erase(notice.request);
  verdict_.expect(Checker::kNotices,
                  notice.completion_tokens == live.answered && notice.drafted_tokens == live.drafted &&
                      notice.accepted_tokens == live.accepted && notice.prompt_tokens == truth.prompt &&
                      (live.arrival.use_prefix_cache || notice.cached_tokens == 0),
                  "request ", number(notice.request),
                  " ends with other counts than it was told: ", notice.completion_tokens, " tokens against ",
                  live.answered, ", ", notice.drafted_tokens, " drafts against ", live.drafted, ", ",
                  notice.accepted_tokens, " accepted against ", live.accepted);
  count(Mark::kDraftsEnd, live.accepted > 0 && notice.reason == FinishReason::kStop);
  count(Mark::kHits, notice.cached_tokens > 0);
  count(Mark::kHostFound, live.on_host && notice.cached_tokens > 0);
  check_stored(notice, live);
  check_end(notice, live, truth);
}

void Ledger::check_end(const FinishedNotice& notice, const Live& live, const Truth& truth) {
  switch (notice.reason) {
    case FinishReason::kStop:
    case FinishReason::kLength:
      verdict_.expect(Checker::kNotices,
                      notice.reason == truth.reason && live.answered == truth.rows() - truth.prompt,
                      "request ", number(notice.request), " ends as '", finish_reason_name(notice.reason),
                      "' after ", live.answered, " tokens of ", truth.rows() - truth.prompt);
      ++sums_.finished;
      count(Mark::kFinished);
      count(Mark::kStopped, notice.reason == FinishReason::kStop);
      count(Mark::kHostEnded, live.on_host);
      return;
    case FinishReason::kCancelled:
      verdict_.expect(Checker::kNotices, live.cancelled, "request ", number(notice.request),
                      " was never cancelled");
      ++sums_.cancelled;
      count(Mark::kCancelled);
      return;
    case FinishReason::kError:
      return check_error(notice, live, truth);
  }
}

void Ledger::check_error(const FinishedNotice& notice, const Live& live, const Truth& truth) {
  const auto expect = [&](bool ok) {
    verdict_.expect(Checker::kNotices, ok, "request ", number(notice.request), " ends with ",
                    notice.error.text());
  };
  switch (notice.error.code) {
    case ErrorCode::kNumerical:
      expect(truth.reason == FinishReason::kError);
      failures_.push_back(notice);
      count(Mark::kNumerical);
      break;
    case ErrorCode::kInternal:
      expect(live.abandoned_alone);
      failures_.push_back(notice);
      count(Mark::kInternal);
      count(Mark::kLoadsBlamed, truth.poison_loads && truth.poison_row < 0);
      break;
    case ErrorCode::kDeadlineExceeded:
      expect(live.deadline.has_value());
      count(Mark::kLateEnd);
      break;
    case ErrorCode::kNotFound:
      expect(live.unknown_parent && live.answered == 0 && notice.error.field == "parent");
      count(Mark::kUnknownParents);
      ++sums_.refused;
      return;
    case ErrorCode::kUnsupported:
    case ErrorCode::kFailedPrecondition:
    case ErrorCode::kInvalidArgument:
      expect(live.arrival.context == ContextPlace::kHost && notice.error.field == "context" &&
             notice.error.code == host_refusal(live.arrival));
      count(Mark::kContextRefused);
      ++sums_.refused;
      return;
    case ErrorCode::kResourceExhausted:
      if (notice.request != arriving_) {  // it waited, and pins leave no room
        expect(pins() > 0 && live.answered == 0);
        count(Mark::kPinsInTheWay);
        break;
      }
      [[fallthrough]];
    case ErrorCode::kTooLarge:
      expect(live.answered == 0 && notice.computed_tokens == 0);
      count(Mark::kRefused);
      ++sums_.refused;
      return;
    default:
      expect(false);
  }
  ++sums_.failed;
}

// Index keys of a context that is on the host as far as it goes may still have to be loaded.
bool Ledger::loads_wait(const FinishedNotice& notice, const Live& live) const {
  return live.on_host && live.before->host_blocks * limits_.geometry.block_tokens >= notice.computed_tokens;
}

// Whole blocks under the rows that were computed and those that plans in flight were to compute.
void Ledger::check_stored(const FinishedNotice& notice, const Live& live) {
  if (!live.before || loads_wait(notice, live)) return;
  int64_t scheduled = notice.computed_tokens;
  for (const auto& plan : unapplied_) {
    for (const Span& span : plan->spans) {
      if (span.request == notice.request && span.start >= notice.computed_tokens)
        scheduled = std::max(scheduled, span.start + span.rows);
    }
  }
  const auto of = [&](int64_t rows) {
    const kv::StoredBytes by_place = kv::stored_bytes(limits_.geometry, live.before->placement.residency,
                                                      rows, live.before->origin, live.places.count());
    kv::StoredBytes bytes{};
    for (int place = 0; place < live.places.count(); ++place) {
      for (size_t s = 0; s < kv::kStreams; ++s)
        bytes[s][static_cast<size_t>(live.places.rank(place))] = by_place[s][static_cast<size_t>(place)];
    }
    return bytes;
  };
  const kv::StoredBytes implied = of(scheduled);
  bool right = !live.on_host && notice.stored == implied;
  // Entries of host blocks are not among them; the plan that ended it may have brought some there.
  for (int64_t blocks = live.before->host_blocks; live.on_host && !right; ++blocks) {
    const int64_t rows = blocks * limits_.geometry.block_tokens;
    if (rows > scheduled) break;
    kv::StoredBytes left = implied;
    for (size_t rank = 0; rank < kMaxRanks; ++rank) left[0][rank] -= of(rows)[0][rank];
    right = notice.stored == left;
  }
  verdict_.expect(Checker::kStored, right, "request ", number(notice.request),
                  " is said to store other bytes than its residency implies for ", scheduled, " rows");
  count(live.on_host ? Mark::kStoredOnHost : Mark::kStoredExactly);
}

}  // namespace weft::simulation
