#include "controlplane/placement.h"

#include <numeric>

#include "proto/vocab/check.h"

namespace weft::controlplane {

Placement placement_of(const Limits& limits, kv::DecodeWish decode, kv::IndexWish index, int dp_rank) {
  const int ranks = limits.rank_count;
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
      placement.grouping = {dp_rank, 1, 1};
      break;
  }
  placement.residency = kv::residency_of(placement.grouping, placement.index, ranks);
  placement.index_c = kv::index_parts(placement.grouping, placement.index);
  return placement;
}

std::vector<int> placement_choices(const Limits& limits, kv::DecodeWish decode) {
  std::vector<int> ranks(decode.kind == kv::DecodeKind::kDp ? static_cast<size_t>(limits.rank_count) : 1);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::string placement_name(const Limits& limits, const Placement& placement) {
  return kv::grouping_name(placement.grouping, limits.rank_count) + ", index " +
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

BlockNeeds::BlockNeeds(const Limits& limits, const kv::Residency& residency, int64_t first, int64_t last)
    : limits_(limits), residency_(residency), blocks_(last > first ? last - first : 0) {
  for (const kv::Stream stream : kv::kAllStreams) {
    const kv::Pattern pattern = residency.of(stream);
    if (pattern.kind != kv::PatternKind::kStriped || !limits.uses(stream)) continue;
    auto& counts = by_class_[static_cast<size_t>(stream)];
    for (int64_t block = first; block < last; ++block) {
      ++counts[static_cast<size_t>(kv::residue_class(block, pattern.argument))];
    }
  }
}

PageCounts BlockNeeds::pages(int origin) const {
  PageCounts need;
  for_each_pool(limits_.rank_count, [&](kv::Stream stream, int rank) {
    if (!limits_.uses(stream)) return;
    const kv::Pattern pattern = residency_.of(stream);
    int64_t blocks = blocks_;
    if (pattern.kind == kv::PatternKind::kSingle && pattern.argument != rank) blocks = 0;
    if (pattern.kind == kv::PatternKind::kStriped) {
      const int c = pattern.argument;
      const int owned = kv::owned_class(rank % c, origin, c);
      blocks = by_class_[static_cast<size_t>(stream)][static_cast<size_t>(owned)];
    }
    need.at(stream, rank) =
        blocks * kv::held_parts(limits_.geometry, stream, pattern, rank, limits_.rank_count).size();
  });
  return need;
}

}  // namespace weft::controlplane
