#include "kv/layout.h"

#include <algorithm>
#include <charconv>

#include "proto/vocab/check.h"
#include "proto/vocab/random.h"
#include "proto/vocab/units.h"

namespace weft::kv {

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

Pattern replicated() { return {PatternKind::kReplicated, 0}; }
Pattern striped(int c) {
  CHECK_GE(c, 1);
  return c == 1 ? replicated() : Pattern{PatternKind::kStriped, c};
}
Pattern single(int rank) { return {PatternKind::kSingle, rank}; }

RankMask pattern_holders(Pattern pattern, int64_t block, int origin, int rank_count) {
  switch (pattern.kind) {
    case PatternKind::kReplicated:
      return all_ranks(rank_count);
    case PatternKind::kSingle:
      return mask_of(pattern.argument);
    case PatternKind::kStriped: {
      const int c = pattern.argument;
      CHECK_EQ(rank_count % c, 0);
      RankMask mask = 0;
      for (int rank = class_owner(residue_class(block, c), origin, c); rank < rank_count; rank += c) {
        mask |= mask_of(rank);
      }
      return mask;
    }
  }
  return 0;
}

std::string grouping_name(const Grouping& grouping, int rank_count) {
  const bool whole = grouping.base == 0 && grouping.width == rank_count;
  if (whole) return grouping.c == 1 ? "tp" : "dcp(" + std::to_string(grouping.c) + ")";
  if (grouping.width == 1) return "dp(rank " + std::to_string(grouping.base) + ")";
  return "(" + std::to_string(grouping.base) + "," + std::to_string(grouping.width) + "," +
         std::to_string(grouping.c) + ")";
}

Result<DecodeWish> parse_decode(const std::string& text, int rank_count) {
  DecodeWish wish;
  if (text == "tp") {
    wish = {DecodeKind::kTp, 1};
  } else if (text == "dp") {
    wish = {DecodeKind::kDp, 1};
  } else if (text == "dcp") {
    wish = {DecodeKind::kDcp, rank_count};
  } else if (text.starts_with("dcp(") && text.ends_with(")")) {
    wish.kind = DecodeKind::kDcp;
    const char* first = text.data() + 4;
    const char* last = text.data() + text.size() - 1;
    const auto [end, failure] = std::from_chars(first, last, wish.c);
    if (failure != std::errc{} || end != last) {
      return error(ErrorCode::kInvalidArgument, "'" + text + "' is not a decode grouping", "decode");
    }
  } else {
    return error(ErrorCode::kInvalidArgument, "'" + text + "' is not one of tp, dp, dcp, dcp(c)", "decode");
  }
  TRY_VOID(validate_decode(wish, rank_count));
  return wish;
}

std::string decode_name(DecodeWish wish) {
  switch (wish.kind) {
    case DecodeKind::kTp:
      return "tp";
    case DecodeKind::kDp:
      return "dp";
    case DecodeKind::kDcp:
      return "dcp(" + std::to_string(wish.c) + ")";
  }
  return "?";
}

Result<void> validate_decode(DecodeWish wish, int rank_count) {
  if (wish.kind != DecodeKind::kDcp) return {};
  if (wish.c < 1 || wish.c > rank_count || rank_count % wish.c != 0) {
    return error(ErrorCode::kInvalidArgument,
                 "dcp(" + std::to_string(wish.c) + "): c must divide the number of workers, " +
                     std::to_string(rank_count),
                 "decode");
  }
  return {};
}

Result<IndexKind> parse_index(const std::string& text) {
  if (text == "copied") return IndexKind::kCopied;
  if (text == "split") return IndexKind::kSplit;
  return error(ErrorCode::kInvalidArgument, "'" + text + "' is not one of copied, split", "index");
}
const char* index_name(IndexKind kind) { return kind == IndexKind::kCopied ? "copied" : "split"; }

int index_split(const Grouping& grouping, IndexKind kind) {
  if (kind == IndexKind::kCopied) return 1;
  return grouping.c == 1 ? grouping.width : grouping.c;
}

Residency residency_of(const Grouping& grouping, IndexKind kind, int rank_count) {
  if (grouping.width == 1 && rank_count > 1) return {single(grouping.base), single(grouping.base)};
  CHECK(grouping.base == 0 && grouping.width == rank_count,
        "a group of several ranks spans all of them: ", grouping.base, " ", grouping.width);
  return {striped(grouping.c), striped(index_split(grouping, kind))};
}

Result<Split> parse_split(const std::string& text) {
  if (text == "none") return Split::kShared;
  if (text == "zigzag") return Split::kZigzag;
  if (text == "interleave") return Split::kInterleave;
  return error(ErrorCode::kInvalidArgument, "'" + text + "' is not one of none, zigzag, interleave",
               "prefill");
}

const char* split_name(Split split) {
  switch (split) {
    case Split::kShared:
      return "none";
    case Split::kZigzag:
      return "zigzag";
    case Split::kInterleave:
      return "interleave";
  }
  return "?";
}

int row_owner(Split split, int64_t row, int64_t row_count, int ranks) {
  CHECK(split != Split::kShared);
  CHECK(row >= 0 && row < row_count, row, " of ", row_count);
  if (split == Split::kInterleave) return static_cast<int>(row % ranks);
  const int64_t piece = row / ceil_div(row_count, 2 * ranks);
  return static_cast<int>(piece < ranks ? piece : 2 * ranks - 1 - piece);
}

std::vector<int64_t> causal_pairs(Split split, int64_t start, int64_t row_count, int ranks) {
  std::vector<int64_t> pairs(static_cast<size_t>(ranks), 0);
  for (int64_t row = 0; row < row_count; ++row) {
    pairs[static_cast<size_t>(row_owner(split, row, row_count, ranks))] += start + row + 1;
  }
  return pairs;
}

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
  if (parts == 1 || pattern.kind == PatternKind::kSingle) return {0, parts};
  const int c = pattern.kind == PatternKind::kStriped ? pattern.argument : 1;
  const int first = rank / c * c;
  const int64_t begin = owned_heads(first, rank_count, geometry.heads).begin;
  const int64_t end = owned_heads(first + c - 1, rank_count, geometry.heads).end;
  if (begin >= end) return {};
  const int64_t heads_per_part = geometry.heads / parts;
  return {begin / heads_per_part, ceil_div(end, heads_per_part)};
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
    const int c = pattern.kind == PatternKind::kStriped ? pattern.argument : 1;
    bytes += static_cast<double>(data.layers * data.bytes_per_token) * static_cast<double>(parts) / c;
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
