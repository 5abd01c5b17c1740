#include "kv/layout.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <optional>

#include "proto/vocab/check.h"
#include "proto/vocab/random.h"
#include "proto/vocab/units.h"

namespace weft::kv {
namespace {

constexpr const char* kIndexNames[] = {"copied", "split"};
constexpr const char* kSplitNames[kSplits] = {"none", "zigzag", "interleave", "contiguous"};

int width_of(Pattern pattern, int rank_count) { return pattern.width == 0 ? rank_count : pattern.width; }

// "name(7)" → 7.
std::optional<int> number_in(const std::string& text, const std::string& name) {
  if (!text.starts_with(name + "(") || !text.ends_with(")")) return std::nullopt;
  int value = 0;
  const char* last = text.data() + text.size() - 1;
  const auto [end, failure] = std::from_chars(text.data() + name.size() + 1, last, value);
  if (failure != std::errc{} || end != last) return std::nullopt;
  return value;
}

}  // namespace

const char* stream_name(Stream stream) { return stream == Stream::kEntries ? "entries" : "index keys"; }

int canonical_shard(int64_t block) { return residue_class(block, kShards); }

int residue_class(int64_t block, int c) {
  CHECK_GE(block, 0);
  CHECK_GE(c, 1);
  const int64_t modulus = kShards % c == 0 ? kShards : c;
  const uint64_t turn = mix64(static_cast<uint64_t>(block / modulus)) % static_cast<uint64_t>(modulus);
  const auto shard = static_cast<int>((static_cast<uint64_t>(block) + turn) % static_cast<uint64_t>(modulus));
  return shard % c;
}

int common_classes(int c, int d) {
  if (c == d) return c;
  return kShards % c == 0 && kShards % d == 0 ? std::gcd(c, d) : 1;
}

Pattern replicated() { return {PatternKind::kReplicated, 0}; }
Pattern striped(int c) {
  CHECK_GE(c, 1);
  return c == 1 ? replicated() : Pattern{PatternKind::kStriped, c};
}
Pattern single(int rank) { return {PatternKind::kSingle, rank}; }

RankMask pattern_holders(Pattern pattern, int64_t block, int origin, int rank_count) {
  if (pattern.kind == PatternKind::kSingle) return mask_of(pattern.argument);
  const int c = pattern.c(), width = width_of(pattern, rank_count);
  if (c == 1) return all_ranks(width) << pattern.base;
  CHECK_EQ(width % c, 0);
  RankMask mask = 0;
  for (int member = class_owner(residue_class(block, c), origin, c); member < width; member += c) {
    mask |= mask_of(pattern.base + member);
  }
  return mask;
}

std::string grouping_name(const Grouping& grouping, int rank_count) {
  const std::string inside = grouping.c == 1 ? "tp" : "dcp(" + std::to_string(grouping.c) + ")";
  if (grouping.base == 0 && grouping.width == rank_count) return inside;
  const std::string first = std::to_string(grouping.base);
  if (grouping.width == 1) return "dp(rank " + first + ")";
  return "dp(ranks " + first + "-" + std::to_string(grouping.base + grouping.width - 1) + ")x" + inside;
}

Result<DecodeWish> parse_decode(const std::string& text, int rank_count) {
  DecodeWish wish;
  std::string inside = text;
  const size_t times = text.find(")x");
  const std::optional<int> group =
      times == std::string::npos ? std::nullopt : number_in(text.substr(0, times + 1), "dp");
  if (group) inside = text.substr(times + 2);
  const int ranks = group.value_or(rank_count);
  if (inside == "tp") {
    wish = {DecodeKind::kTp, 1};
  } else if (inside == "dp" && !group) {
    wish = {DecodeKind::kDp, 1};
  } else if (inside == "dcp") {
    wish = {DecodeKind::kDcp, ranks};
  } else if (const std::optional<int> c = number_in(inside, "dcp")) {
    wish = {DecodeKind::kDcp, *c};
  } else {
    return error(ErrorCode::kInvalidArgument,
                 "'" + text + "' is not one of tp, dp, dcp, dcp(c), dp(g)xtp, dp(g)xdcp(c)", "decode");
  }
  // A group of all ranks is no group, and one of a single rank is plain dp.
  if (group && *group != rank_count) wish = {DecodeKind::kDp, wish.c, *group};
  TRY_VOID(validate_decode(wish, rank_count));
  return wish;
}

std::string decode_name(DecodeWish wish) {
  const std::string inside = wish.c == 1 ? "tp" : "dcp(" + std::to_string(wish.c) + ")";
  switch (wish.kind) {
    case DecodeKind::kTp:
      return "tp";
    case DecodeKind::kDp:
      return wish.width == 1 ? "dp" : "dp(" + std::to_string(wish.width) + ")x" + inside;
    case DecodeKind::kDcp:
      return "dcp(" + std::to_string(wish.c) + ")";
  }
  return "?";
}

std::vector<DecodeWish> decode_wishes(int rank_count) {
  std::vector<DecodeWish> wishes = {{DecodeKind::kTp, 1}};
  for (int c = 2; c <= rank_count; ++c) {
    if (rank_count % c == 0) wishes.push_back({DecodeKind::kDcp, c});
  }
  for (int width = 1; width < std::max(rank_count, 2); ++width) {
    for (int c = 1; c <= width && rank_count % width == 0; ++c) {
      if (width % c == 0) wishes.push_back({DecodeKind::kDp, c, width});
    }
  }
  return wishes;
}

Result<void> validate_decode(DecodeWish wish, int rank_count) {
  const int width = wish.kind == DecodeKind::kDp ? wish.width : rank_count;
  if (width < 1 || width > rank_count || rank_count % width != 0) {
    return error(ErrorCode::kInvalidArgument,
                 decode_name(wish) + ": a group's ranks must divide the number of workers, " +
                     std::to_string(rank_count),
                 "decode");
  }
  if (wish.c < 1 || wish.c > width || width % wish.c != 0) {
    return error(ErrorCode::kInvalidArgument,
                 decode_name(wish) + ": c must divide the number of workers" +
                     (width == rank_count ? "" : " in the group") + ", " + std::to_string(width),
                 "decode");
  }
  return {};
}

Result<IndexWish> parse_index(const std::string& text, int rank_count) {
  for (const IndexKind kind : {IndexKind::kCopied, IndexKind::kSplit}) {
    const char* name = kIndexNames[static_cast<int>(kind)];
    if (text == name) return IndexWish(kind);
    const std::optional<int> c = number_in(text, name);
    if (!c) continue;
    if (*c < 1 || *c > rank_count || rank_count % *c != 0) {
      return error(ErrorCode::kInvalidArgument,
                   text + ": the number must divide the number of workers, " + std::to_string(rank_count),
                   "index");
    }
    return IndexWish(kind, *c);
  }
  return error(ErrorCode::kInvalidArgument, "'" + text + "' is not one of copied, copied(c), split, split(c)",
               "index");
}

std::string index_name(IndexWish wish) {
  const std::string name = kIndexNames[static_cast<int>(wish.kind)];
  return wish.c == 0 ? name : name + "(" + std::to_string(wish.c) + ")";
}

int index_parts(const Grouping& grouping, IndexWish wish) {
  if (wish.c != 0) return std::gcd(wish.c, grouping.width);
  if (wish.kind == IndexKind::kCopied) return 1;
  return grouping.c == 1 ? grouping.width : grouping.c;
}

int64_t first_offer(int64_t top_k, int c) {
  CHECK(top_k > 0 && c > 0);
  const double share = static_cast<double>(top_k) / c;
  return std::min(top_k, static_cast<int64_t>(std::ceil(share + 6 * std::sqrt(share * (1 - 1.0 / c)))));
}

Pattern group_pattern(const Grouping& grouping, int c, int rank_count) {
  if (grouping.width == 1 && rank_count > 1) return single(grouping.base);
  Pattern pattern = striped(c);
  if (grouping.width < rank_count) {
    pattern.base = grouping.base;
    pattern.width = grouping.width;
  }
  return pattern;
}

Residency residency_of(const Grouping& grouping, IndexWish index, int rank_count) {
  const int stripes = index.kind == IndexKind::kCopied ? 1 : index_parts(grouping, index);
  return {group_pattern(grouping, grouping.c, rank_count), group_pattern(grouping, stripes, rank_count)};
}

Result<Split> parse_split(const std::string& text) {
  for (int i = 0; i < kSplits; ++i) {
    if (text == kSplitNames[i]) return static_cast<Split>(i);
  }
  return error(ErrorCode::kInvalidArgument,
               "'" + text + "' is not one of none, zigzag, interleave, contiguous", "prefill");
}

const char* split_name(Split split) { return kSplitNames[static_cast<int>(split)]; }

Range segment_items(int segment, int64_t item_count) {
  return {segment * item_count / kShards, (segment + 1) * item_count / kShards};
}

Range segment_columns(int segment, int64_t column_count) {
  const Range units = segment_items(segment, ceil_div(column_count, kColumnUnit));
  return {std::min(units.begin * kColumnUnit, column_count), std::min(units.end * kColumnUnit, column_count)};
}

Range owned_segments(int member, int width) {
  return {int64_t{member} * kShards / width, int64_t{member + 1} * kShards / width};
}

Range owned_heads(int member, int width, int64_t head_count) {
  const Range segments = owned_segments(member, width);
  return {segments.begin * head_count / kShards, segments.end * head_count / kShards};
}

Range rank_heads(const Grouping& grouping, int rank, int64_t head_count) {
  if (!grouping.contains(rank)) return {};
  return owned_heads(rank - grouping.base, grouping.width, head_count);
}

Range group_heads(const Grouping& grouping, int rank, int64_t head_count) {
  if (!grouping.contains(rank)) return {};
  const int first = (rank - grouping.base) / grouping.c * grouping.c;
  return {owned_heads(first, grouping.width, head_count).begin,
          owned_heads(first + grouping.c - 1, grouping.width, head_count).end};
}

std::vector<TreeNode> tree_nodes(Range segments) {
  std::vector<TreeNode> nodes;
  auto at = static_cast<int>(segments.begin);
  const auto end = static_cast<int>(segments.end);
  while (at < end) {
    int count = 1;
    while (count < kShards && at % (2 * count) == 0 && at + 2 * count <= end) count *= 2;
    nodes.push_back({at, count});
    at += count;
  }
  return nodes;
}

Result<void> validate(const CacheGeometry& geometry) {
  for (const StreamGeometry& stream : geometry.streams) {
    if (stream.parts < 1 || stream.parts > kMaxParts) {
      return error(ErrorCode::kInvalidArgument,
                   std::to_string(stream.parts) + " KV heads; a block has 1 to " + std::to_string(kMaxParts) +
                       " parts",
                   "parts");
    }
    if (geometry.heads < 1 || geometry.heads % stream.parts != 0) {
      return error(ErrorCode::kInvalidArgument,
                   std::to_string(geometry.heads) + " query heads are no multiple of " +
                       std::to_string(stream.parts) + " KV heads",
                   "heads");
    }
  }
  return {};
}

Range held_parts(const CacheGeometry& geometry, Stream stream, Pattern pattern, int rank, int rank_count) {
  const int64_t parts = geometry.stream(stream).parts;
  if (pattern.kind == PatternKind::kSingle) return {0, parts};
  const Grouping group{pattern.base, width_of(pattern, rank_count), pattern.c()};
  if (!group.contains(rank)) return {};
  if (parts == 1) return {0, 1};
  const Range heads = group_heads(group, rank, geometry.heads);
  if (heads.empty()) return {};
  const int64_t heads_per_part = geometry.heads / parts;
  return {heads.begin / heads_per_part, ceil_div(heads.end, heads_per_part)};
}

RankMask part_holders(const CacheGeometry& geometry, const Residency& residency, int64_t block, int part,
                      int origin, int rank_count) {
  const Stream stream = geometry.stream_of(part);
  const int64_t index = part - geometry.first_part(stream);
  const RankMask ranks = pattern_holders(residency.of(stream), block, origin, rank_count);
  RankMask holders = 0;
  for (RankMask left = ranks; left != 0; left &= left - 1) {
    const int rank = lowest_rank(left);
    const Range held = held_parts(geometry, stream, residency.of(stream), rank, rank_count);
    if (index >= held.begin && index < held.end) holders |= mask_of(rank);
  }
  return holders;
}

HolderTable::HolderTable(const CacheGeometry& geometry, const Residency& residency, int origin,
                         int rank_count)
    : residency_(residency), origin_(origin) {
  for (int part = 0; part < geometry.parts(); ++part) {
    Part& of = parts_.emplace_back();
    of.c = residency.of(geometry.stream_of(part)).c();
    // A block of each class.
    RankMask found = 0;
    for (int64_t block = 0; found != all_ranks(of.c); ++block) {
      const int residue = residue_class(block, of.c);
      found |= mask_of(residue);
      of.by_class[static_cast<size_t>(residue)] =
          part_holders(geometry, residency, block, part, origin, rank_count);
    }
  }
}

int64_t max_block_pages(const CacheGeometry& geometry, int rank_count) {
  int64_t pages = 0;
  for (const Stream stream : kAllStreams) {
    if (geometry.stream(stream).used_parts() == 0) continue;
    // Groups that merge share parts, so the smallest groups store the most; on one rank lies every part once.
    for (int rank = 0; rank < rank_count; ++rank) {
      pages += held_parts(geometry, stream, replicated(), rank, rank_count).size();
    }
  }
  return pages;
}

StoredBytes stored_bytes(const CacheGeometry& geometry, const Residency& residency, int64_t token_count,
                         int origin, int rank_count) {
  StoredBytes bytes{};
  for (const Stream stream : kAllStreams) {
    const Pattern pattern = residency.of(stream);
    std::array<int64_t, kMaxRanks> block_bytes{};
    for (int rank = 0; rank < rank_count; ++rank) {
      block_bytes[static_cast<size_t>(rank)] =
          held_parts(geometry, stream, pattern, rank, rank_count).size() * geometry.page_bytes(stream);
    }
    for (int64_t block = 0; block < ceil_div(token_count, geometry.block_tokens); ++block) {
      for (RankMask left = pattern_holders(pattern, block, origin, rank_count); left != 0; left &= left - 1) {
        const auto rank = static_cast<size_t>(lowest_rank(left));
        bytes[static_cast<size_t>(stream)][rank] += block_bytes[rank];
      }
    }
  }
  return bytes;
}

double bytes_per_token_per_rank(const CacheGeometry& geometry, const Residency& residency, int rank_count) {
  double bytes = 0;
  for (const Stream stream : kAllStreams) {
    const Pattern pattern = residency.of(stream);
    const StreamGeometry& data = geometry.stream(stream);
    int64_t parts = 0;  // stored of one token by the ranks together, if each had every token
    for (int rank = 0; rank < rank_count; ++rank) {
      if (pattern.kind == PatternKind::kSingle && rank != pattern.argument) continue;
      parts += held_parts(geometry, stream, pattern, rank, rank_count).size();
    }
    bytes +=
        static_cast<double>(data.layers * data.bytes_per_token) * static_cast<double>(parts) / pattern.c();
  }
  return bytes / rank_count;
}

double capacity_factor(const CacheGeometry& geometry, const Residency& residency, int rank_count) {
  return static_cast<double>(geometry.token_bytes()) /
         bytes_per_token_per_rank(geometry, residency, rank_count);
}

int64_t change_bytes(const CacheGeometry& geometry, Stream stream, RankMask old_holders,
                     RankMask new_holders) {
  return rank_count_of(new_holders & ~old_holders) * geometry.page_bytes(stream);
}

}  // namespace weft::kv
