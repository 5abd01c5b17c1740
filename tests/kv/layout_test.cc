// Goal: the layout arithmetic is what docs/architecture.md says, and reproduces published facts.
#include "kv/layout.h"

#include <gtest/gtest.h>

#include <algorithm>

#include <numeric>

#include "kv/mechanisms.h"

namespace weft::kv {
namespace {

TEST(CanonicalShard, EveryRunOfEightBlocksHasEveryShardOnce) {
  for (int64_t run = 0; run < 10'000; ++run) {
    unsigned seen = 0;
    for (int64_t i = 0; i < kShards; ++i) seen |= 1u << canonical_shard(run * kShards + i);
    ASSERT_EQ(seen, 0xffu) << "run " << run;
  }
}

TEST(ResidueClass, DividesTheShardWhenCDividesV) {
  for (int64_t block = 0; block < 5'000; ++block) {
    for (int c : {1, 2, 4, 8}) ASSERT_EQ(residue_class(block, c), canonical_shard(block) % c);
    for (int c : {3, 5, 6, 7}) ASSERT_LT(residue_class(block, c), c);
  }
}

TEST(ResidueClass, RanksWithoutCommonBlocksAreKnown) {
  for (int c = 1; c <= 8; ++c) {
    for (int d = 1; d <= 8; ++d) {
      const int W = std::lcm(c, d);
      if (W > 8) continue;
      for (int origin : {0, 3}) {
        for (int r = 0; r < W; ++r) {
          for (int q = 0; q < W; ++q) {
            bool common = false;
            for (int64_t block = 0; block < 300 && !common; ++block) {
              common = owned_class(r % c, origin, c) == residue_class(block, c) &&
                       owned_class(q % d, origin, d) == residue_class(block, d);
            }
            EXPECT_EQ(common, (r - q) % common_classes(c, d) == 0) << c << " " << d << " " << r << " " << q;
          }
        }
      }
    }
  }
}

TEST(ResidueClass, NoStrideLoadsOneRank) {
  for (int64_t stride : {2, 4, 8, 16, 64}) {
    std::array<int, 8> count{};
    for (int64_t i = 0; i < 4096; ++i) ++count[static_cast<size_t>(canonical_shard(i * stride))];
    for (int n : count) EXPECT_NEAR(n, 512, 160) << "stride " << stride;
  }
}

TEST(Pattern, HolderCounts) {
  for (int W : {1, 2, 4, 8}) {
    for (int64_t block = 0; block < 100; ++block) {
      EXPECT_EQ(rank_count_of(pattern_holders(replicated(), block, 0, W)), W);
      EXPECT_EQ(pattern_holders(single(W - 1), block, 0, W), mask_of(W - 1));
      for (int c = 1; c <= W; c *= 2) {
        for (int origin = 0; origin < c; ++origin) {
          const RankMask mask = pattern_holders(striped(c), block, origin, W);
          EXPECT_EQ(rank_count_of(mask), W / c);
          for (int rank = 0; rank < W; ++rank) {
            EXPECT_EQ(holds(mask, rank), rank % c == (canonical_shard(block) + origin) % c);
            EXPECT_EQ(holds(mask, rank), owned_class(rank % c, origin, c) == residue_class(block, c));
          }
        }
      }
    }
  }
}

TEST(Pattern, StripingFurtherOnlyDropsPages) {
  CacheGeometry geometry{64, {StreamGeometry{78, 576}, StreamGeometry{21, 132}}};
  for (int64_t block = 0; block < 200; ++block) {
    for (int c : {1, 2, 4}) {
      for (int k = 2; c * k <= 8; k *= 2) {
        EXPECT_EQ(change_bytes(geometry, Stream::kEntries, pattern_holders(striped(c), block, 3, 8),
                               pattern_holders(striped(c * k), block, 3, 8)),
                  0);
      }
    }
    EXPECT_EQ(
        change_bytes(geometry, Stream::kEntries, pattern_holders(striped(8), block, 3, 8), all_ranks(8)),
        7 * geometry.page_bytes(Stream::kEntries));
  }
}

// ---- parts ---------------------------------------------------------------------------------------------

CacheGeometry grouped(int64_t heads, int parts) {
  return {64, {StreamGeometry{2, 16, parts}, StreamGeometry{1, 8}}, heads};
}

std::vector<Pattern> all_patterns(int W) {
  std::vector<Pattern> patterns;
  for (int c = 1; c <= W; ++c) {
    if (W % c == 0) patterns.push_back(striped(c));
  }
  for (int rank = 0; rank < W; ++rank) patterns.push_back(single(rank));
  return patterns;
}

// The rule, head by head: does a rank of r's c-group own a query head that reads this KV head?
bool group_reads(int64_t heads, int parts, int part, int c, int rank, int W) {
  if (parts == 1) return true;
  for (int64_t head = 0; head < heads; ++head) {
    if (head * parts / heads != part) continue;
    for (int segment = 0; segment < kShards; ++segment) {
      if (head < segment * heads / kShards || head >= (segment + 1) * heads / kShards) continue;
      for (int member = rank / c * c; member < rank / c * c + c; ++member) {
        if (segment >= member * kShards / W && segment < (member + 1) * kShards / W) return true;
      }
    }
  }
  return false;
}

TEST(Parts, AreNumberedThroughStreamsInUse) {
  CacheGeometry geometry = grouped(8, 4);
  EXPECT_EQ(geometry.parts(), 5);
  EXPECT_EQ(geometry.first_part(Stream::kIndexKeys), 4);
  EXPECT_EQ(geometry.stream_of(3), Stream::kEntries);
  EXPECT_EQ(geometry.stream_of(4), Stream::kIndexKeys);
  EXPECT_EQ(geometry.page_bytes(Stream::kEntries), 64 * 2 * 16);
  EXPECT_EQ(geometry.token_bytes(), 4 * 2 * 16 + 8);
  geometry.streams[1] = {};
  EXPECT_EQ(geometry.parts(), 4);
}

TEST(Parts, HoldersFollowTheRuleHeadByHead) {
  for (const auto& [heads, parts] : {std::pair{4, 1}, {9, 3}, {8, 8}, {16, 8}, {15, 5}, {14, 2}, {6, 6}}) {
    const CacheGeometry geometry = grouped(heads, parts);
    for (int W = 1; W <= 8; ++W) {
      for (const Pattern& pattern : all_patterns(W)) {
        const int c = pattern.kind == PatternKind::kStriped ? pattern.argument : 1;
        SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(parts) + " parts, W " +
                     std::to_string(W) + ", pattern " + std::to_string(static_cast<int>(pattern.kind)) + " " +
                     std::to_string(pattern.argument));
        StoredBytes stored{};
        constexpr int64_t kBlocks = 24;
        const int origin = W > 1 ? 1 : 0;
        const HolderTable table(geometry, {pattern, pattern}, origin, W);
        for (int64_t block = 0; block < kBlocks; ++block) {
          int64_t pages = 0;
          for (int part = 0; part < geometry.parts(); ++part) {
            const bool entries = geometry.stream_of(part) == Stream::kEntries;
            const RankMask holders = part_holders(geometry, {pattern, pattern}, block, part, origin, W);
            ASSERT_NE(holders, 0u) << "part " << part << " is nowhere";
            ASSERT_EQ(table.holders(block, part), holders);
            for (int rank = 0; rank < W; ++rank) {
              const bool single_rank = pattern.kind == PatternKind::kSingle;
              const bool expected = single_rank
                                        ? rank == pattern.argument
                                        : rank % c == (residue_class(block, c) + origin) % c &&
                                              (!entries || group_reads(heads, parts, part, c, rank, W));
              ASSERT_EQ(holds(holders, rank), expected) << "block " << block << " part " << part;
              if (expected) stored[entries ? 0 : 1][static_cast<size_t>(rank)] += entries ? 64 * 32 : 64 * 8;
            }
            pages += rank_count_of(holders);
          }
          ASSERT_LE(pages, max_block_pages(geometry, W));
        }
        EXPECT_EQ(stored_bytes(geometry, {pattern, pattern}, kBlocks * 64, origin, W), stored);
      }
    }
  }
}

TEST(Parts, EvenHeadsAreStoredOnceUnderEveryWidth) {
  // 32 query heads over 8 KV heads: tp stores a W-th of the heads, dcp(W) of the tokens, dcp(c) what lies
  // between; all a W-th of the bytes.
  const CacheGeometry geometry{64, {StreamGeometry{16, 256, 8}, StreamGeometry{}}, 32};
  for (int W : {1, 2, 4, 8}) {
    EXPECT_EQ(max_block_pages(geometry, W), 8);
    for (int c = 1; c <= W; c *= 2) {
      EXPECT_EQ(held_parts(geometry, Stream::kEntries, striped(c), W - 1, W), (Range{8 - 8 * c / W, 8}));
      EXPECT_DOUBLE_EQ(capacity_factor(geometry, {striped(c), striped(c)}, W), W);
      for (const auto& of_rank : {0, W - 1}) {
        EXPECT_EQ(stored_bytes(geometry, {striped(c), striped(c)}, 64 * 64, 0, W)[0][of_rank],
                  64 * 64 * geometry.token_bytes() / W);
      }
    }
  }
  // Two KV heads on eight ranks: tp keeps four copies, dcp(4) one.
  const CacheGeometry few{64, {StreamGeometry{16, 256, 2}, StreamGeometry{}}, 16};
  EXPECT_DOUBLE_EQ(capacity_factor(few, {replicated(), replicated()}, 8), 2);
  EXPECT_DOUBLE_EQ(capacity_factor(few, {striped(4), striped(4)}, 8), 8);
}

TEST(Parts, ImpossibleOnesAreRefused) {
  const auto refused = [](int64_t heads, int parts) {
    const auto result = validate(grouped(heads, parts));
    return result ? std::string() : result.error().field + ": " + result.error().message;
  };
  EXPECT_EQ(refused(9, 3), "");
  EXPECT_EQ(refused(64, 64), "");
  EXPECT_EQ(refused(130, 65), "parts: 65 KV heads; a block has 1 to 64 parts");
  EXPECT_EQ(refused(9, 0), "parts: 0 KV heads; a block has 1 to 64 parts");
  EXPECT_EQ(refused(9, 4), "heads: 9 query heads are no multiple of 4 KV heads");
}

// ---- the table of facts (GB = 2^30) --------------------------------------------------------------------

constexpr int64_t kTokens128k = 128'000;
CacheGeometry glm(int64_t entry_bytes) {
  return {64, {StreamGeometry{78, entry_bytes}, StreamGeometry{21, 132}}};
}
double capacity(const CacheGeometry& geometry, int ranks, bool split) {
  return capacity_factor(geometry, {striped(ranks), split ? striped(ranks) : replicated()}, ranks);
}

TEST(Facts, EntryAndIndexBytes) {
  EXPECT_EQ(glm(576).stream(Stream::kEntries).token_bytes(), 44'928);
  EXPECT_EQ(glm(576).stream(Stream::kIndexKeys).token_bytes(), 2'772);
  EXPECT_NEAR(44'928.0 * kTokens128k / (1 << 30), 5.4, 0.05);
}

TEST(Facts, CapacityFactors) {
  EXPECT_NEAR(capacity(glm(576), 2, false), 1.89, 0.005);
  EXPECT_NEAR(capacity(glm(576), 4, false), 3.41, 0.005);
  EXPECT_NEAR(capacity(glm(576), 8, false), 5.69, 0.005);
  EXPECT_NEAR(capacity(glm(576), 72, false), 14.0, 0.05);
  EXPECT_NEAR(capacity(glm(576), 1'000'000, false), 17.2, 0.01);
  EXPECT_NEAR(capacity(glm(576), 8, true), 8.0, 1e-9);
  // The 656-byte format of H200 class devices has factors of its own.
  EXPECT_NEAR(capacity(glm(656), 8, false), 5.884, 0.0005);
  EXPECT_NEAR(capacity(glm(656), 72, false), 15.49, 0.005);
}

TEST(Facts, BytesPerTokenPerRankAtEight) {
  EXPECT_DOUBLE_EQ(bytes_per_token_per_rank(glm(576), {striped(8), replicated()}, 8), 8'388);
  EXPECT_DOUBLE_EQ(bytes_per_token_per_rank(glm(576), {striped(8), striped(8)}, 8), 5'962.5);
}

TEST(Facts, OneMillionTokens) {
  // 656 B × 78 + 132 B × 21 + one draft layer of 788 B.
  const int64_t token_bytes = glm(656).token_bytes() + 788;
  EXPECT_EQ(token_bytes, 54'728);
  const double gib = static_cast<double>(token_bytes) * (1 << 20) / (1 << 30);
  EXPECT_NEAR(gib, 53.4, 0.05);
  EXPECT_NEAR(gib / 8, 6.7, 0.05);
}

TEST(Facts, GatheredPerLayer) { EXPECT_NEAR(576.0 * kTokens128k / (1 << 20), 70, 0.5); }

// ---- canonical parts

TEST(Segments, PartitionHeadsColumnsAndRanks) {
  for (int64_t n : {1, 3, 4, 8, 9, 16, 64, 128}) {
    int64_t at = 0;
    for (int s = 0; s < kShards; ++s) {
      EXPECT_EQ(segment_items(s, n).begin, at);
      at = segment_items(s, n).end;
    }
    EXPECT_EQ(at, n);
  }
  for (int64_t n : {32, 64, 96, 500, 512, 2048}) {
    int64_t at = 0;
    for (int s = 0; s < kShards; ++s) {
      EXPECT_EQ(segment_columns(s, n).begin, at);
      at = segment_columns(s, n).end;
    }
    EXPECT_EQ(at, n);
  }
  for (int W = 1; W <= 8; ++W) {
    int64_t at = 0;
    for (int member = 0; member < W; ++member) {
      EXPECT_EQ(owned_segments(member, W).begin, at);
      at = owned_segments(member, W).end;
      EXPECT_EQ(owned_heads(member, W, 64).begin,
                segment_items(static_cast<int>(owned_segments(member, W).begin), 64).begin);
      if (kShards % W == 0) {
        EXPECT_EQ(tree_nodes(owned_segments(member, W)).size(), 1u);
      }
    }
    EXPECT_EQ(at, kShards);
  }
  EXPECT_EQ(tree_nodes({1, 6}), (std::vector<TreeNode>{{1, 1}, {2, 2}, {4, 2}}));
}

TEST(Wishes, ParseAndRefuse) {
  EXPECT_EQ(parse_decode("dcp(4)", 8).value(), (DecodeWish{DecodeKind::kDcp, 4}));
  EXPECT_EQ(parse_decode("dcp", 8).value(), (DecodeWish{DecodeKind::kDcp, 8}));
  for (const char* bad : {"dcp(3)", "dcp(16)", "dcp(0)", "dcp()", "dcp(4", "dcp(4x)", "dcp(-1)", "pp", ""}) {
    const auto result = parse_decode(bad, 8);
    ASSERT_FALSE(result.has_value()) << bad;
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(result.error().field, "decode");
  }
}

TEST(Wishes, GroupsParseAndRefuse) {
  EXPECT_EQ(parse_decode("dp(4)xdcp(2)", 8).value(), (DecodeWish{DecodeKind::kDp, 2, 4}));
  EXPECT_EQ(parse_decode("dp(4)xdcp", 8).value(), (DecodeWish{DecodeKind::kDp, 4, 4}));
  EXPECT_EQ(parse_decode("dp(2)xtp", 8).value(), (DecodeWish{DecodeKind::kDp, 1, 2}));
  // Groups of all ranks, or of one, have shorter names.
  EXPECT_EQ(parse_decode("dp(8)xdcp(4)", 8).value(), (DecodeWish{DecodeKind::kDcp, 4}));
  EXPECT_EQ(parse_decode("dp(8)xtp", 8).value(), (DecodeWish{DecodeKind::kTp, 1}));
  EXPECT_EQ(parse_decode("dp(1)xtp", 8).value(), (DecodeWish{DecodeKind::kDp, 1}));
  for (const char* bad : {"dp(3)xtp", "dp(4)xdcp(8)", "dp(4)xdcp(3)", "dp(4)", "dp(4)x", "dp(4)xdp",
                          "dp(0)xtp", "dp(16)xtp", "xtp"}) {
    const auto result = parse_decode(bad, 8);
    ASSERT_FALSE(result.has_value()) << bad;
    EXPECT_EQ(result.error().field, "decode");
  }
  for (const int ranks : {1, 2, 3, 4, 6, 8}) {
    const std::vector<DecodeWish> wishes = decode_wishes(ranks);
    for (const DecodeWish wish : wishes) {
      EXPECT_EQ(parse_decode(decode_name(wish), ranks).value(), wish) << decode_name(wish);
      EXPECT_EQ(std::count(wishes.begin(), wishes.end(), wish), 1);
    }
  }
}

TEST(Residency, StaysInsideTheGroup) {
  const CacheGeometry geometry{8, {StreamGeometry{2, 16, 4}, StreamGeometry{1, 8}}, 8};
  // Ranks 4 to 7, the cache over two of them: each holds half of the blocks and the heads of its pair.
  const Residency residency = residency_of({4, 4, 2}, IndexKind::kCopied, 8);
  for (int64_t block = 0; block < 40; ++block) {
    const RankMask holders = pattern_holders(residency.entries, block, 1, 8);
    EXPECT_EQ(holders & 0x0fu, 0u);
    EXPECT_EQ(rank_count_of(holders), 2);
    EXPECT_EQ(pattern_holders(residency.index_keys, block, 1, 8), 0xf0u);
    EXPECT_EQ(holds(holders, 4), (residue_class(block, 2) + 1) % 2 == 0);
  }
  EXPECT_EQ(held_parts(geometry, Stream::kEntries, residency.entries, 5, 8), (Range{0, 2}));
  EXPECT_EQ(held_parts(geometry, Stream::kEntries, residency.entries, 6, 8), (Range{2, 4}));
  EXPECT_TRUE(held_parts(geometry, Stream::kEntries, residency.entries, 3, 8).empty());
  EXPECT_EQ(residency_of({0, 8, 2}, IndexKind::kCopied, 8).entries, striped(2));
  EXPECT_EQ(residency_of({6, 2, 1}, IndexKind::kCopied, 8).entries,
            (Pattern{PatternKind::kReplicated, 0, 6, 2}));
  EXPECT_EQ(grouping_name({4, 4, 2}, 8), "dp(ranks 4-7)xdcp(2)");
}

TEST(MechanismsTest, ParseNameAndRefuse) {
  EXPECT_EQ(parse_mechanisms("", {}).value(), Mechanisms{});
  EXPECT_EQ(mechanisms_name({}), "");
  Mechanisms both = parse_mechanisms("partials=tree,query=replicated", {}).value();
  EXPECT_EQ(both.query, QueryPath::kReplicated);
  EXPECT_EQ(both.partials, PartialsPath::kTree);
  EXPECT_EQ(mechanisms_name(both), "query=replicated,partials=tree");
  EXPECT_EQ(mechanisms_name(parse_mechanisms("query=gathered", both).value()), "partials=tree");
  for (const MechanismChoice& choice : mechanism_choices()) {
    EXPECT_TRUE(parse_mechanisms(choice.text, both)) << choice.text;
  }
  for (const char* bad :
       {"tree", "partials", "partials=", "partials=ring", "query=replicated,", "=tree", ","}) {
    const auto result = parse_mechanisms(bad, {});
    ASSERT_FALSE(result.has_value()) << bad;
    EXPECT_EQ(result.error().field, "mechanisms");
  }
  EXPECT_FALSE(validate_mechanisms(both, {DecodeKind::kDcp, 3}));
  EXPECT_TRUE(validate_mechanisms(both, {DecodeKind::kDcp, 4}));
}

TEST(Wishes, IndexParseAndRefuse) {
  for (const char* text : {"copied", "split", "copied(8)", "split(2)", "split(1)"}) {
    EXPECT_EQ(index_name(parse_index(text, 8).value()), text);
  }
  EXPECT_EQ(parse_index("split(4)", 8).value(), (IndexWish{IndexKind::kSplit, 4}));
  for (const char* bad : {"split(3)", "split(16)", "copied(0)", "split()", "split(4", "parts", ""}) {
    const auto result = parse_index(bad, 8);
    ASSERT_FALSE(result.has_value()) << bad;
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(result.error().field, "index");
  }
  EXPECT_EQ(index_parts({0, 8, 4}, IndexKind::kCopied), 1);
  EXPECT_EQ(index_parts({0, 8, 4}, IndexKind::kSplit), 4);
  EXPECT_EQ(index_parts({0, 8, 1}, IndexKind::kSplit), 8);
  EXPECT_EQ(index_parts({0, 8, 4}, {IndexKind::kSplit, 2}), 2);
  EXPECT_EQ(index_parts({0, 8, 4}, {IndexKind::kCopied, 8}), 8);
  EXPECT_EQ(index_parts({3, 1, 1}, {IndexKind::kSplit, 4}), 1);
}

TEST(Residency, FollowsTheGrouping) {
  EXPECT_EQ(residency_of({0, 8, 2}, {IndexKind::kSplit, 4}, 8), (Residency{striped(2), striped(4)}));
  EXPECT_EQ(residency_of({0, 8, 4}, {IndexKind::kCopied, 8}, 8), (Residency{striped(4), replicated()}));
  EXPECT_EQ(residency_of({0, 8, 1}, IndexKind::kCopied, 8), (Residency{replicated(), replicated()}));
  EXPECT_EQ(residency_of({0, 8, 1}, IndexKind::kSplit, 8), (Residency{replicated(), striped(8)}));
  EXPECT_EQ(residency_of({0, 8, 4}, IndexKind::kCopied, 8), (Residency{striped(4), replicated()}));
  EXPECT_EQ(residency_of({0, 8, 4}, IndexKind::kSplit, 8), (Residency{striped(4), striped(4)}));
  EXPECT_EQ(residency_of({3, 1, 1}, IndexKind::kSplit, 8), (Residency{single(3), single(3)}));
  EXPECT_EQ(residency_of({0, 1, 1}, IndexKind::kSplit, 1), (Residency{replicated(), replicated()}));
}

}  // namespace
}  // namespace weft::kv
