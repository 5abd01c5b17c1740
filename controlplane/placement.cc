#include "controlplane/placement.h"

#include <numeric>
#include <tuple>

#include "kv/cost.h"
#include "proto/vocab/check.h"

namespace weft::controlplane {

GroupingWish fitted(GroupingWish wish, int rank_count) {
  kv::DecodeWish& decode = wish.decode;
  if (decode.kind == kv::DecodeKind::kDp) decode.width = std::gcd(decode.width, rank_count);
  if (decode.kind != kv::DecodeKind::kTp) {
    decode.c = std::gcd(decode.c, decode.kind == kv::DecodeKind::kDp ? decode.width : rank_count);
  }
  if (wish.index.c > 0) wish.index.c = std::gcd(wish.index.c, rank_count);
  return wish;
}

Placement placement_of(const Limits& limits, kv::DecodeWish decode, kv::IndexWish index, int dp_rank) {
  const int ranks = limits.places();
  GroupingWish wish;
  wish.decode = decode;
  wish.index = index;
  std::tie(decode, index) = std::pair(fitted(wish, ranks).decode, fitted(wish, ranks).index);
  Placement placement;
  placement.kind = decode.kind;
  placement.index = limits.uses(kv::Stream::kIndexKeys) ? index : kv::IndexWish();
  switch (decode.kind) {
    case kv::DecodeKind::kTp:
      placement.grouping = {0, ranks, 1};
      break;
    case kv::DecodeKind::kDcp:
      placement.grouping = {0, ranks, decode.c};
      break;
    case kv::DecodeKind::kDp:
      placement.grouping = {dp_rank / decode.width * decode.width, decode.width, decode.c};
      break;
  }
  placement.residency = kv::residency_of(placement.grouping, placement.index, ranks);
  placement.index_c = kv::index_parts(placement.grouping, placement.index);
  return placement;
}

std::vector<int> placement_choices(const Limits& limits, kv::DecodeWish decode) {
  if (decode.kind != kv::DecodeKind::kDp) return {0};
  decode.width = std::gcd(decode.width, limits.places());
  std::vector<int> bases;
  for (int base = 0; base < limits.places(); base += decode.width) bases.push_back(base);
  return bases;
}

std::string placement_name(const Limits& limits, const Placement& placement) {
  return kv::grouping_name(placement.grouping, limits.places()) + ", index " +
         kv::index_name(placement.index);
}

kv::Split chunk_split(kv::Split wish, int64_t rows, bool no_write, int rank_count) {
  if (no_write || rank_count == 1) return kv::Split::kShared;
  switch (wish) {
    case kv::Split::kShared:
      return wish;
    case kv::Split::kZigzag:
      return rows < 2 * rank_count ? kv::Split::kShared : wish;
    case kv::Split::kInterleave:
    case kv::Split::kContiguous:
      return rows < rank_count ? kv::Split::kShared : wish;
  }
  return kv::Split::kShared;
}

bool passes_query(const Limits& limits, const Placement& placement, kv::Split split, kv::ContextPath path,
                  int64_t start, int64_t rows, int origin) {
  if (split == kv::Split::kShared || path == kv::ContextPath::kPassKv) return false;
  if (limits.index_topk > 0 && start + rows > limits.index_topk) return false;
  if (path == kv::ContextPath::kPassQ) return true;
  if (limits.query_bytes == 0) return false;
  kv::CostModel model;
  model.geometry = limits.geometry;
  model.query_bytes = limits.query_bytes;
  model.value_width = limits.value_width;
  model.index_topk = limits.index_topk;
  model.layers = limits.geometry.stream(kv::Stream::kEntries).layers;
  model.window = limits.window;
  model.window_layers = limits.window_layers;
  model.rank_count = limits.places();
  kv::CostSpan span;
  span.start = start;
  span.rows = rows;
  span.split = split;
  span.grouping = placement.grouping;
  span.residency = placement.residency;
  span.origin = origin;
  const auto bytes = [&](kv::ContextPath with) {
    span.mechanisms.context = with;
    int64_t sum = 0;
    for (const int64_t kind : kv::total_step_cost(model, span).crossed.by_kind) sum += kind;
    return sum;
  };
  return bytes(kv::ContextPath::kPassQ) < bytes(kv::ContextPath::kPassKv);
}

BlockNeeds::BlockNeeds(const Limits& limits, const kv::Residency& residency, int64_t first, int64_t last)
    : limits_(limits), residency_(residency), blocks_(last > first ? last - first : 0) {
  for (const kv::Stream stream : kv::kAllStreams) {
    const kv::Pattern pattern = residency.of(stream);
    if (pattern.kind != kv::PatternKind::kStriped || !limits.uses(stream)) continue;
    auto& counts = by_class_[static_cast<size_t>(stream)];
    // Every run of V blocks (of c, where c does not divide V) has equally many of each class.
    const int c = pattern.argument;
    const int64_t run = kv::kShards % c == 0 ? kv::kShards : c;
    const int64_t whole_first = round_up(first, run), whole_last = last / run * run;
    const auto count_each = [&](int64_t from, int64_t to) {
      for (int64_t block = from; block < to; ++block)
        ++counts[static_cast<size_t>(kv::residue_class(block, c))];
    };
    if (whole_first >= whole_last) {
      count_each(first, last);
      continue;
    }
    count_each(first, whole_first);
    count_each(whole_last, last);
    for (int k = 0; k < c; ++k) counts[static_cast<size_t>(k)] += (whole_last - whole_first) / c;
  }
}

PageCounts BlockNeeds::pages(int origin) const {
  PageCounts need;
  const kv::Topology ranks = limits_.active();
  for_each_pool(ranks.count(), [&](kv::Stream stream, int place) {
    if (!limits_.uses(stream)) return;
    const kv::Pattern pattern = residency_.of(stream);
    int64_t blocks = blocks_;
    if (pattern.kind == kv::PatternKind::kSingle && pattern.argument != place) blocks = 0;
    const kv::Range parts = kv::held_parts(limits_.geometry, stream, pattern, place, ranks.count());
    if (pattern.kind == kv::PatternKind::kStriped && !parts.empty()) {
      const int c = pattern.argument;
      const int owned = kv::owned_class((place - pattern.base) % c, origin, c);
      blocks = by_class_[static_cast<size_t>(stream)][static_cast<size_t>(owned)];
    }
    need.at(stream, ranks.rank(place)) = blocks * parts.size();
  });
  return need;
}

}  // namespace weft::controlplane
