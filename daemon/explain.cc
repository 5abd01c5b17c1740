#include "daemon/explain.h"

#include <algorithm>

#include "controlplane/host_context.h"
#include "controlplane/placement.h"
#include "kv/cost.h"
#include "proto/vocab/units.h"

namespace weft::daemon {
namespace {

kv::CostModel cost_model(const controlplane::Limits& limits, const wire::ModelDescription& model) {
  kv::CostModel cost;
  cost.geometry = limits.geometry;
  cost.layers = static_cast<int64_t>(model.layers());
  cost.dense_layers = static_cast<int64_t>(model.dense_layers());
  cost.hidden = static_cast<int64_t>(model.hidden());
  cost.vocabulary = static_cast<int64_t>(model.vocabulary());
  cost.query_bytes = static_cast<int64_t>(model.query_bytes());
  cost.value_width = static_cast<int64_t>(model.value_width());
  cost.index_topk = static_cast<int64_t>(model.index_topk());
  cost.window = static_cast<int64_t>(model.window());
  cost.window_layers = static_cast<int64_t>(model.window_layers());
  cost.dense_segments = model.dense_segments();
  cost.moe_segments = model.moe_segments();
  cost.rank_count = limits.places();
  return cost;
}

// What the request is, or was, for the arithmetic.
struct Subject {
  const controlplane::Limits& limits;
  kv::CostModel model;
  int64_t tokens = 0;
  int origin = 0;
  kv::Topology ranks;
  int64_t host_window = 0;  // its context lies on the host
};

// One decode step of it, sampled at rank 0: vocabulary slices differ by a row, so "rows" differs by a few
// bytes from one sampler to the next.
kv::CostSpan decode_step(const Subject& subject, const controlplane::Placement& placement,
                         const kv::Mechanisms& mechanisms) {
  kv::CostSpan span;
  span.start = subject.tokens;
  span.grouping = placement.grouping;
  span.index_c = placement.index_c;
  span.mechanisms = mechanisms;
  span.residency = placement.residency;
  span.origin = subject.origin;
  span.head_rows = 1;
  return span;
}

// Whether it counts at their most what data decides.
template <typename Line>
bool fill_step(const Subject& subject, const kv::CostSpan& span, Line* to) {
  const kv::Cost cost = kv::total_step_cost(subject.model, span);
  fill_crossed(cost.crossed, to->mutable_per_step());
  to->set_exchanges(static_cast<uint64_t>(kv::step_exchanges(subject.model, {&span, 1})));
  return !cost.exact;
}

// [stream][place]; of a context on the host what it has on devices.
kv::StoredBytes stored_under(const Subject& subject, const kv::Residency& residency) {
  const kv::CacheGeometry& geometry = subject.model.geometry;
  if (subject.host_window == 0) {
    return kv::stored_bytes(geometry, residency, subject.tokens, subject.origin, subject.ranks.count());
  }
  const controlplane::PageCounts pages =
      controlplane::host_context_pages(subject.limits, residency, subject.origin,
                                       ceil_div(subject.tokens, geometry.block_tokens), subject.host_window);
  kv::StoredBytes bytes{};
  controlplane::for_each_pool(subject.ranks.count(), [&](kv::Stream stream, int place) {
    const int rank = subject.ranks.rank(place);
    // How wide the window of one that has ended was is not known any more: never wider than the pool.
    const int64_t most = subject.limits.pool_pages[static_cast<size_t>(rank)][static_cast<size_t>(stream)];
    bytes[static_cast<size_t>(stream)][static_cast<size_t>(place)] =
        std::min(pages.at(stream, rank), most) * geometry.page_bytes(stream);
  });
  return bytes;
}

// Measured when it last decoded under such a grouping, dp on whichever rank; 0: it never did.
int64_t latest_step_ns(const RequestRecord& record, const controlplane::Placement& placement) {
  for (auto phase = record.decodes.rbegin(); phase != record.decodes.rend(); ++phase) {
    const RanUnder& ran = phase->ran;
    if (ran.grouping.width == placement.grouping.width && ran.grouping.c == placement.grouping.c &&
        ran.index_c == placement.index_c &&
        (ran.index_c == 1 || ran.index_copied == (placement.index.kind == kv::IndexKind::kCopied)) &&
        phase->steps > 0) {
      return phase->step_ns;
    }
  }
  return 0;
}

}  // namespace

namespace {

Subject subject_of(const RequestRecord& record, const controlplane::ControlPlane& plane,
                   const wire::ModelDescription& model) {
  const auto snapshot = plane.request(record.id);
  const bool running = snapshot && snapshot->state != controlplane::RequestState::kWaiting;
  const controlplane::Limits& limits = plane.limits();
  return {limits,
          cost_model(limits, model),
          running ? snapshot->computed_tokens : record.prompt_tokens + record.completion_tokens,
          running ? snapshot->origin : 0,
          limits.active(),
          running               ? snapshot->host_window
          : record.host_context ? limits.host_window
                                : 0};
}

}  // namespace

void fill_costs(const RequestRecord& record, const controlplane::ControlPlane& plane,
                const wire::ModelDescription& model,
                google::protobuf::RepeatedPtrField<wire::GroupingCost>* to) {
  const controlplane::Limits& limits = plane.limits();
  const Subject subject = subject_of(record, plane, model);
  const auto snapshot = plane.request(record.id);
  const bool running = snapshot && snapshot->state != controlplane::RequestState::kWaiting;
  const int dp_rank = running ? snapshot->placement.grouping.base : 0;
  const controlplane::GroupingWish asked_for = running ? snapshot->wish : record.wish;
  std::vector<kv::IndexWish> indexes = {kv::IndexKind::kCopied};
  if (limits.uses(kv::Stream::kIndexKeys) && limits.places() > 1) {
    indexes.push_back(kv::IndexKind::kSplit);
    if (asked_for.index.c != 0) indexes.push_back(asked_for.index);
  }
  for (const kv::DecodeWish wish : kv::decode_wishes(limits.places())) {
    for (const kv::IndexWish index : indexes) {
      const bool one_rank = wish.kind == kv::DecodeKind::kDp && wish.width == 1;
      if (one_rank && !(index == kv::IndexKind::kCopied)) continue;  // the same
      const auto placement = controlplane::placement_of(limits, wish, index, dp_rank);
      wire::GroupingCost* line = to->Add();
      line->set_decode(kv::decode_name(wish));
      line->set_index(kv::index_name(index));
      // On one rank the index is where the entries are, whatever was asked for.
      line->set_present(running && (one_rank ? snapshot->placement.grouping == placement.grouping
                                             : snapshot->placement == placement));
      fill_stored(stored_under(subject, placement.residency), subject.ranks.count(), line->mutable_stored());
      for (wire::RankStored& stored : *line->mutable_stored()) {
        stored.set_rank(static_cast<uint32_t>(subject.ranks.rank(static_cast<int>(stored.rank()))));
      }
      fill_step(subject, decode_step(subject, placement, asked_for.mechanisms), line);
      line->set_step_ns(static_cast<uint64_t>(latest_step_ns(record, placement)));
      if (!running) continue;
      controlplane::GroupingWish asked = asked_for;
      asked.decode = wish;
      asked.index = index;
      if (const auto price = plane.price(record.id, asked)) {
        line->set_change_bytes(static_cast<uint64_t>(price->bytes_moved));
      }
    }
  }
}

namespace {

using Lines = google::protobuf::RepeatedPtrField<wire::MechanismCost>;

void add_line(const Subject& subject, const char* phase, const std::string& name, bool present,
              const kv::CostSpan& span, Lines* to) {
  wire::MechanismCost* line = to->Add();
  line->set_phase(phase);
  line->set_mechanism(name);
  line->set_present(present);
  line->set_at_most(fill_step(subject, span, line));
  const kv::StoredBytes stored = stored_under(subject, span.residency);
  int64_t most = 0;
  for (size_t rank = 0; rank < static_cast<size_t>(subject.ranks.count()); ++rank) {
    most = std::max(most, stored[0][rank] + stored[1][rank]);
  }
  line->set_stored(static_cast<uint64_t>(most));
}

void fill_decode_mechanisms(const Subject& subject, const controlplane::Limits& limits,
                            const controlplane::GroupingWish& wish, const controlplane::Placement& now,
                            Lines* to) {
  for (const kv::MechanismChoice& choice : kv::mechanism_choices()) {
    const kv::Mechanisms mechanisms = kv::parse_mechanisms(choice.text, wish.mechanisms).value();
    if (choice.prefill || now.grouping.c == 1 || !kv::validate_mechanisms(mechanisms, wish.decode)) continue;
    add_line(subject, "decode", choice.text, mechanisms == wish.mechanisms,
             decode_step(subject, now, mechanisms), to);
  }
  if (!limits.uses(kv::Stream::kIndexKeys)) return;
  for (const kv::IndexKind kind : {kv::IndexKind::kCopied, kv::IndexKind::kSplit}) {
    for (int c = kind == kv::IndexKind::kCopied ? 1 : 2; c <= now.grouping.width; ++c) {
      if (now.grouping.width % c != 0) continue;
      const kv::IndexWish index(kind, c);
      const auto placement = controlplane::placement_of(limits, wish.decode, index, now.grouping.base);
      const bool present = placement.index_c == now.index_c && placement.residency == now.residency;
      add_line(subject, "decode", "index=" + kv::index_name(index), present,
               decode_step(subject, placement, wish.mechanisms), to);
    }
  }
}

// The last chunk of what of the prompt is computed, if it has the steps to itself.
void fill_prefill_mechanisms(const Subject& subject, const controlplane::Limits& limits,
                             const controlplane::GroupingWish& wish, const controlplane::Placement& now,
                             int64_t prompt, int64_t cached, Lines* to) {
  kv::CostSpan chunk = decode_step(subject, now, wish.mechanisms);
  const int64_t most = limits.max_chunk_rows > 0 ? std::min(limits.max_chunk_rows, limits.max_step_rows)
                                                 : limits.max_step_rows;
  chunk.rows = (prompt - cached - 1) % most + 1;
  chunk.start = prompt - chunk.rows;
  const auto resolve = [&](kv::CostSpan& span) {
    const bool passes = controlplane::passes_query(limits, now, span.split, span.mechanisms.context,
                                                   span.start, span.rows, subject.origin);
    span.mechanisms.context = passes ? kv::ContextPath::kPassQ : kv::ContextPath::kPassKv;
  };
  const auto split_of = [&](kv::Split split) {
    return controlplane::chunk_split(split, chunk.rows, false, limits.places());
  };
  for (int i = 0; i < kv::kSplits; ++i) {
    kv::CostSpan span = chunk;
    span.split = static_cast<kv::Split>(i);
    if (span.split != split_of(span.split)) continue;  // too short a prompt
    resolve(span);
    add_line(subject, "prefill", std::string("prefill=") + kv::split_name(span.split),
             span.split == split_of(wish.prefill), span, to);
  }
  chunk.split = split_of(wish.prefill);
  if (chunk.split == kv::Split::kShared) return;
  kv::CostSpan present = chunk;
  resolve(present);
  for (const kv::MechanismChoice& choice : kv::mechanism_choices()) {
    if (!choice.prefill) continue;
    kv::CostSpan span = chunk;
    span.mechanisms = kv::parse_mechanisms(choice.text, wish.mechanisms).value();
    if (span.mechanisms.context == kv::ContextPath::kAuto && choice.text == "context=auto") continue;
    resolve(span);
    add_line(subject, "prefill", choice.text, span.mechanisms == present.mechanisms, span, to);
  }
}

}  // namespace

void fill_mechanisms(const RequestRecord& record, const controlplane::ControlPlane& plane,
                     const wire::ModelDescription& model,
                     google::protobuf::RepeatedPtrField<wire::MechanismCost>* to) {
  const controlplane::Limits& limits = plane.limits();
  if (limits.places() == 1) return;
  const Subject subject = subject_of(record, plane, model);
  const auto snapshot = plane.request(record.id);
  const bool running = snapshot && snapshot->state != controlplane::RequestState::kWaiting;
  const controlplane::GroupingWish wish = running ? snapshot->wish : record.wish;
  const int base = running ? snapshot->placement.grouping.base : 0;
  const auto now = controlplane::placement_of(limits, wish.decode, wish.index, base);
  const int64_t cached = snapshot ? snapshot->cached_tokens : record.cached_tokens;
  fill_prefill_mechanisms(subject, limits, wish, now, record.prompt_tokens, cached, to);
  if (now.grouping.width > 1) fill_decode_mechanisms(subject, limits, wish, now, to);
}

}  // namespace weft::daemon
