#include "daemon/request_book.h"

#include <algorithm>
#include <set>

#include "daemon/validate.h"

namespace weft::daemon {
namespace {

uint64_t as_unsigned(int64_t value) { return static_cast<uint64_t>(value); }

// Where a decode step under `ran` counts: the latest phase, or a new one.
DecodePhase& decode_phase(RequestRecord& record, const RanUnder& ran) {
  if (record.decodes.empty() || !(record.decodes.back().ran == ran)) {
    DecodePhase phase;
    phase.ran = ran;
    phase.began = record.last_decoded.value_or(record.first_token.value_or(record.arrived));
    record.decodes.push_back(phase);
  }
  return record.decodes.back();
}

// Each phase lasts until the next begins, the last until the end. A step that was in flight when the request
// ended is done later than that.
void fill_decodes(const RequestRecord& record, Time end, int rank_count, wire::Trace* to) {
  kv::CrossedBytes crossed;
  int64_t steps = 0;
  for (size_t i = 0; i < record.decodes.size(); ++i) {
    const DecodePhase& phase = record.decodes[i];
    const Time next = i + 1 < record.decodes.size() ? record.decodes[i + 1].began : end;
    wire::DecodeTrace* line = to->add_decodes();
    // With one rank all groupings are the same.
    RanUnder ran = phase.ran;
    if (ran.places == 0) ran.places = rank_count;
    line->set_decode(ran.places == 1 ? kv::decode_name(record.wish.decode) : decode_name_of(ran));
    line->set_index(index_name_of(phase.ran));
    line->set_mechanisms(kv::mechanisms_name(phase.ran.mechanisms));
    line->set_steps(as_unsigned(phase.steps));
    line->set_tokens(as_unsigned(phase.tokens));
    line->set_time_ns(as_unsigned(std::max<int64_t>(0, (std::min(next, end) - phase.began).count())));
    line->set_step_ns(as_unsigned(phase.step_ns));
    line->set_gap_ns(as_unsigned(phase.gap_ns));
    fill_crossed(phase.crossed, line->mutable_crossed());
    crossed += phase.crossed;
    steps += phase.steps;
  }
  to->set_decode_steps(as_unsigned(steps));
  fill_crossed(crossed, to->mutable_decode_crossed());
}

}  // namespace

RanUnder ran_under(const controlplane::Span& span, int places) {
  return {span.grouping,
          span.index_c,
          span.index_copied,
          {span.replicate_query ? kv::QueryPath::kReplicated : kv::QueryPath::kGathered,
           span.tree_partials ? kv::PartialsPath::kTree : kv::PartialsPath::kAllToAll, kv::ContextPath::kAuto,
           kv::FetchPath::kView, kv::AttentionForm::kAbsorbed},
          places};
}

std::string decode_name_of(const RanUnder& ran) {
  if (ran.grouping.width < ran.places) {
    return kv::decode_name({kv::DecodeKind::kDp, ran.grouping.c, ran.grouping.width});
  }
  if (ran.grouping.c == 1) return kv::decode_name({kv::DecodeKind::kTp, 1});
  return kv::decode_name({kv::DecodeKind::kDcp, ran.grouping.c});
}

std::string index_name_of(const RanUnder& ran) {
  if (ran.index_c == 1) return kv::index_name(kv::IndexKind::kCopied);
  if (ran.index_copied) return kv::index_name({kv::IndexKind::kCopied, ran.index_c});
  const bool usual = ran.index_c == kv::index_parts(ran.grouping, kv::IndexKind::kSplit);
  return kv::index_name({kv::IndexKind::kSplit, usual ? 0 : ran.index_c});
}

RequestRecord& RequestBook::add(RequestRecord record) {
  const RequestId id = record.id;
  return running_.emplace(id, std::move(record)).first->second;
}

RequestRecord* RequestBook::find(RequestId id) {
  const auto found = running_.find(id);
  if (found != running_.end()) return &found->second;
  for (RequestRecord& record : finished_) {
    if (record.id == id) return &record;
  }
  return nullptr;
}

void RequestBook::finish(RequestId id, const controlplane::FinishedNotice& notice, Time now) {
  const auto found = running_.find(id);
  if (found == running_.end()) return;
  RequestRecord& record = found->second;
  record.ended = now;
  record.prompt_tokens = notice.prompt_tokens;
  record.cached_tokens = notice.cached_tokens;
  record.computed_tokens = notice.computed_tokens;
  record.completion_tokens = notice.completion_tokens;
  record.stored = notice.stored;
  record.change_waits = notice.change_waits;
  record.outcome = controlplane::finish_reason_name(notice.reason);
  if (notice.reason == controlplane::FinishReason::kError) record.failure = notice.error.text();
  finished_.push_back(std::move(record));
  running_.erase(found);
  if (finished_.size() > kFinishedKept) finished_.pop_front();
}

void RequestBook::planned(const controlplane::Plan& plan, Time now) {
  for (const controlplane::Span& span : plan.spans) {
    RequestRecord* record = find(span.request);
    if (record == nullptr) continue;
    if (!record->first_planned) record->first_planned = now;
    record->host_context = record->host_context || span.host_blocks > 0;
  }
}

void RequestBook::crossed(const controlplane::Span& span, const kv::CrossedBytes& bytes) {
  RequestRecord* record = find(span.request);
  if (record == nullptr) return;
  const int64_t copied = bytes[kv::CrossKind::kRegroup];
  record->regroup_bytes += copied;
  if (span.prefill) {
    record->prefill_crossed += bytes;
    return;
  }
  if (!record->last_decoded) record->switch_bytes += copied;
  decode_phase(*record, ran_under(span, places_)).crossed += bytes;
}

void RequestBook::chosen(const controlplane::Span& span, int64_t hits, int64_t misses) {
  RequestRecord* record = find(span.request);
  if (record == nullptr) return;
  record->hot_hits += hits;
  record->hot_misses += misses;
}

void RequestBook::moved(RequestId request, const kv::CrossedBytes& bytes) {
  RequestRecord* record = find(request);
  if (record == nullptr) return;
  record->regroup_bytes += bytes[kv::CrossKind::kRegroup];
  record->prefill_crossed[kv::CrossKind::kHost] +=
      bytes[kv::CrossKind::kHost];  // loaded before its first rows
}

void RequestBook::step_done(const controlplane::Plan& plan, Duration took, Time now, Duration gap) {
  std::set<RequestId> counted;
  for (const controlplane::Span& span : plan.spans) {
    RequestRecord* record = find(span.request);
    if (record == nullptr || !counted.insert(span.request).second) continue;
    const RanUnder ran = ran_under(span, places_);
    RanUnder place = ran;
    place.mechanisms = {};  // how bytes are exchanged is no change of grouping
    if (record->last_ran && !(*record->last_ran == place)) ++record->regroups;
    record->last_ran = place;
    if (span.prefill) {
      ++record->prefill_steps;
      auto& splits = record->prefill_ran;
      if (std::find(splits.begin(), splits.end(), span.split) == splits.end()) splits.push_back(span.split);
    } else {
      DecodePhase& phase = decode_phase(*record, ran);
      ++phase.steps;
      phase.step_ns = took.count();
      phase.gap_ns += gap.count();
      if (!record->last_decoded) record->switch_gap_ns = gap.count();
      record->last_decoded = now;
    }
  }
}

void RequestBook::drafts(const controlplane::DraftNotice& notice) {
  RequestRecord* record = find(notice.request);
  if (record == nullptr) return;
  record->drafted_tokens += notice.drafted;
  record->accepted_tokens += notice.accepted;
}

void RequestBook::token(const controlplane::TokenNotice& notice, Time now) {
  RequestRecord* record = find(notice.request);
  if (record == nullptr) return;
  if (!record->first_token) record->first_token = now;
  record->completion_tokens = notice.index + 1;
  if (notice.index > 0 && !record->decodes.empty()) ++record->decodes.back().tokens;
}

void fill_crossed(const kv::CrossedBytes& from, wire::Crossed* to) {
  const auto get = [&](kv::CrossKind kind) { return static_cast<uint64_t>(from[kind]); };
  to->set_entries(get(kv::CrossKind::kEntries));
  to->set_index_keys(get(kv::CrossKind::kIndexKeys));
  to->set_queries(get(kv::CrossKind::kQueries));
  to->set_partials(get(kv::CrossKind::kPartials));
  to->set_candidates(get(kv::CrossKind::kCandidates));
  to->set_rows(get(kv::CrossKind::kRows));
  to->set_host(get(kv::CrossKind::kHost));
  to->set_regroup(get(kv::CrossKind::kRegroup));
}

void fill_stored(const StoredBytes& from, int rank_count,
                 google::protobuf::RepeatedPtrField<wire::RankStored>* to) {
  for (int rank = 0; rank < rank_count; ++rank) {
    wire::RankStored* line = to->Add();
    line->set_rank(static_cast<uint32_t>(rank));
    line->set_entries(static_cast<uint64_t>(from[0][static_cast<size_t>(rank)]));
    line->set_index_keys(static_cast<uint64_t>(from[1][static_cast<size_t>(rank)]));
  }
}

int64_t computed_of_prompt(const RequestRecord& record) {
  return std::max<int64_t>(0, std::min(record.computed_tokens, record.prompt_tokens) - record.cached_tokens);
}

void fill_trace(const RequestRecord& record, const StoredBytes& stored, bool change_waits, int rank_count,
                Time now, wire::Trace* to) {
  set_grouping(record.wish, to);
  const Time end = record.ended.value_or(now);
  const Time planned = record.first_planned.value_or(end);
  const Time token = record.first_token.value_or(end);
  to->set_queued_ns(as_unsigned((planned - record.arrived).count()));
  to->set_prefill_ns(as_unsigned((token - planned).count()));
  to->set_decode_ns(as_unsigned((end - token).count()));
  to->set_prefill_steps(as_unsigned(record.prefill_steps));
  for (const kv::Split split : record.prefill_ran) to->add_prefill_ran(kv::split_name(split));
  fill_stored(stored, rank_count, to->mutable_stored());
  fill_crossed(record.prefill_crossed, to->mutable_prefill_crossed());
  fill_decodes(record, end, rank_count, to);
  to->set_switch_gap_ns(as_unsigned(record.switch_gap_ns));
  to->set_switch_bytes(as_unsigned(record.switch_bytes));
  to->set_regroup_bytes(as_unsigned(record.regroup_bytes));
  to->set_regroups(as_unsigned(record.regroups));
  to->set_change_waits(change_waits);
  to->set_context(record.host_context ? "host" : "device");
  to->set_hot_hits(as_unsigned(record.hot_hits));
  to->set_hot_misses(as_unsigned(record.hot_misses));
  to->set_speculative(controlplane::draft_source_name(record.drafts));
  to->set_drafted_tokens(as_unsigned(record.drafted_tokens));
  to->set_accepted_tokens(as_unsigned(record.accepted_tokens));
}

}  // namespace weft::daemon
