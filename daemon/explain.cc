#include "daemon/explain.h"

#include "controlplane/placement.h"

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

}  // namespace

void fill_costs(const RequestRecord& record, const controlplane::ControlPlane& plane,
                const wire::ModelDescription& model,
                google::protobuf::RepeatedPtrField<wire::GroupingCost>* to) {
  (void)model;
  const controlplane::Limits& limits = plane.limits();
  const auto snapshot = plane.request(record.id);
  const bool running = snapshot && snapshot->state != controlplane::RequestState::kWaiting;
  const int64_t tokens =
      running ? snapshot->computed_tokens : record.prompt_tokens + record.completion_tokens;
  const int origin = running ? snapshot->origin : 0;
  const int dp_rank = running ? snapshot->placement.grouping.base : 0;
  std::vector<kv::IndexKind> kinds = {kv::IndexKind::kCopied};
  if (limits.uses(kv::Stream::kIndexKeys) && limits.rank_count > 1) kinds.push_back(kv::IndexKind::kSplit);
  for (const kv::DecodeWish wish : wishes(limits.rank_count)) {
    for (const kv::IndexKind kind : kinds) {
      if (wish.kind == kv::DecodeKind::kDp && kind == kv::IndexKind::kSplit) continue;  // the same as copied
      const auto placement = controlplane::placement_of(limits, wish, kind, dp_rank);
      wire::GroupingCost* line = to->Add();
      line->set_decode(kv::decode_name(wish));
      line->set_index(kv::index_name(kind));
      line->set_present(running && snapshot->placement == placement);
      StoredBytes stored{};
      for (int rank = 0; rank < limits.rank_count; ++rank) {
        for (const kv::Stream stream : {kv::Stream::kEntries, kv::Stream::kIndexKeys}) {
          const kv::Pattern pattern =
              stream == kv::Stream::kEntries ? placement.residency.entries : placement.residency.index_keys;
          int64_t pages = 0;
          for (int64_t block = 0; block < ceil_div(tokens, limits.geometry.block_tokens); ++block) {
            pages += holds(kv::pattern_holders(pattern, block, origin, limits.rank_count), rank) ? 1 : 0;
          }
          stored[static_cast<size_t>(stream)][static_cast<size_t>(rank)] =
              pages * limits.geometry.page_bytes(stream);
        }
      }
      fill_stored(stored, limits.rank_count, line->mutable_stored());
      if (line->present()) line->set_step_ns(static_cast<uint64_t>(record.last_step_ns));
      if (!running) continue;
      controlplane::GroupingWish asked = snapshot->wish;
      asked.decode = wish;
      asked.index = kind;
      if (const auto price = plane.price(record.id, asked)) {
        line->set_change_bytes(static_cast<uint64_t>(price->bytes_moved));
      }
    }
  }
}

}  // namespace weft::daemon
