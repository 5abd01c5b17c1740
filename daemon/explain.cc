#include "daemon/explain.h"

#include "controlplane/placement.h"
#include "kv/cost.h"

namespace weft::daemon {
namespace {

std::vector<kv::DecodeWish> wishes(int rank_count) {
  std::vector<kv::DecodeWish> all = {{kv::DecodeKind::kTp, 1}};
  for (int c = 2; c <= rank_count; ++c) {
    if (rank_count % c == 0) all.push_back({kv::DecodeKind::kDcp, c});
  }
  all.push_back({kv::DecodeKind::kDp, 1});
  return all;
}

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
  cost.rank_count = limits.rank_count;
  return cost;
}

// One decode step of a request of so many tokens, sampled at rank 0: vocabulary slices differ by a row, so
// "rows" differs by a few bytes from one sampler to the next.
void fill_crossed_of_step(const kv::CostModel& model, const controlplane::Placement& placement,
                          int64_t tokens, int origin, wire::GroupingCost* to) {
  kv::CostSpan span;
  span.start = tokens;
  span.grouping = placement.grouping;
  span.index_c = placement.index_c;
  span.residency = placement.residency;
  span.origin = origin;
  span.head_rows = 1;
  fill_crossed(kv::total_step_cost(model, span).crossed, to->mutable_per_step());
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

void fill_costs(const RequestRecord& record, const controlplane::ControlPlane& plane,
                const wire::ModelDescription& model,
                google::protobuf::RepeatedPtrField<wire::GroupingCost>* to) {
  const controlplane::Limits& limits = plane.limits();
  const kv::CostModel costs = cost_model(limits, model);
  const auto snapshot = plane.request(record.id);
  const bool running = snapshot && snapshot->state != controlplane::RequestState::kWaiting;
  const int64_t tokens =
      running ? snapshot->computed_tokens : record.prompt_tokens + record.completion_tokens;
  const int origin = running ? snapshot->origin : 0;
  const int dp_rank = running ? snapshot->placement.grouping.base : 0;
  std::vector<kv::IndexWish> indexes = {kv::IndexKind::kCopied};
  if (limits.uses(kv::Stream::kIndexKeys) && limits.rank_count > 1) {
    indexes.push_back(kv::IndexKind::kSplit);
    const kv::IndexWish asked = running ? snapshot->wish.index : record.wish.index;
    if (asked.c != 0) indexes.push_back(asked);
  }
  for (const kv::DecodeWish wish : wishes(limits.rank_count)) {
    for (const kv::IndexWish index : indexes) {
      if (wish.kind == kv::DecodeKind::kDp && !(index == kv::IndexKind::kCopied)) continue;  // the same
      const auto placement = controlplane::placement_of(limits, wish, index, dp_rank);
      wire::GroupingCost* line = to->Add();
      line->set_decode(kv::decode_name(wish));
      line->set_index(kv::index_name(index));
      line->set_present(running && snapshot->placement == placement);
      fill_stored(kv::stored_bytes(limits.geometry, placement.residency, tokens, origin, limits.rank_count),
                  limits.rank_count, line->mutable_stored());
      fill_crossed_of_step(costs, placement, tokens, origin, line);
      line->set_step_ns(static_cast<uint64_t>(latest_step_ns(record, placement)));
      if (!running) continue;
      controlplane::GroupingWish asked = snapshot->wish;
      asked.decode = wish;
      asked.index = index;
      if (const auto price = plane.price(record.id, asked)) {
        line->set_change_bytes(static_cast<uint64_t>(price->bytes_moved));
      }
    }
  }
}

}  // namespace weft::daemon
