#include "controlplane/control_plane.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "controlplane/admission.h"
#include "controlplane/host_context.h"
#include "proto/vocab/check.h"

namespace weft::controlplane {

ControlPlane::ControlPlane(const Limits& limits)
    : limits_(limits),
      memory_(limits_),
      tables_(limits_.table_count),
      contexts_(limits_.kept_contexts, limits_.kept_tokens) {
  validate(limits_).value();
}

Decision ControlPlane::step(Time now, std::span<const Event> events) {
  Decision decision;
  decision.notices = handle(now, events);
  decision.plan = next_plan(now);
  std::move(pending_.begin(), pending_.end(), std::back_inserter(decision.notices));
  pending_.clear();
  return decision;
}

std::vector<Notice> ControlPlane::handle(Time now, std::span<const Event> events) {
  memory_.advance(now);
  Notices notices = std::exchange(pending_, {});
  for (const Event& event : events) {
    std::visit([&](const auto& e) { on(now, e, notices); }, event);
  }
  end_late(now, notices);
  advance_change(now, notices);
  return notices;
}

std::optional<Plan> ControlPlane::next_plan(Time now) {
  memory_.advance(now);
  if (change_) return std::exchange(change_->plan, std::nullopt);
  admit_waiting(now);
  if (thinned_now_ > 0 && waiting_.empty()) thicken();
  const auto limit = static_cast<size_t>(suspects_.empty() ? limits_.plans_in_flight : 1);
  if (in_flight_.size() >= limit) return std::nullopt;
  PlanBuilder builder(memory_, tables_, StepId{number(memory_.last_issued()) + 1}, running_count());
  fill(builder);
  if (builder.empty()) {
    // With nothing in flight no page can be missing: it was reserved.
    CHECK(!in_flight_.empty() || !any_runnable(), "nobody can run, and nothing will change that");
    return std::nullopt;
  }
  return issue(builder);
}

Plan ControlPlane::issue(PlanBuilder& builder) {
  Plan plan = builder.finish();
  plan.ranks = builder.record().ranks = change_ ? change_->movers.ranks() : limits_.active().ranks();
  memory_.issued(plan.step);
  in_flight_.push_back(std::move(builder.record()));
  ++counters_.plans;
  return plan;
}

// Decode rows first, then prompts. A suspect runs by itself and without drafts; others
// run meanwhile only if no suspect can.
void ControlPlane::fill(PlanBuilder& builder) {
  for (const RequestId id : suspects_) {
    Sequence& sequence = *sequences_.at(id);
    if (!sequence.runnable()) continue;
    if (sequence.host_context) builder.sink(sequence);
    const bool added = sequence.prefilling() ? builder.add_prefill(sequence, sequence.prompt_left())
                                             : builder.add_decode(sequence);
    builder.add_spills(false);  // it may have to wait for them, or for loads that fill a plan
    CHECK(added || !builder.empty(), "alone, with nothing in flight, it must find its pages");
    builder.record().alone = true;
    return;
  }
  for (Sequence* sequence : running_) {
    if (sequence->host_context) builder.sink(*sequence);
  }
  // Drafts take what the step holds beyond a row and a sample for everybody.
  builder.allow_drafts(std::min(limits_.max_step_rows, limits_.max_samples) - running_count());
  for (Sequence* sequence : running_) {
    if (sequence->runnable() && sequence->suspect_until == 0 && !sequence->prefilling())
      builder.add_decode(*sequence);
  }
  fill_prompts(builder);
  prefetch(builder);
  builder.add_spills();
}

// Class by class of urgency. Within one the shortest rest comes first, but half of the rows are kept for the
// earliest: a long prompt holds up a short one by at most its own length again, and all end.
void ControlPlane::fill_prompts(PlanBuilder& builder) {
  std::vector<Sequence*> prompts;
  for (Sequence* sequence : running_) {
    if (sequence->runnable() && sequence->suspect_until == 0 && sequence->prefilling())
      prompts.push_back(sequence);
  }
  std::sort(prompts.begin(), prompts.end(),
            [](const Sequence* a, const Sequence* b) { return a->before(*b); });
  for (auto begin = prompts.begin(); begin != prompts.end() && builder.rows_left() > 0;) {
    Sequence* const earliest = *begin;
    const auto end = std::find_if(begin, prompts.end(),
                                  [&](const Sequence* s) { return s->priority != earliest->priority; });
    std::stable_sort(
        begin, end, [](const Sequence* a, const Sequence* b) { return a->prompt_left() < b->prompt_left(); });
    int64_t kept = std::min(earliest->prompt_left(), (builder.rows_left() + 1) / 2);
    for (; begin != end; ++begin) {
      if (*begin == earliest) kept = 0;
      builder.add_prefill(**begin, builder.rows_left() - kept);
    }
  }
}

// Loads for those who come in next, where the step has nothing else to copy.
void ControlPlane::prefetch(PlanBuilder& builder) {
  constexpr size_t kAhead = 4;
  if (!memory_.host().on() || builder.copies() || running_.empty() || relieving_) return;
  for (size_t i = 0; i < std::min(waiting_.size(), kAhead); ++i) {
    Sequence& next = *waiting_[i];
    if (!next.use_prefix_cache || next.host_context || is_prefetched(next.id) ||
        next.no_prefetch_at == memory_.changes() || others_load(next))
      continue;
    const PrefixCache::Match found = memory_.cache().find(next.hashes, next.likely_blocks);
    if (found.blocks < next.prefetched || !memory_.host().has(next.hashes, found.blocks)) continue;
    const Entry entry = entry_of(next, next.wish, memory_, true, turn_);
    Prefetch loads = builder.prefetch(next, found, entry.placement.residency, entry.origin);
    if (loads.hashes.empty()) {
      next.no_prefetch_at = memory_.changes();
      continue;
    }
    next.prefetched = loads.path.size();
    prefetches_.push_back(std::move(loads));
    if (builder.copies()) return;
  }
}

// Now: it comes in when that is done, and finds it.
bool ControlPlane::is_prefetched(RequestId id) const {
  return std::any_of(prefetches_.begin(), prefetches_.end(),
                     [&](const Prefetch& one) { return one.request == id; });
}

// What it needs next from the host is on its way for another one, who is as urgent: it comes in when that is
// there, and finds it.
bool ControlPlane::others_load(const Sequence& waiting) const {
  if (!memory_.host().on() || !waiting.use_prefix_cache || waiting.host_context) return false;
  const int64_t index = memory_.cache().find(waiting.hashes, waiting.likely_blocks).blocks;
  if (!memory_.host().has(waiting.hashes, index)) return false;
  const kv::BlockHash& hash = waiting.hashes[index];
  return std::any_of(prefetches_.begin(), prefetches_.end(),
                     [&](const Prefetch& one) {
                       return std::find(one.hashes.begin(), one.hashes.end(), hash) != one.hashes.end();
                     }) ||
         std::any_of(running_.begin(), running_.end(), [&](const Sequence* s) {
           return !s->host_context && index >= s->load_first && index < s->load_first + s->load_blocks &&
                  s->hashes[index] == hash && s->runnable() && s->priority <= waiting.priority;
         });
}

// What was loaded is cached from now on; what was not is as if it had never been tried.
void ControlPlane::end_prefetches(StepId step, bool loaded) {
  std::erase_if(prefetches_, [&](Prefetch& one) {
    if (one.step != step) return false;
    for (const kv::BlockHash& hash : one.hashes) {
      if (!loaded || !memory_.insert(one.path, hash, one.residency)) break;
      counters_.host_hit_tokens += limits_.geometry.block_tokens;
    }
    memory_.unlock_host(one.hashes);
    memory_.release_unknown(one.path);
    return true;
  });
}

bool ControlPlane::any_runnable() const {
  return std::any_of(running_.begin(), running_.end(), [](const Sequence* s) { return s->runnable(); });
}

// In order; but where the first ones find no room, others as urgent may come in before them, within bounds:
// a large request is not passed for ever, and a turn looks at a few requests only.
void ControlPlane::admit_waiting(Time now) {
  constexpr size_t kLookAhead = 16;
  if (relieving_) advance_relief();
  size_t at = 0;
  while (at < waiting_.size() && at < kLookAhead && running_count() < limits_.max_running) {
    Sequence& next = *waiting_[at];
    const Sequence& first = *waiting_.front();
    if (at > 0 && (relieving_ || next.priority != first.priority || first.passed >= limits_.max_passes))
      return;
    if (is_prefetched(next.id) || (next.no_room_at != memory_.changes() && others_load(next))) {
      ++at;
      continue;
    }
    if (at == 0 && relief_at_ != 0 && number(memory_.last_issued()) >= relief_at_) look_again();
    const uint64_t changes = memory_.changes();
    const bool known = next.no_room_at == changes && (at > 0 || next.asked_others);
    if (known || !(admit(now, next, at == 0) || (at == 0 && relieve(now, next)))) {
      if (memory_.changes() != changes) continue;  // others have given up room
      if (nobody_makes_room() && at == 0) {        // nobody who runs could make room
        // Copies that a plan in flight makes may be undone: what they were made from stays until then.
        if (!in_flight_.empty()) return;
        if (!squeeze_pins()) refuse_for_pins(next);
        continue;
      }
      next.no_room_at = changes;
      next.asked_others = at == 0;
      ++at;
      continue;
    }
    for (size_t i = 0; i < at; ++i) ++waiting_[i]->passed;
    counters_.passes += at > 0 ? 1 : 0;
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(at));
  }
}

bool ControlPlane::admit(Time now, Sequence& sequence, bool first) {
  // Using what the cache has can cost more room than it saves (a chain that lies on too many ranks). With
  // nobody left who could make room, do without it.
  if (!try_admit(sequence, sequence.wish, memory_, true, turn_) &&
      !(nobody_makes_room() && try_admit(sequence, sequence.wish, memory_, false, turn_))) {
    CHECK(!first || !nobody_makes_room() || any_pinned(), "it fits alone, but does not come in");
    return false;
  }
  came_in(now, sequence);
  return true;
}

void ControlPlane::came_in(Time now, Sequence& sequence) {
  running_.push_back(&sequence);
  sequence.admitted = now;
  if (sequence.blocks.registered == 0) turn_ = (turn_ + 1) % limits_.places();
  if (sequence.again) return;
  if (sequence.use_prefix_cache) {
    sequence.history = memory_.chain_arrived(sequence.hashes, sequence.arrived);
  }
  counters_.prompt_tokens += sequence.prompt;
  counters_.cached_tokens += sequence.cached;
  counters_.host_hit_tokens +=
      std::max<int64_t>(0, sequence.cached - sequence.load_first * limits_.geometry.block_tokens);
}

Error unknown_parent(RequestId parent) {
  return error(ErrorCode::kNotFound,
               "the context of request " + std::to_string(number(parent)) +
                   " is not known here (any more); send the whole prompt",
               "parent");
}

void ControlPlane::refuse_for_pins(Sequence& sequence) {
  int64_t blocks = 0;
  for (const auto& [number, pin] : pins_) blocks += pin.blocks + std::ssize(pin.host);
  finish(sequence, FinishReason::kError,
         error(ErrorCode::kResourceExhausted,
               "there is no room for " + std::to_string(sequence.row_count() + 1) + " tokens beside " +
                   std::to_string(pins_.size()) + " pins of together " + std::to_string(blocks) + " blocks"),
         pending_);
}

// ---- events ---------------------------------------------------------------------------------------------

void ControlPlane::on(Time now, const RequestArrived& event, Notices& notices) {
  CHECK(!event.prompt.empty() && event.max_tokens >= 1, "the shell checks these");
  Context* parent = number(event.parent) == 0 ? nullptr : contexts_.find(event.parent);
  const int64_t prompt = std::ssize(event.prompt) + (parent == nullptr ? 0 : parent->tokens.size());
  CHECK(!sequences_.contains(event.request), "request ids are never reused");
  const auto refuse = [&](Error why) {
    ++counters_.refused;
    FinishedNotice notice{event.request, FinishReason::kError, std::move(why)};
    notice.prompt_tokens = prompt;
    notices.emplace_back(std::move(notice));
  };
  if (number(event.parent) != 0 && (parent == nullptr || parent->root != event.root)) {
    refuse(unknown_parent(event.parent));
    return;
  }
  const Result<int64_t> window = choose_window(event, prompt);
  if (!window) {
    refuse(window.error());
    return;
  }
  if (waiting_count() >= limits_.max_waiting && !change_) admit_waiting(now);
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
  if (parent != nullptr) {
    sequence.tokens = parent->tokens.share();
    sequence.hashes = parent->hashes.share();
    sequence.likely_blocks = parent->hashes.size();
  }
  sequence.tokens.append(event.prompt);
  sequence.hashes.append(event.hashes);
  sequence.sampling = event.sampling;
  sequence.max_tokens = event.max_tokens;
  sequence.stop_tokens = event.stop_tokens;
  sequence.wish = event.grouping;
  sequence.speculation = event.speculation;
  sequence.use_prefix_cache = event.use_prefix_cache;
  sequence.digest = event.digest;
  sequence.priority = event.priority;
  sequence.host_context = *window > 0;
  sequence.host_window = *window;
  if (event.deadline) sequence.deadline = now + *event.deadline;
  sequence.arrived = now;
  if (event.speculation.source == DraftSource::kLookup) sequence.text = sequence.tokens.copy();
  sequence.prompt = prompt;
  if (sequence.use_prefix_cache) {
    CHECK_EQ(sequence.hashes.size(), prompt / limits_.geometry.block_tokens);
  }
  if (sequence.deadline) deadlines_.insert({*sequence.deadline, sequence.id});
  sequences_.emplace(event.request, std::move(owned));
  enqueue(sequence);
}

void ControlPlane::enqueue(Sequence& sequence) {
  const auto before = [](const Sequence* a, const Sequence* b) { return a->before(*b); };
  waiting_.insert(std::upper_bound(waiting_.begin(), waiting_.end(), &sequence, before), &sequence);
}

// How a request's context lies: 0, in device pools; else on the host, with a window of so many blocks, the
// widest that fits.
Result<int64_t> ControlPlane::choose_window(const RequestArrived& event, int64_t prompt) const {
  const auto fits = [&](int64_t window) {
    return check_fits(prompt, event.max_tokens, event.grouping, window);
  };
  TRY_VOID(check_shape(limits_, prompt, event.max_tokens, event.grouping));
  const auto device = event.context == ContextPlace::kHost ? Result<void>() : fits(0);
  if (event.context == ContextPlace::kDevice || (event.context == ContextPlace::kAuto && device))
    return device ? Result<int64_t>(0) : device.error();
  Result<void> host = check_host_contexts(limits_);
  if (host && !event.use_prefix_cache)
    host = error(ErrorCode::kInvalidArgument, "a context on the host needs the prefix cache", "context");
  const bool possible = host.has_value();
  for (int64_t window = limits_.host_window; possible && window > 0; window /= 2) {
    host = fits(window);
    if (host) return window;
  }
  if (device) return host.error();
  if (!possible) return device.error();
  return error(device.error().code,
               device.error().message + "; with the context on the host, " + host.error().message,
               device.error().field);
}

void ControlPlane::end_late(Time now, Notices& notices) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    Sequence& sequence = *sequences_.at(deadlines_.begin()->second);
    const auto after =
        std::chrono::duration_cast<std::chrono::milliseconds>(*sequence.deadline - sequence.arrived);
    finish(sequence, FinishReason::kError,
           error(ErrorCode::kDeadlineExceeded,
                 "not done after " + std::to_string(after.count()) + " ms, with " +
                     std::to_string(sequence.answered()) + " of at most " +
                     std::to_string(sequence.max_tokens) + " tokens",
                 "deadline_ms"),
           notices);
  }
}

void ControlPlane::on(Time, const CancelRequested& event, Notices& notices) {
  Sequence* sequence = find(event.request);
  if (sequence != nullptr) finish(*sequence, FinishReason::kCancelled, error(ErrorCode::kOk, ""), notices);
}

void ControlPlane::on(Time, const PauseChanged& event, Notices&) {
  Sequence* sequence = find(event.request);
  if (sequence == nullptr) return;
  sequence->paused = event.paused;
  look_again();
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
  for (const Sample& sample : event.samples) {
    if (sample.sample_index < limits_.max_samples) record->add(sample);
  }
  while (!in_flight_.empty() && in_flight_.front().done()) {
    const PlanRecord done = std::move(in_flight_.front());
    in_flight_.pop_front();
    complete(done, notices);
  }
}

void ControlPlane::on(Time, const RegroupRequested& event, Notices& notices) {
  if (change_) {
    change_->deferred.push_back(event);
    return;
  }
  Sequence* sequence = find(event.request);
  if (sequence == nullptr) {
    notices.emplace_back(
        RegroupedNotice{event.command, event.request, "", "", 0, 0,
                        error(ErrorCode::kNotFound, "no such request is running", "request")});
    return;
  }
  notices.emplace_back(regroup(*sequence, event));
}

// ---- pins -----------------------------------------------------------------------------------------------

// What is there of its context: on devices, and behind that on the host.
ControlPlane::Pin ControlPlane::pinnable(RequestId id) {
  Pin pin;
  pin.request = id;
  const Identities* hashes = nullptr;
  if (const Sequence* sequence = find(id); sequence != nullptr) {
    if (!sequence->use_prefix_cache) return pin;
    hashes = &sequence->hashes;
    const BlockPath& blocks = sequence->blocks;
    if (sequence->running && blocks.registered > 0) {
      if (memory_.forgotten(blocks.tail)) return pin;
      pin.tail = blocks.tail;
      pin.blocks = blocks.registered;
    }
  } else if (const Context* context = contexts_.find(id); context != nullptr) {
    hashes = &context->hashes;
  }
  if (hashes == nullptr) return pin;
  if (pin.blocks == 0) {
    const PrefixCache::Match found = memory_.cache().find(*hashes, hashes->size());
    pin.tail = found.tail;
    pin.blocks = found.blocks;
  }
  const HostPool& host = memory_.host();
  const int64_t count = host.lockable(*hashes, pin.blocks, host.match(*hashes, pin.blocks));
  for (int64_t i = 0; i < count; ++i) pin.host.push_back((*hashes)[pin.blocks + i]);
  return pin;
}

void ControlPlane::note_holders(Pin& pin) const {
  const auto parts = static_cast<size_t>(memory_.parts());
  pin.holders.resize(static_cast<size_t>(pin.blocks) * parts);
  memory_.cache().for_each_run(pin.tail, [&](const Run& run, int64_t first, int64_t end) {
    for (int64_t index = first; index < end; ++index) {
      const Block& block = memory_.block(run.blocks[static_cast<size_t>(index - run.first_index)]);
      for (size_t part = 0; part < parts; ++part)
        pin.holders[static_cast<size_t>(index) * parts + part] = block.parts[part].holders();
    }
  });
}

// Whoever ran with pinned blocks may have spread them to more ranks, and left them so: pages in the room that
// others had when the pins were made. While nobody runs they are given back. False: there are none.
bool ControlPlane::squeeze_pins() {
  const auto parts = static_cast<size_t>(memory_.parts());
  std::map<BlockId, std::vector<RankMask>> kept;
  for (const auto& [number, pin] : pins_) {
    memory_.cache().for_each_run(pin.tail, [&, &pin = pin](const Run& run, int64_t first, int64_t end) {
      for (int64_t index = first; index < end; ++index) {
        auto& masks = kept[run.blocks[static_cast<size_t>(index - run.first_index)]];
        masks.resize(parts);
        for (size_t part = 0; part < parts; ++part)
          masks[part] |= pin.holders[static_cast<size_t>(index) * parts + part];
      }
    });
  }
  bool given = false;
  for (const auto& [id, masks] : kept) {
    for (size_t part = 0; part < parts; ++part) {
      const BlockPart& held = memory_.block(id).parts[part];
      if ((held.valid & masks[part]) == 0) continue;  // what lay there is lost, or has moved
      for_each_rank(held.holders() & ~masks[part], [&, id = id](int rank) {
        memory_.drop(id, static_cast<int>(part), rank);
        given = true;
      });
    }
  }
  return given;
}

void ControlPlane::on(Time now, const PinRequested& event, Notices& notices) {
  if (change_) {  // what nobody used when blocks moved may have been left behind
    change_->deferred.push_back(event);
    return;
  }
  constexpr size_t kPinsMax = 1024;
  PinNotice notice{event.command, 0, error(ErrorCode::kOk, "")};
  Pin found = pinnable(event.request);
  // Who gave back its room will need it again.
  const auto interrupted = [&](bool on_host) {
    return std::any_of(waiting_.begin(), waiting_.end(),
                       [&](const Sequence* s) { return s->again && (!on_host || s->host_context); });
  };
  if (found.blocks == 0 && found.host.empty()) {
    notice.error =
        error(ErrorCode::kNotFound,
              "no whole block of request " + std::to_string(number(event.request)) + " is cached", "request");
  } else if (pins_.size() == kPinsMax) {
    notice.error = error(ErrorCode::kResourceExhausted,
                         std::to_string(kPinsMax) + " contexts are pinned, which is the limit", "request");
  } else if ((found.blocks > 0 && (interrupted(false) || !memory_.can_pin(found.tail))) ||
             (!found.host.empty() && interrupted(true))) {
    notice.error = error(ErrorCode::kResourceExhausted,
                         "requests that have come in count on the room of these " +
                             std::to_string(found.blocks + std::ssize(found.host)) + " blocks",
                         "request");
  } else {
    notice.pin = ++pin_numbers_;
    found.since = now;
    if (found.blocks > 0) memory_.pin(found.tail);
    note_holders(found);
    memory_.lock_host(found.host);
    pins_.emplace(notice.pin, std::move(found));
  }
  notices.emplace_back(std::move(notice));
}

void ControlPlane::on(Time, const UnpinRequested& event, Notices& notices) {
  PinNotice notice{event.command, event.pin, error(ErrorCode::kOk, "")};
  const auto pin = pins_.find(event.pin);
  if (pin == pins_.end()) {
    notice.error = error(ErrorCode::kNotFound, "no pin " + std::to_string(event.pin), "pin");
  } else {
    if (pin->second.blocks > 0) memory_.unpin(pin->second.tail);
    memory_.unlock_host(pin->second.host);
    pins_.erase(pin);
  }
  notices.emplace_back(std::move(notice));
}

// ---- regroup --------------------------------------------------------------------------------------------

RegroupedNotice ControlPlane::regroup(Sequence& sequence, const RegroupRequested& event) {
  GroupingWish wish = sequence.wish;
  if (event.has_prefill) wish.prefill = event.wish.prefill;
  if (event.has_decode) wish.decode = event.wish.decode;
  if (event.has_index) wish.index = event.wish.index;
  wish.mechanisms = kv::parse_mechanisms(event.mechanisms, wish.mechanisms).value();
  // What the command does not name may be of another number of ranks.
  GroupingWish priced = fitted(wish, limits_.places());
  if (event.has_decode) priced.decode = wish.decode;
  if (event.has_index) priced.index = wish.index;
  const bool stays_thin = sequence.thinned && !event.has_decode && !event.has_index;
  if (stays_thin) priced = thin_wish(limits_, wish);
  const bool form_changed = wish.mechanisms.form != sequence.wish.mechanisms.form;
  const auto name = [&](const GroupingWish& w, const Placement* placement) {
    std::string text = placement != nullptr
                           ? placement_name(limits_, *placement)
                           : kv::decode_name(w.decode) + ", index " + kv::index_name(w.index);
    if (event.has_prefill) text += std::string(", prefill ") + kv::split_name(w.prefill);
    if (!event.mechanisms.empty()) {
      const std::string named = kv::mechanisms_name(w.mechanisms);
      text += named.empty() ? ", default mechanisms" : ", " + named;
    }
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
  if (form_changed) {
    // Its blocks are shared by others, who count on the bits of one form.
    notice.error =
        error(ErrorCode::kInvalidArgument, "the form of a request that has come in is fixed", "mechanisms");
    return notice;
  }
  if (!sequence.running) {
    if (auto fits =
            check_fits_alone(limits_, sequence.prompt, sequence.max_tokens, priced, sequence.host_window);
        !fits) {
      notice.error = fits.error();
      return notice;
    }
    // It must find room beside them, as it had before; and that is known of the grouping it had.
    if (sequence.again && any_pinned()) {
      notice.error =
          error(ErrorCode::kResourceExhausted,
                "it waits to come in again, and beside pins it keeps its grouping until it has", "request");
      return notice;
    }
    notice.after = name(wish, nullptr);
    if (!event.dry_run) {
      sequence.wish = wish;
      sequence.no_room_at = 0;  // look again
    }
    return notice;
  }
  const Result<RegroupPrice> price = price_regroup(sequence, memory_, priced);
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
  if (!stays_thin) set_thinned(sequence, false);
  if (!same) accept_regroup(sequence, memory_, *price, false);
  return notice;
}

}  // namespace weft::controlplane
