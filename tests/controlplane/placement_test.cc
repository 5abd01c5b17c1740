// Goal: needs counted by class equal the sum over blocks; wishes become the groupings of the contract.
#include "controlplane/placement.h"

#include <gtest/gtest.h>

#include "proto/vocab/random.h"
#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

TEST(Placement, FollowsTheWish) {
  const Limits limits = small_limits(4, 10);
  const auto place = [&](kv::DecodeWish decode, kv::IndexWish index) {
    return placement_of(limits, decode, index, 2);
  };
  const Placement tp = place({kv::DecodeKind::kTp, 1}, kv::IndexKind::kCopied);
  EXPECT_EQ(tp.grouping, (kv::Grouping{0, 4, 1}));
  EXPECT_EQ(tp.index_c, 1);
  EXPECT_EQ(placement_name(limits, tp), "tp, index copied");
  EXPECT_EQ(place({kv::DecodeKind::kTp, 1}, kv::IndexKind::kSplit).index_c, 4);
  const Placement dcp = place({kv::DecodeKind::kDcp, 2}, kv::IndexKind::kSplit);
  EXPECT_EQ(dcp.grouping, (kv::Grouping{0, 4, 2}));
  EXPECT_EQ(dcp.index_c, 2);
  EXPECT_EQ(dcp.residency.entries, kv::striped(2));
  // The index may be split over fewer or more ranks than the entries.
  const Placement two = place({kv::DecodeKind::kDcp, 4}, {kv::IndexKind::kSplit, 2});
  EXPECT_EQ(two.index_c, 2);
  EXPECT_EQ(two.residency, (kv::Residency{kv::striped(4), kv::striped(2)}));
  EXPECT_EQ(place({kv::DecodeKind::kDcp, 2}, {kv::IndexKind::kSplit, 4}).residency,
            (kv::Residency{kv::striped(2), kv::striped(4)}));
  // Copied, but scored in parts.
  const Placement parts = place({kv::DecodeKind::kDcp, 2}, {kv::IndexKind::kCopied, 4});
  EXPECT_EQ(parts.index_c, 4);
  EXPECT_EQ(parts.residency, (kv::Residency{kv::striped(2), kv::replicated()}));
  EXPECT_EQ(placement_name(limits, parts), "dcp(2), index copied(4)");
  EXPECT_EQ(place({kv::DecodeKind::kDp, 1}, {kv::IndexKind::kSplit, 4}).index_c, 1);
  // A group of two: the one that rank 2 is in.
  const Placement group = place({kv::DecodeKind::kDp, 2, 2}, {kv::IndexKind::kSplit, 4});
  EXPECT_EQ(group.grouping, (kv::Grouping{2, 2, 2}));
  EXPECT_EQ(group.index_c, 2);
  EXPECT_EQ(group.residency.entries, (kv::Pattern{kv::PatternKind::kStriped, 2, 2, 2}));
  EXPECT_EQ(placement_name(limits, group), "dp(ranks 2-3)xdcp(2), index split(4)");
  EXPECT_EQ(placement_choices(limits, {kv::DecodeKind::kDp, 1, 2}), (std::vector<int>{0, 2}));
  const Placement dp = place({kv::DecodeKind::kDp, 1}, kv::IndexKind::kSplit);
  EXPECT_EQ(dp.grouping, (kv::Grouping{2, 1, 1}));
  EXPECT_EQ(dp.residency.entries, kv::single(2));
  EXPECT_EQ(dp.index_c, 1);
}

TEST(Placement, OneRankIsAlwaysWhole) {
  const Limits limits = small_limits(1, 10);
  for (const kv::DecodeWish decode :
       {kv::DecodeWish{kv::DecodeKind::kTp, 1}, kv::DecodeWish{kv::DecodeKind::kDcp, 1},
        kv::DecodeWish{kv::DecodeKind::kDp, 1}}) {
    EXPECT_EQ(placement_of(limits, decode, kv::IndexKind::kSplit, 0).grouping, (kv::Grouping{0, 1, 1}));
  }
  EXPECT_EQ(chunk_split(kv::Split::kZigzag, 1000, false, 1), kv::Split::kShared);
}

TEST(Placement, ShortChunksAreShared) {
  EXPECT_EQ(chunk_split(kv::Split::kZigzag, 7, false, 4), kv::Split::kShared);
  EXPECT_EQ(chunk_split(kv::Split::kZigzag, 8, false, 4), kv::Split::kZigzag);
  EXPECT_EQ(chunk_split(kv::Split::kInterleave, 3, false, 4), kv::Split::kShared);
  EXPECT_EQ(chunk_split(kv::Split::kInterleave, 4, false, 4), kv::Split::kInterleave);
  EXPECT_EQ(chunk_split(kv::Split::kContiguous, 3, false, 4), kv::Split::kShared);
  EXPECT_EQ(chunk_split(kv::Split::kContiguous, 4, false, 4), kv::Split::kContiguous);
  EXPECT_EQ(chunk_split(kv::Split::kZigzag, 100, true, 4), kv::Split::kShared);
}

TEST(Placement, QueriesTravelWhereThatMovesFewerBytes) {
  // MLA: 64 heads, 576-byte entries and queries, partials of 514 words; the cache striped over all of 8
  // ranks.
  Limits limits = small_limits(8, 10);
  limits.geometry = {64, {kv::StreamGeometry{1, 1152}, kv::StreamGeometry{}}, 64};
  limits.query_bytes = 1152;
  limits.value_width = 512;
  const Placement dcp = placement_of(limits, {kv::DecodeKind::kDcp, 8}, {}, 0);
  const auto passes = [&](int64_t start, int64_t rows, kv::ContextPath path = kv::ContextPath::kAuto) {
    return passes_query(limits, dcp, kv::Split::kZigzag, path, start, rows, 0);
  };
  // Of a context of n tokens each of 8 ranks reads 7/8; a row's queries and partials are 7 · 64 · (1152 +
  // 2056) bytes: they break even at n / 178 rows.
  EXPECT_TRUE(passes(128'000, 512));
  EXPECT_FALSE(passes(128'000, 1024));
  EXPECT_FALSE(passes(0, 2048));
  EXPECT_TRUE(passes(0, 2048, kv::ContextPath::kPassQ));
  EXPECT_FALSE(passes(128'000, 512, kv::ContextPath::kPassKv));
  // Replicated entries are read at home: nothing to save.
  const Placement tp = placement_of(limits, {kv::DecodeKind::kTp, 1}, {}, 0);
  EXPECT_FALSE(passes_query(limits, tp, kv::Split::kZigzag, kv::ContextPath::kAuto, 128'000, 512, 0));
  EXPECT_FALSE(passes_query(limits, dcp, kv::Split::kShared, kv::ContextPath::kPassQ, 128'000, 512, 0));
  // Rows that select entries read them where they lie, whatever was asked.
  limits.index_topk = 2048;
  EXPECT_FALSE(passes(128'000, 512, kv::ContextPath::kPassQ));
  EXPECT_TRUE(passes(1000, 1048, kv::ContextPath::kPassQ));
}

TEST(Placement, NeedsEqualTheSumOverBlocks) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SplitMix64 random(seed);
    constexpr int kRanks[] = {1, 2, 3, 4, 6, 8};
    const int ranks = kRanks[random.below(6)];
    Limits limits = small_limits(ranks, 10);
    limits.geometry.streams[0].parts = std::array{1, 2, 3, 8}[random.below(4)];
    limits.geometry.heads = limits.geometry.streams[0].parts * (1 + static_cast<int64_t>(random.below(4)));
    int c = 0;
    do {
      c = 1 + static_cast<int>(random.below(static_cast<uint64_t>(ranks)));
    } while (ranks % c != 0);
    const std::vector<kv::DecodeWish> wishes = kv::decode_wishes(ranks);
    const kv::DecodeWish decode = wishes[random.below(wishes.size())];
    const kv::IndexWish index(static_cast<kv::IndexKind>(random.below(2)), random.below(2) == 0 ? 0 : c);
    const Placement placement =
        placement_of(limits, decode, index, static_cast<int>(random.below(static_cast<uint64_t>(ranks))));
    const auto first = static_cast<int64_t>(random.below(40));
    const auto last = first + static_cast<int64_t>(random.below(60));
    const int origin = static_cast<int>(random.below(static_cast<uint64_t>(ranks)));
    PageCounts expected;
    for (int64_t block = first; block < last; ++block) {
      for (int part = 0; part < limits.geometry.parts(); ++part) {
        for_each_rank(kv::part_holders(limits.geometry, placement.residency, block, part, origin, ranks),
                      [&](int rank) { ++expected.at(limits.geometry.stream_of(part), rank); });
      }
    }
    EXPECT_EQ(BlockNeeds(limits, placement.residency, first, last).pages(origin), expected);
  }
}

TEST(LimitsTest, NamesWhatIsWrong) {
  const auto broken = [](auto change) {
    Limits limits = small_limits(2, 10);
    change(limits);
    const auto result = validate(limits);
    return result ? std::string("fine") : result.error().field;
  };
  EXPECT_EQ(broken([](Limits&) {}), "fine");
  EXPECT_EQ(broken([](Limits& l) { l.rank_count = 9; }), "rank_count");
  EXPECT_EQ(broken([](Limits& l) { l.geometry.block_tokens = 12; }), "block_tokens");
  EXPECT_EQ(broken([](Limits& l) { l.geometry.streams[0].parts = 65; }), "parts");
  EXPECT_EQ(broken([](Limits& l) { l.geometry.streams[0].parts = 2; }), "heads");
  EXPECT_EQ(broken([](Limits& l) { l.pool_pages.pop_back(); }), "pool_pages");
  EXPECT_EQ(broken([](Limits& l) { l.pool_pages[1][0] = 0; }), "pool_pages");
  EXPECT_EQ(broken([](Limits& l) { l.table_count = 8; }), "table_count");
  EXPECT_EQ(broken([](Limits& l) { l.max_step_rows = 7; }), "max_step_rows");
  EXPECT_EQ(broken([](Limits& l) { l.max_samples = 7; }), "max_samples");
  EXPECT_EQ(broken([](Limits& l) { l.plans_in_flight = 3; }), "plans_in_flight");
}

}  // namespace
}  // namespace weft::controlplane
