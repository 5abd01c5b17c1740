// What becomes of plans: acknowledged by all ranks, or abandoned.
#include "controlplane/control_plane.h"
#include "controlplane/host_context.h"

#include <algorithm>
#include <utility>

#include "proto/vocab/check.h"

namespace weft::controlplane {

void ControlPlane::complete(const PlanRecord& record, Notices& notices) {
  memory_.completed(record.step);
  tables_.complete(record.step);
  notices.reserve(notices.size() + 2 * record.spans.size());
  memory_.spilled(record.spilled);
  for (const Sunk& sunk : record.sunk) {
    if (Sequence* sequence = find(sunk.request)) take_host_block(*sequence, sunk);
  }
  end_prefetches(record.step, true);
  counters_.spilled_bytes +=
      std::ssize(record.spilled) * limits_.geometry.block_tokens * limits_.geometry.token_bytes();
  counters_.loaded_bytes += record.loaded_bytes;
  for (const SpanRecord& span : record.spans) {
    // A request that ended meanwhile: its row was wasted.
    if (Sequence* sequence = find(span.request)) complete_span(*sequence, span, record, notices);
  }
}

void ControlPlane::complete_span(Sequence& sequence, const SpanRecord& span, const PlanRecord& record,
                                 Notices& notices) {
  CHECK_EQ(sequence.computed, span.start);
  if (const auto all = draw_tokens(sequence, span, record); !all)
    return finish(sequence, FinishReason::kError, all.error(), notices);
  const std::vector<uint32_t>& drawn = drawn_;
  sequence.tokens.append(drawn);
  if (sequence.speculation.source == DraftSource::kLookup)
    sequence.text.insert(sequence.text.end(), drawn.begin(), drawn.end());
  // Of a span that decodes, the row before each token that holds.
  sequence.computed += span.prefill ? span.rows : std::ssize(drawn);
  if (!span.drafts.empty()) count_drafts(sequence, span, std::ssize(drawn) - 1, notices);
  const int64_t again = std::clamp<int64_t>(sequence.replay - span.start, 0, span.rows);
  counters_.replayed_rows += again;
  if (span.prefill && again < span.rows) {
    counters_.computed_prompt_tokens += span.rows - again;
    notices.push_back(
        PrefillNotice{sequence.id, std::min(sequence.computed, sequence.prompt), sequence.prompt});
  }
  register_blocks(sequence);
  unlock_host(sequence);
  if (sequence.trim && sequence.trim_step == record.step && !sequence.needs_switch) {
    trim_blocks(sequence, memory_);
    sequence.trim = false;
  }
  if (sequence.suspect_until > 0 && sequence.computed >= sequence.suspect_until) {
    sequence.suspect_until = 0;
    std::erase(suspects_, sequence.id);
    look_again();
  }
  if (sequence.owes_progress && sequence.computed > sequence.replay) {
    sequence.owes_progress = false;
    look_again();
  }
  if (drawn.empty()) return;
  sequence.guessed = guessed_tokens(span, record);
  counters_.generated_tokens += std::ssize(drawn);
  int64_t index = sequence.answered() - std::ssize(drawn);
  for (const uint32_t token : drawn) notices.push_back(TokenNotice{sequence.id, index++, token});
  if (sequence.stops_at(drawn.back())) {
    finish(sequence, FinishReason::kStop, error(ErrorCode::kOk, ""), notices);
  } else if (sequence.answered() == sequence.max_tokens) {
    finish(sequence, FinishReason::kLength, error(ErrorCode::kOk, ""), notices);
  }
}

// The tokens that a span gives: what its first sampled row drew, and then one more for each draft that equals
// the token before it, up to the one that ends the answer.
Result<void> ControlPlane::draw_tokens(const Sequence& sequence, const SpanRecord& span,
                                       const PlanRecord& record) {
  std::vector<uint32_t>& tokens = drawn_;
  tokens.clear();
  for (int64_t row = 0; row < span.sample_rows; ++row) {
    if (row > 0 && span.drafts[static_cast<size_t>(row - 1)] != tokens.back()) break;
    const Sample* sample = record.sample(span.sample_index + static_cast<uint32_t>(row));
    if (sample == nullptr) return error(ErrorCode::kInternal, "a step gave no sample");
    if (sample->not_finite) return error(ErrorCode::kNumerical, "logits held NaN or infinity");
    tokens.push_back(sample->token);
    if (sequence.stops_at(sample->token)) break;
  }
  return {};
}

// What the draft layer made of the row that drew the last of the span's tokens.
std::vector<uint32_t> ControlPlane::guessed_tokens(const SpanRecord& span, const PlanRecord& record) {
  std::vector<uint32_t> tokens;
  for (int64_t i = 0; i < span.guesses; ++i) {
    const Sample* sample = record.sample(span.sample_index + static_cast<uint32_t>(span.sample_rows + i));
    if (sample == nullptr || sample->not_finite) break;
    tokens.push_back(sample->token);
  }
  return tokens;
}

// What the drafts that do not hold were to be is unscheduled again.
void ControlPlane::count_drafts(Sequence& sequence, const SpanRecord& span, int64_t accepted,
                                Notices& notices) {
  sequence.scheduled = sequence.computed;
  sequence.samples_scheduled = sequence.answered();
  const int64_t drafted = std::ssize(span.drafts);
  sequence.drafted += drafted;
  sequence.accepted += accepted;
  counters_.drafted_tokens += drafted;
  counters_.accepted_tokens += accepted;
  notices.push_back(DraftNotice{sequence.id, span.start, drafted, accepted});
}

// Full blocks whose rows all ranks have acknowledged can be shared from now on.
void ControlPlane::register_blocks(Sequence& sequence) {
  if (!sequence.use_prefix_cache || sequence.host_context) return;
  const int64_t block_tokens = limits_.geometry.block_tokens;
  while (sequence.registers && (sequence.blocks.registered + 1) * block_tokens <= sequence.computed) {
    const int64_t index = sequence.blocks.registered;
    extend_identities(sequence, index + 1, block_tokens);
    sequence.registers =
        memory_.insert(sequence.blocks, sequence.hashes[index], sequence.placement.residency);
  }
}

// One after the other: behind one whose copy did not come, others begin again.
void ControlPlane::take_host_block(Sequence& sequence, const Sunk& sunk) {
  --sequence.sinking;
  if (sunk.block == sequence.host_blocks_count()) begin_host_block(sequence, memory_, sunk.copy);
}

// What it counted on lies in its own pages now, or is wanted no more.
void ControlPlane::unlock_host(Sequence& sequence) {
  if (sequence.load_blocks == 0) return;
  memory_.unlock_host(sequence.hashes, sequence.load_first, std::exchange(sequence.load_blocks, 0));
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
  const bool late = failure.code == ErrorCode::kDeadlineExceeded;
  notices.emplace_back(FinishedNotice{sequence.id, reason, std::move(failure), sequence.prompt,
                                      std::min(sequence.cached, sequence.prompt), sequence.computed,
                                      sequence.answered(), sequence.drafted, sequence.accepted,
                                      stored_bytes(sequence), sequence.next.has_value()});
  // What a failed request has computed itself is not trusted; one that is late has not failed.
  if (reason == FinishReason::kError && !late && sequence.blocks.registered > sequence.trusted_blocks) {
    memory_.distrust(memory_.at(sequence.blocks, sequence.trusted_blocks));
    shorten_pins();
  }
  if (reason == FinishReason::kError && !late && sequence.host_context) {
    distrust_own_copies(sequence);
    shorten_pins();
  }
  if (sequence.running && sequence.use_prefix_cache) {
    // Its next request surely begins with the prompt; the answer may come back changed.
    const int64_t prompt = sequence.prompt / limits_.geometry.block_tokens;
    memory_.chain_unused(sequence.history, sequence.hashes, prompt > 0 ? prompt : sequence.hashes.size());
  }
  unlock_host(sequence);
  leave_host(sequence, memory_);
  memory_.release(sequence.blocks);
  if (sequence.use_prefix_cache && (reason != FinishReason::kError || late)) {
    contexts_.keep(sequence.id, {std::move(sequence.tokens), std::move(sequence.hashes), sequence.root});
  }
  memory_.unreserve(sequence.reserved);
  set_thinned(sequence, false);
  if (sequence.has_table) tables_.give_back(sequence.table, memory_.last_issued());
  std::erase(suspects_, sequence.id);
  std::erase(running_, &sequence);
  std::erase(waiting_, &sequence);
  if (sequence.deadline) deadlines_.erase({*sequence.deadline, sequence.id});
  sequences_.erase(sequence.id);
}

// Of the blocks that it computed itself, those that are there and those on their way.
void ControlPlane::distrust_own_copies(const Sequence& sequence) {
  std::vector<kv::BlockHash> own(sequence.host_copies.begin() + sequence.trusted_blocks,
                                 sequence.host_copies.end());
  for (const PlanRecord& record : in_flight_) {
    for (const Sunk& sunk : record.sunk) {
      if (sunk.request == sequence.id) own.push_back(sunk.copy);
    }
  }
  memory_.distrust_copies(own);
}

// ---- abandoned plans ------------------------------------------------------------------------------------

// They will not be run: whatever waited for them is free.
std::vector<PlanRecord> ControlPlane::withdraw() {
  const std::vector<PlanRecord> plans(in_flight_.begin(), in_flight_.end());
  in_flight_.clear();
  for (auto record = plans.rbegin(); record != plans.rend(); ++record) {
    undo(*record);
    end_prefetches(record->step, false);
  }
  memory_.completed(memory_.last_issued());
  tables_.complete(memory_.last_issued());
  return plans;
}

void ControlPlane::on(Time now, const PlansAbandoned&, Notices& notices) {
  if (in_flight_.empty()) return;
  const std::vector<PlanRecord> abandoned = withdraw();
  give_up_relief();
  counters_.abandoned_plans += static_cast<int64_t>(abandoned.size());

  // Whose rows, or copies to and from the host, they carried. (Who still waits asks for other copies next.)
  std::vector<Sequence*> affected;
  const auto add = [&](RequestId id) {
    Sequence* sequence = find(id);
    if (sequence != nullptr && sequence->running &&
        std::find(affected.begin(), affected.end(), sequence) == affected.end())
      affected.push_back(sequence);
  };
  for (const PlanRecord& record : abandoned) {
    for (const SpanRecord& span : record.spans) add(span.request);
    for (const Sunk& sunk : record.sunk) add(sunk.request);
    for (const RequestId request : record.loads) add(request);
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
  if (change_ && change_->stage == TopologyChange::Stage::kMoving) {
    undo_moves();
    end_change(now, error(ErrorCode::kUnavailable, "the workers failed repeatedly while blocks moved"),
               notices);
  }
}

void ControlPlane::undo(const PlanRecord& record) {
  for (auto change = record.changes.rbegin(); change != record.changes.rend(); ++change) {
    Block* block = memory_.find_block(change->block, change->serial);
    if (block == nullptr || block->page(change->part, change->rank) != change->page) continue;
    memory_.set_valid(*block, change->part, change->rank, !change->made_valid);
  }
  memory_.spills_lost(record.spilled);
  for (const Sunk& sunk : record.sunk) {
    if (Sequence* sequence = find(sunk.request)) --sequence->sinking;
  }
  for (const ValidChange& change : record.changes) {
    Block* block = memory_.find_block(change.block, change.serial);
    if (block != nullptr && !memory_.used(*block)) memory_.drop_invalid(change.block);
  }
}

// Its rows in the abandoned plans are unscheduled again, and it is retried alone up to where it was.
void ControlPlane::roll_back(Sequence& sequence, const std::vector<PlanRecord>& abandoned) {
  if (sequence.suspect_until == 0) {
    const auto later = std::find_if(suspects_.begin(), suspects_.end(),
                                    [&](RequestId id) { return sequences_.at(id)->order > sequence.order; });
    suspects_.insert(later, sequence.id);
  }
  sequence.suspect_until = std::max({sequence.suspect_until, sequence.scheduled, sequence.computed + 1});
  sequence.scheduled = sequence.computed;
  sequence.samples_scheduled = sequence.answered();
  if (sequence.trim_step >= abandoned.front().step) sequence.trim_step = StepId{0};
  // Copies it relied on may not have happened; the next plan looks at every block again.
  sequence.needs_switch = true;
}

}  // namespace weft::controlplane
