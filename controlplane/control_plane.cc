#include "controlplane/control_plane.h"

#include <algorithm>

#include "controlplane/admission.h"
#include "proto/vocab/check.h"

namespace weft::controlplane {

ControlPlane::ControlPlane(const Limits& limits)
    : limits_(limits), memory_(limits_), tables_(limits_.table_count) {
  validate(limits_).value();
}

Decision ControlPlane::step(Time now, std::span<const Event> events) {
  Decision decision;
  decision.notices = handle(now, events);
  decision.plan = next_plan(now);
  return decision;
}

std::vector<Notice> ControlPlane::handle(Time now, std::span<const Event> events) {
  Notices notices;
  for (const Event& event : events) {
    std::visit([&](const auto& e) { on(now, e, notices); }, event);
  }
  return notices;
}

std::optional<Plan> ControlPlane::next_plan(Time now) {
  admit_waiting(now);
  const auto limit = static_cast<size_t>(suspects_.empty() ? limits_.plans_in_flight : 1);
  if (in_flight_.size() >= limit) return std::nullopt;
  PlanBuilder builder(memory_, tables_, StepId{number(memory_.last_issued()) + 1});
  fill(builder);
  if (builder.empty()) {
    // With nothing in flight no page can be missing: it was reserved.
    CHECK(!in_flight_.empty() || !any_runnable(), "nobody can run, and nothing will change that");
    return std::nullopt;
  }
  Plan plan = builder.finish();
  memory_.issued(plan.step);
  in_flight_.push_back(std::move(builder.record()));
  ++counters_.plans;
  return plan;
}

// Decode rows first, then prompts in order of arrival. A suspect runs by itself; others run meanwhile only if
// no suspect can.
void ControlPlane::fill(PlanBuilder& builder) {
  for (const RequestId id : suspects_) {
    Sequence& sequence = *sequences_.at(id);
    if (!sequence.runnable()) continue;
    CHECK(sequence.prefilling() ? builder.add_prefill(sequence) : builder.add_decode(sequence),
          "alone, with nothing in flight, it must find its pages");
    builder.record().alone = true;
    return;
  }
  for (Sequence* sequence : running_) {
    if (sequence->runnable() && sequence->suspect_until == 0 && !sequence->prefilling())
      builder.add_decode(*sequence);
  }
  for (Sequence* sequence : running_) {
    if (builder.rows_left() == 0) break;
    if (sequence->runnable() && sequence->suspect_until == 0 && sequence->prefilling())
      builder.add_prefill(*sequence);
  }
}

bool ControlPlane::any_runnable() const {
  return std::any_of(running_.begin(), running_.end(), [](const Sequence* s) { return s->runnable(); });
}

void ControlPlane::admit_waiting(Time now) {
  while (!waiting_.empty() && running_count() < limits_.max_running) {
    Sequence& next = *waiting_.front();
    if (next.id == no_room_for_ && memory_.changes() == no_room_at_) return;
    // Using what the cache has can cost more room than it saves (a chain that lies on too many ranks). With
    // nobody left who could make room, do without it.
    if (!try_admit(next, memory_, true, turn_) &&
        !(running_.empty() && try_admit(next, memory_, false, turn_))) {
      CHECK(!running_.empty(), "it fits alone, but does not come in");
      no_room_for_ = next.id;
      no_room_at_ = memory_.changes();
      return;
    }
    waiting_.pop_front();
    running_.push_back(&next);
    next.admitted = now;
    if (next.hit_blocks == 0) turn_ = (turn_ + 1) % limits_.rank_count;
    counters_.prompt_tokens += next.prompt;
    counters_.cached_tokens += next.cached;
  }
}

// ---- events ---------------------------------------------------------------------------------------------

void ControlPlane::on(Time now, const RequestArrived& event, Notices& notices) {
  const auto prompt = static_cast<int64_t>(event.prompt.size());
  CHECK(prompt >= 1 && event.max_tokens >= 1, "the shell checks these");
  CHECK(!sequences_.contains(event.request), "request ids are never reused");
  const auto refuse = [&](Error why) {
    ++counters_.refused;
    notices.emplace_back(FinishedNotice{event.request, FinishReason::kError, std::move(why), prompt, 0, 0});
  };
  if (const auto fits = check_fits_alone(limits_, prompt, event.max_tokens, event.grouping); !fits) {
    refuse(fits.error());
    return;
  }
  if (waiting_count() >= limits_.max_waiting) admit_waiting(now);
  if (waiting_count() >= limits_.max_waiting) {
    refuse(
        error(ErrorCode::kResourceExhausted,
              std::to_string(waiting_count()) + " requests are waiting, which is the limit (max_waiting)"));
    return;
  }
  auto owned = std::make_unique<Sequence>();
  Sequence& sequence = *owned;
  sequence.id = event.request;
  sequence.order = ++arrivals_;
  sequence.root = event.root;
  sequence.hashes = event.hashes;
  sequence.sampling = event.sampling;
  sequence.max_tokens = event.max_tokens;
  sequence.stop_tokens = event.stop_tokens;
  sequence.wish = event.grouping;
  sequence.use_prefix_cache = event.use_prefix_cache;
  sequence.digest = event.digest;
  sequence.arrived = now;
  sequence.tokens = event.prompt;
  sequence.prompt = prompt;
  if (sequence.use_prefix_cache) {
    CHECK_EQ(static_cast<int64_t>(sequence.hashes.size()), prompt / limits_.geometry.block_tokens);
  }
  sequences_.emplace(event.request, std::move(owned));
  waiting_.push_back(&sequence);
}

void ControlPlane::on(Time, const CancelRequested& event, Notices& notices) {
  Sequence* sequence = find(event.request);
  if (sequence != nullptr) finish(*sequence, FinishReason::kCancelled, error(ErrorCode::kOk, ""), notices);
}

void ControlPlane::on(Time, const PauseChanged& event, Notices&) {
  if (Sequence* sequence = find(event.request)) sequence->paused = event.paused;
}

void ControlPlane::on(Time, const StepAcknowledged& event, Notices& notices) {
  const auto record = std::find_if(in_flight_.begin(), in_flight_.end(),
                                   [&](const PlanRecord& plan) { return plan.step == event.step; });
  if (record == in_flight_.end()) {
    ++counters_.late_acknowledgements;
    return;
  }
  CHECK(event.rank >= 0 && event.rank < limits_.rank_count, event.rank);
  if (holds(record->acknowledged, event.rank)) {
    ++counters_.duplicate_acknowledgements;
    return;
  }
  record->acknowledged |= mask_of(event.rank);
  record->samples.insert(record->samples.end(), event.samples.begin(), event.samples.end());
  while (!in_flight_.empty() && in_flight_.front().acknowledged == all_ranks(limits_.rank_count)) {
    const PlanRecord done = std::move(in_flight_.front());
    in_flight_.pop_front();
    complete(done, notices);
  }
}

void ControlPlane::on(Time, const RegroupRequested& event, Notices& notices) {
  Sequence* sequence = find(event.request);
  if (sequence == nullptr) {
    notices.emplace_back(
        RegroupedNotice{event.command, event.request, "", "", 0, 0,
                        error(ErrorCode::kNotFound, "no such request is running", "request")});
    return;
  }
  notices.emplace_back(regroup(*sequence, event));
}

RegroupedNotice ControlPlane::regroup(Sequence& sequence, const RegroupRequested& event) {
  GroupingWish wish = sequence.wish;
  if (event.has_prefill) wish.prefill = event.wish.prefill;
  if (event.has_decode) wish.decode = event.wish.decode;
  if (event.has_index) wish.index = event.wish.index;
  const auto name = [&](const GroupingWish& w, const Placement* placement) {
    std::string text = placement != nullptr
                           ? placement_name(limits_, *placement)
                           : kv::decode_name(w.decode) + ", index " + kv::index_name(w.index);
    if (event.has_prefill) text += std::string(", prefill ") + kv::split_name(w.prefill);
    return text;
  };
  RegroupedNotice notice{event.command,
                         sequence.id,
                         name(sequence.wish, sequence.running ? &sequence.target() : nullptr),
                         "",
                         0,
                         0,
                         error(ErrorCode::kOk, "")};
  notice.after = notice.before;
  if (!sequence.running) {
    if (auto fits = check_fits_alone(limits_, sequence.prompt, sequence.max_tokens, wish); !fits) {
      notice.error = fits.error();
      return notice;
    }
    notice.after = name(wish, nullptr);
    if (!event.dry_run) {
      sequence.wish = wish;
      no_room_at_ = 0;  // look again
    }
    return notice;
  }
  const Result<RegroupPrice> price = price_regroup(sequence, memory_, wish);
  if (!price) {
    notice.error = price.error();
    return notice;
  }
  notice.after = name(wish, &price->target);
  const bool same = price->target == sequence.target();
  if (!same) {
    notice.bytes_moved = price->bytes_moved;
    notice.pages_dropped = price->pages_dropped;
  }
  if (event.dry_run) return notice;
  sequence.wish = wish;
  if (!same) accept_regroup(sequence, memory_, *price);
  return notice;
}

// ---- completion -----------------------------------------------------------------------------------------

void ControlPlane::complete(const PlanRecord& record, Notices& notices) {
  memory_.completed(record.step);
  tables_.complete(record.step);
  for (const SpanRecord& span : record.spans) {
    // A request that ended meanwhile: its row was wasted.
    if (Sequence* sequence = find(span.request)) complete_span(*sequence, span, record, notices);
  }
}

void ControlPlane::complete_span(Sequence& sequence, const SpanRecord& span, const PlanRecord& record,
                                 Notices& notices) {
  CHECK_EQ(sequence.computed, span.start);
  const auto fail = [&](ErrorCode code, const char* message) {
    finish(sequence, FinishReason::kError, error(code, message), notices);
  };
  const Sample* sample = nullptr;
  for (const Sample& s : record.samples) {
    if (span.sample && s.sample_index == span.sample_index) sample = &s;
  }
  if (span.sample && sample == nullptr) return fail(ErrorCode::kInternal, "a step gave no sample");
  if (sample != nullptr && sample->not_finite)
    return fail(ErrorCode::kNumerical, "logits held NaN or infinity");

  sequence.computed += span.rows;
  if (span.prefill) {
    notices.push_back(
        PrefillNotice{sequence.id, std::min(sequence.computed, sequence.prompt), sequence.prompt});
  }
  register_blocks(sequence);
  if (sequence.thin && sequence.thin_step == record.step && !sequence.needs_switch) {
    thin_blocks(sequence, memory_);
    sequence.thin = false;
  }
  if (sequence.suspect_until > 0 && sequence.computed >= sequence.suspect_until) {
    sequence.suspect_until = 0;
    std::erase(suspects_, sequence.id);
  }
  if (sample == nullptr) return;
  sequence.tokens.push_back(sample->token);
  ++counters_.generated_tokens;
  notices.push_back(TokenNotice{sequence.id, sequence.answered() - 1, sample->token});
  const auto& stops = sequence.stop_tokens;
  if (std::find(stops.begin(), stops.end(), sample->token) != stops.end()) {
    finish(sequence, FinishReason::kStop, error(ErrorCode::kOk, ""), notices);
  } else if (sequence.answered() == sequence.max_tokens) {
    finish(sequence, FinishReason::kLength, error(ErrorCode::kOk, ""), notices);
  }
}

// Full blocks whose rows all ranks have acknowledged can be shared from now on.
void ControlPlane::register_blocks(Sequence& sequence) {
  if (!sequence.use_prefix_cache) return;
  const int64_t block_tokens = limits_.geometry.block_tokens;
  while (sequence.registers && (sequence.registered_blocks + 1) * block_tokens <= sequence.computed) {
    const auto index = static_cast<size_t>(sequence.registered_blocks);
    if (index == sequence.hashes.size()) {
      const std::span<const uint32_t> tokens(sequence.tokens);
      sequence.hashes.push_back(kv::block_hash(
          index == 0 ? sequence.root : sequence.hashes[index - 1],
          tokens.subspan(index * static_cast<size_t>(block_tokens), static_cast<size_t>(block_tokens))));
    }
    const BlockId parent = index == 0 ? kNoBlock : sequence.blocks[index - 1];
    sequence.registers = memory_.insert(sequence.blocks[index], sequence.hashes[index], parent);
    if (sequence.registers) ++sequence.registered_blocks;
  }
}

void ControlPlane::finish(Sequence& sequence, FinishReason reason, Error failure, Notices& notices) {
  switch (reason) {
    case FinishReason::kStop:
    case FinishReason::kLength:
      ++counters_.finished;
      break;
    case FinishReason::kCancelled:
      ++counters_.cancelled;
      break;
    case FinishReason::kError:
      ++counters_.failed;
      break;
  }
  notices.emplace_back(FinishedNotice{sequence.id, reason, std::move(failure), sequence.prompt,
                                      sequence.cached, sequence.answered()});
  // What a failed request has computed itself is not trusted.
  if (reason == FinishReason::kError && sequence.registered_blocks > sequence.hit_blocks) {
    const BlockId first = sequence.blocks[static_cast<size_t>(sequence.hit_blocks)];
    if (memory_.block(first).registered) memory_.forget(first);
  }
  // Children before parents: a block in use has its parent in use.
  for (auto id = sequence.blocks.rbegin(); id != sequence.blocks.rend(); ++id) memory_.release(*id);
  memory_.unreserve(sequence.reserved);
  if (sequence.has_table) tables_.give_back(sequence.table, memory_.last_issued());
  std::erase(suspects_, sequence.id);
  std::erase(running_, &sequence);
  std::erase(waiting_, &sequence);
  sequences_.erase(sequence.id);
}

// ---- abandoned plans ------------------------------------------------------------------------------------

void ControlPlane::on(Time, const PlansAbandoned&, Notices& notices) {
  if (in_flight_.empty()) return;
  const std::vector<PlanRecord> abandoned(in_flight_.begin(), in_flight_.end());
  in_flight_.clear();
  counters_.abandoned_plans += static_cast<int64_t>(abandoned.size());
  for (auto record = abandoned.rbegin(); record != abandoned.rend(); ++record) undo(*record);
  // They will not be run: whatever waited for them is free.
  memory_.completed(memory_.last_issued());
  tables_.complete(memory_.last_issued());

  std::vector<Sequence*> affected;
  for (const PlanRecord& record : abandoned) {
    for (const SpanRecord& span : record.spans) {
      Sequence* sequence = find(span.request);
      if (sequence != nullptr && std::find(affected.begin(), affected.end(), sequence) == affected.end()) {
        affected.push_back(sequence);
      }
    }
  }
  const bool alone = abandoned.size() == 1 && abandoned[0].alone;
  for (Sequence* sequence : affected) {
    if (alone) {
      finish(*sequence, FinishReason::kError,
             error(ErrorCode::kInternal, "the workers failed repeatedly on this request alone"), notices);
    } else {
      roll_back(*sequence, abandoned);
    }
  }
}

void ControlPlane::undo(const PlanRecord& record) {
  for (auto change = record.changes.rbegin(); change != record.changes.rend(); ++change) {
    Block* block = memory_.find_block(change->block, change->serial);
    if (block == nullptr || block->page(change->stream, change->rank) != change->page) continue;
    if (change->made_valid) {
      block->valid_in(change->stream) &= ~mask_of(change->rank);
    } else {
      block->valid_in(change->stream) |= mask_of(change->rank);
    }
  }
  for (const ValidChange& change : record.changes) {
    Block* block = memory_.find_block(change.block, change.serial);
    if (block != nullptr && block->references == 0) memory_.drop_invalid(change.block);
  }
}

// Its rows in the abandoned plans are unscheduled again, and it is retried alone up to where it was.
void ControlPlane::roll_back(Sequence& sequence, const std::vector<PlanRecord>& abandoned) {
  if (sequence.suspect_until == 0) {
    const auto later = std::find_if(suspects_.begin(), suspects_.end(),
                                    [&](RequestId id) { return sequences_.at(id)->order > sequence.order; });
    suspects_.insert(later, sequence.id);
  }
  sequence.suspect_until = std::max(sequence.suspect_until, sequence.scheduled);
  sequence.scheduled = sequence.computed;
  sequence.samples_scheduled = sequence.answered();
  if (sequence.thin_step >= abandoned.front().step) sequence.thin_step = StepId{0};
  // Copies it relied on may not have happened; the next plan looks at every block again.
  sequence.needs_switch = true;
}

// ---- queries --------------------------------------------------------------------------------------------

Sequence* ControlPlane::find(RequestId id) {
  const auto found = sequences_.find(id);
  return found == sequences_.end() ? nullptr : found->second.get();
}

std::vector<RequestId> ControlPlane::requests() const {
  std::vector<RequestId> ids;
  for (const auto& [id, sequence] : sequences_) ids.push_back(id);
  return ids;
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
  snapshot.wish = sequence->wish;
  snapshot.placement = sequence->target();
  snapshot.origin = sequence->origin;
  snapshot.switching = sequence->next.has_value() || sequence->thin;
  snapshot.arrived = sequence->arrived;
  snapshot.admitted = sequence->admitted;
  for (const BlockHolders& block : block_holders(id)) {
    for (const kv::Stream stream : kAllStreams) {
      const auto s = static_cast<size_t>(stream);
      for_each_rank(block.ranks[s], [&](int rank) {
        snapshot.stored_bytes[s][static_cast<size_t>(rank)] += limits_.geometry.page_bytes(stream);
      });
    }
  }
  return snapshot;
}

std::vector<BlockHolders> ControlPlane::block_holders(RequestId id) const {
  std::vector<BlockHolders> holders;
  const Sequence* sequence = find(id);
  if (sequence == nullptr) return holders;
  for (const BlockId block_id : sequence->blocks) {
    const Block& block = memory_.block(block_id);
    if (block.index * limits_.geometry.block_tokens >= sequence->scheduled) break;
    BlockHolders line;
    for (const kv::Stream stream : kAllStreams)
      line.ranks[static_cast<size_t>(stream)] = block.holders(stream);
    line.shared = block.references > 1;
    line.cached = block.registered;
    holders.push_back(line);
  }
  return holders;
}

Result<RegroupPrice> ControlPlane::price(RequestId id, const GroupingWish& wish) const {
  const Sequence* sequence = find(id);
  if (sequence == nullptr) return error(ErrorCode::kNotFound, "no such request is running", "request");
  if (!sequence->running)
    return error(ErrorCode::kFailedPrecondition, "the request is still waiting", "request");
  return price_regroup(*sequence, memory_, wish);
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
  // Nothing that could let the first waiting request in goes unnoticed.
  if (!waiting_.empty() && waiting_.front()->id == no_room_for_ && memory_.changes() == no_room_at_) {
    CHECK(!running_.empty() && !can_admit(*waiting_.front(), memory_, true, turn_));
  }
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
