#include "daemon/request_book.h"

#include <set>

namespace weft::daemon {

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
  record.outcome = controlplane::finish_reason_name(notice.reason);
  finished_.push_back(std::move(record));
  running_.erase(found);
  if (finished_.size() > kFinishedKept) finished_.pop_front();
}

void RequestBook::planned(const controlplane::Plan& plan, Time now) {
  for (const controlplane::Span& span : plan.spans) {
    RequestRecord* record = find(span.request);
    if (record == nullptr) continue;
    if (!record->first_planned) record->first_planned = now;
  }
}

void RequestBook::crossed(RequestId id, const controlplane::Span* span, const kv::CrossedBytes& bytes) {
  RequestRecord* record = find(id);
  if (record == nullptr) return;
  const int64_t copied = bytes[kv::CrossKind::kRegroup];
  record->regroup_bytes += copied;
  // Before the first decode step is over, copies of a request that has finished its prompt are the switch's.
  const bool prompt_done = record->first_token.has_value();
  if (prompt_done && !record->decode_step_done) record->switch_bytes += copied;
  const bool prefill = span != nullptr ? span->prefill : !prompt_done;
  (prefill ? record->prefill_crossed : record->decode_crossed) += bytes;
}

void RequestBook::step_done(const controlplane::Plan& plan, Duration took) {
  std::set<RequestId> counted;
  for (const controlplane::Span& span : plan.spans) {
    RequestRecord* record = find(span.request);
    if (record == nullptr || !counted.insert(span.request).second) continue;
    if (span.prefill) {
      ++record->prefill_steps;
    } else {
      ++record->decode_steps;
      record->decode_step_done = true;
      record->last_step_ns = took.count();
    }
  }
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

void fill_trace(const RequestRecord& record, const StoredBytes& stored, int rank_count, Time now,
                wire::Trace* to) {
  to->set_prefill(kv::split_name(record.wish.prefill));
  to->set_decode(kv::decode_name(record.wish.decode));
  to->set_index(kv::index_name(record.wish.index));
  const Time end = record.ended.value_or(now);
  const Time planned = record.first_planned.value_or(end);
  const Time token = record.first_token.value_or(end);
  to->set_queued_ns(static_cast<uint64_t>((planned - record.arrived).count()));
  to->set_prefill_ns(static_cast<uint64_t>((token - planned).count()));
  to->set_decode_ns(static_cast<uint64_t>((end - token).count()));
  to->set_prefill_steps(static_cast<uint64_t>(record.prefill_steps));
  to->set_decode_steps(static_cast<uint64_t>(record.decode_steps));
  fill_stored(stored, rank_count, to->mutable_stored());
  fill_crossed(record.prefill_crossed, to->mutable_prefill_crossed());
  fill_crossed(record.decode_crossed, to->mutable_decode_crossed());
  to->set_switch_bytes(static_cast<uint64_t>(record.switch_bytes));
  to->set_regroup_bytes(static_cast<uint64_t>(record.regroup_bytes));
  to->set_regroups(static_cast<uint64_t>(record.regroups));
}

}  // namespace weft::daemon
