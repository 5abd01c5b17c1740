// Where cache bytes belong: pure arithmetic on blocks, shards, ranks and bytes.
//
// Every process computes the same answers from the same few integers; nothing here has state. The
// rules are those of docs/architecture.md, "Residency" and "Bits do not depend on the grouping".
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"

namespace weft::kv {

// V: the number of canonical attention shards and of row-parallel segments. A constant of the deployment.
inline constexpr int kShards = 8;

// v(b) = (b + h(b div V)) mod V: round robin, turned at random inside every run of V blocks, so that no
// stride in a text loads one rank. h = mix64 (proto/vocab/random.h).
int canonical_shard(int64_t block);

// The residue class of block b when the cache is split over c ranks. For c dividing V it is
// canonical_shard(b) mod c, so a rank owns a whole subtree of shards. For other c it is
// (b + h(b div c)) mod c: even load, but tolerance instead of equal bits.
int residue_class(int64_t block, int c);
// Where blocks are dealt out over c ranks and, otherwise, over d: rank r's blocks of the one and rank q's of
// the other have nothing in common unless r = q modulo this.
int common_classes(int c, int d);

// The rank offset (0 … c−1 within its c ranks) that holds class k, and back: rank offset j holds the
// blocks with (class + origin) mod c = j.
constexpr int class_owner(int residue, int origin, int c) { return (residue + origin) % c; }
constexpr int owned_class(int rank_offset, int origin, int c) { return ((rank_offset - origin) % c + c) % c; }

// ---- streams ---------------------------------------------------------------------------------------

enum class Stream : uint8_t { kEntries = 0, kIndexKeys = 1 };
inline constexpr int kStreams = 2;
inline constexpr std::array<Stream, kStreams> kAllStreams = {Stream::kEntries, Stream::kIndexKeys};
const char* stream_name(Stream stream);  // "entries", "index keys"

// ---- placement -------------------------------------------------------------------------------------

enum class PatternKind : uint8_t { kReplicated = 0, kStriped = 1, kSingle = 2 };

// Which ranks hold the blocks of one stream of one sequence; which parts of them: held_parts(). Replicated
// and striped mean the ranks of a group, [base, base + width); width 0: all ranks.
struct Pattern {
  PatternKind kind = PatternKind::kReplicated;
  int argument = 0;  // striped: c; single: the rank
  int base = 0, width = 0;
  int c() const { return kind == PatternKind::kStriped ? argument : 1; }
  friend bool operator==(const Pattern&, const Pattern&) = default;
};
Pattern replicated();
Pattern striped(int c);  // striped(1) is replicated
Pattern single(int rank);

// The ranks whose residue class block b is of, under a pattern, of W ranks. c divides the group's width.
RankMask pattern_holders(Pattern pattern, int64_t block, int origin, int rank_count);

// ---- grouping --------------------------------------------------------------------------------------

// An attention grouping: ranks [base, base+width), heads split over the width, cache split over c.
// tp = (0, W, 1), dcp(c) = (0, W, c), dp on rank r = (r, 1, 1), dp(g)xdcp(c) = (base, g, c). c divides width,
// width divides W and base.
struct Grouping {
  int base = 0;
  int width = 1;
  int c = 1;
  bool contains(int rank) const { return rank >= base && rank < base + width; }
  RankMask mask() const { return all_ranks(width) << base; }
  friend bool operator==(const Grouping&, const Grouping&) = default;
};
// "tp", "dcp(4)", "dp(rank 2)", "dp(ranks 4-7)xdcp(2)"
std::string grouping_name(const Grouping& grouping, int rank_count);

// What a person asks for; dp leaves the ranks to the control plane.
enum class DecodeKind : uint8_t { kTp = 0, kDcp = 1, kDp = 2 };
struct DecodeWish {
  DecodeKind kind = DecodeKind::kTp;
  int c = 1;      // dcp, and inside a dp group
  int width = 1;  // dp only: ranks of a group
  friend bool operator==(const DecodeWish&, const DecodeWish&) = default;
};
// "tp", "dcp(4)", "dp" (one rank), "dp(4)xdcp(2)", "dp(4)xtp"; "dcp" alone is over all ranks there are.
Result<DecodeWish> parse_decode(const std::string& text, int rank_count);
std::string decode_name(DecodeWish wish);
// All wishes that mean something on W ranks, each once.
std::vector<DecodeWish> decode_wishes(int rank_count);
// A group's width divides W, and c that width, else kInvalidArgument naming both.
Result<void> validate_decode(DecodeWish wish, int rank_count);

// How index keys are placed: a copy per attention group member, or split over some of them.
enum class IndexKind : uint8_t { kCopied = 0, kSplit = 1 };
// What a person asks for. c is independent of the c of the entries; 0 leaves it to the grouping.
//   copied     each rank scores all keys
//   copied(c)  each rank scores one part of c, and the ranks exchange candidates
//   split      over c under dcp(c), over the whole width under tp
//   split(c)   over c ranks
struct IndexWish {
  IndexKind kind = IndexKind::kCopied;
  int c = 0;
  constexpr IndexWish(IndexKind of = IndexKind::kCopied, int parts = 0) : kind(of), c(parts) {}
  friend bool operator==(const IndexWish&, const IndexWish&) = default;
};
// c divides the number of ranks, else kInvalidArgument naming both.
Result<IndexWish> parse_index(const std::string& text, int rank_count);
std::string index_name(IndexWish wish);

// In how many parts, by residue class, the ranks of a grouping score its index keys; 1: each scores all. In a
// group narrower than asked for, the greatest common divisor.
int index_parts(const Grouping& grouping, IndexWish wish);
// How many of its best keys a rank of an index split over c offers first: its share top_k / c of the chosen
// ones and six standard deviations of it, if chance alone says who holds a chosen key; at most top_k.
int64_t first_offer(int64_t top_k, int c);

// The pattern of a stream that a grouping's ranks read in c parts.
Pattern group_pattern(const Grouping& grouping, int c, int rank_count);

struct Residency {
  Pattern entries;
  Pattern index_keys;
  Pattern of(Stream stream) const { return stream == Stream::kEntries ? entries : index_keys; }
  friend bool operator==(const Residency&, const Residency&) = default;
};
// The residency that covers the reader map of a grouping at the lowest number of copies.
Residency residency_of(const Grouping& grouping, IndexWish index, int rank_count);

// ---- rows of a prompt chunk over the ranks (PCP) -------------------------------------------------------

enum class Split : uint8_t {
  kShared = 0,      // "none": rows run under the decode grouping, like decode rows
  kZigzag = 1,      // 2C pieces, rank r owns pieces r and 2C−1−r; the rest: kv/row_split.h
  kInterleave = 2,  // row i belongs to rank i mod C
  kContiguous = 3,  // C pieces of ceil(n / C) rows, rank r owns piece r; the last ones may be short or empty
};
inline constexpr int kSplits = 4;
Result<Split> parse_split(const std::string& text);  // "none", "zigzag", "interleave", "contiguous"
const char* split_name(Split split);

// ---- canonical parts of contractions ------------------------------------------------------------------

// Half-open range [begin, end).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool empty() const { return begin >= end; }
  friend bool operator==(const Range&, const Range&) = default;
};
// Part s of V of n items: [⌊s n / V⌋, ⌊(s+1) n / V⌋). Heads of an o_proj segment, experts of a leaf.
Range segment_items(int segment, int64_t item_count);
// Columns of dense-MLP segment s: units of 64 columns, the same floor rule, the last unit may be short.
inline constexpr int64_t kColumnUnit = 64;
Range segment_columns(int segment, int64_t column_count);
// The segments that member i of a group of `width` ranks owns: [⌊i V / width⌋, ⌊(i+1) V / width⌋).
Range owned_segments(int member, int width);
// The heads of member i: those of its segments.
Range owned_heads(int member, int width, int64_t head_count);
// The same by rank: the heads that a rank owns in a grouping (none outside it), and those of its c-group.
Range rank_heads(const Grouping& grouping, int rank, int64_t head_count);
Range group_heads(const Grouping& grouping, int rank, int64_t head_count);

// A node of the tree of contiguous halves over the V segments: segments [first, first + count), count a
// power of two, first a multiple of count.
struct TreeNode {
  int first = 0;
  int count = 0;
  friend bool operator==(const TreeNode&, const TreeNode&) = default;
};
// The maximal tree nodes inside a range of segments, ascending. One node when the range is itself a node
// (always so for widths 1, 2, 4, 8).
std::vector<TreeNode> tree_nodes(Range segments);

// ---- bytes ----------------------------------------------------------------------------------------------

inline constexpr int kMaxParts = 64;  // of a stream

// One stream of cached data: how many layers keep it, in how many parts, and what one token costs in one part
// of one layer. A stream has one part (MLA entries, index keys) or one for each KV head (K ‖ V of
// grouped-query attention). A stream without layers is not used.
struct StreamGeometry {
  int64_t layers = 0;
  int64_t bytes_per_token = 0;  // per layer and part
  int parts = 1;
  int used_parts() const { return layers * bytes_per_token > 0 ? parts : 0; }
  int64_t token_bytes() const { return layers * bytes_per_token * parts; }
  friend bool operator==(const StreamGeometry&, const StreamGeometry&) = default;
};

// A page holds P tokens of one part of one stream for all its layers: [layer][P · bytes per token]. What lies
// where within a layer is the kernels' business (kernels/entry.h, kernels/indexer.h): FP8 index keys have
// their scales behind all keys.
//
// The parts of a block are numbered through over all streams in use: part k of the entries is number k, the
// index keys follow. Page tables and the control plane know parts by these numbers.
struct CacheGeometry {
  int64_t block_tokens = 64;  // P: a power of two, 8 … 256
  std::array<StreamGeometry, kStreams> streams{};
  int64_t heads = 1;  // query heads: KV head ⌊i / (heads / parts)⌋ is read by query head i
  const StreamGeometry& stream(Stream s) const { return streams[static_cast<size_t>(s)]; }
  int64_t page_bytes(Stream s) const { return block_tokens * stream(s).layers * stream(s).bytes_per_token; }
  int64_t layer_bytes(Stream s) const { return block_tokens * stream(s).bytes_per_token; }
  int64_t token_bytes() const { return streams[0].token_bytes() + streams[1].token_bytes(); }

  int parts() const { return streams[0].used_parts() + streams[1].used_parts(); }  // of a block
  int first_part(Stream s) const { return s == Stream::kEntries ? 0 : streams[0].used_parts(); }
  Stream stream_of(int part) const {
    return part < streams[0].used_parts() ? Stream::kEntries : Stream::kIndexKeys;
  }
};
// Parts are 1 … kMaxParts and divide the query heads, else kInvalidArgument.
Result<void> validate(const CacheGeometry& geometry);

// ---- parts by rank --------------------------------------------------------------------------------------
//
// A c-group is c consecutive ranks [first, first + c). Its query heads are those of its members' segments
// (owned_heads), its parts the KV heads that these read. A stream of one part belongs to every group, also to
// ranks that own no head. Under striped(c) (replicated is c = 1) a rank stores, of the blocks of its residue
// class, the parts of its c-group; under single(r) rank r stores all parts. So tp stores 1/W of the heads of
// every token, dcp(W) all heads of 1/W of the tokens, dcp(c) what lies between. In a group of g ranks g takes
// the place of W; the other ranks store nothing.

// The parts that `rank` reads and stores of the blocks that a pattern gives it, counted within the stream.
Range held_parts(const CacheGeometry& geometry, Stream stream, Pattern pattern, int rank, int rank_count);
// The ranks that hold a part (numbered through) of block b.
RankMask part_holders(const CacheGeometry& geometry, const Residency& residency, int64_t block, int part,
                      int origin, int rank_count);
// The same, looked up: for many blocks of one residency and origin.
class HolderTable {
 public:
  HolderTable(const CacheGeometry& geometry, const Residency& residency, int origin, int rank_count);
  bool is_of(const Residency& residency, int origin) const {
    return origin_ == origin && residency_ == residency;
  }
  RankMask holders(int64_t block, int part) const {
    const Part& of = parts_[static_cast<size_t>(part)];
    return of.by_class[of.c == 1 ? 0 : static_cast<size_t>(residue_class(block, of.c))];
  }

 private:
  struct Part {
    int c = 1;
    std::array<RankMask, kMaxRanks> by_class{};
  };
  Residency residency_;
  int origin_ = 0;
  std::vector<Part> parts_;
};

// The most pages that one block can have on all ranks together, under any residency.
int64_t max_block_pages(const CacheGeometry& geometry, int rank_count);

using StoredBytes = std::array<std::array<int64_t, kMaxRanks>, kStreams>;  // [stream][rank]

// What the ranks store for n tokens under a residency, counted block by block (whole blocks).
StoredBytes stored_bytes(const CacheGeometry& geometry, const Residency& residency, int64_t token_count,
                         int origin, int rank_count);
// The average over ranks and tokens, for tables of facts: bytes per token per rank.
double bytes_per_token_per_rank(const CacheGeometry& geometry, const Residency& residency, int rank_count);
// How many times more tokens fit than with everything replicated.
double capacity_factor(const CacheGeometry& geometry, const Residency& residency, int rank_count);
// Price of a change of a part's holders: Σ |new − old| × page bytes.
int64_t change_bytes(const CacheGeometry& geometry, Stream stream, RankMask old_holders,
                     RankMask new_holders);

}  // namespace weft::kv
