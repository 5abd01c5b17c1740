// Goal: every owned row has one owner, and zigzag keeps both counts of (row, key) pairs as even as promised.
// Method: published facts; a reference that lists whole pieces; random steps, ragged, with cached prefixes,
// on both sides of top-k, on 1 … 8 and 72 ranks, whose pairs are counted row by row.
#include "kv/row_split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "proto/vocab/random.h"

namespace weft::kv {
namespace {

using Pairs = std::vector<int64_t>;  // by rank

int64_t keys_of(int64_t position, int64_t top_k) {
  return top_k == 0 ? position + 1 : std::min(position + 1, top_k);
}

// `attended`: pairs attended to, at most top_k of a row; else pairs scored.
Pairs count_pairs(const std::vector<OwnedSpan>& spans, int64_t top_k, int ranks, bool attended) {
  const std::vector<RowOwners> owners = split_rows(spans, top_k, ranks);
  Pairs pairs(static_cast<size_t>(ranks), 0);
  for (size_t i = 0; i < spans.size(); ++i) {
    for (int64_t row = 0; row < spans[i].rows; ++row) {
      pairs.at(static_cast<size_t>(owners[i].owner(row))) +=
          keys_of(spans[i].start + row, attended ? top_k : 0);
    }
  }
  return pairs;
}

Pairs causal_pairs(Split split, int64_t start, int64_t rows, int ranks) {
  return count_pairs({{split, start, rows}}, 0, ranks, false);
}

TEST(Facts, CausalPairs) {
  const Pairs pairs = causal_pairs(Split::kInterleave, 0, 128'000, 8);
  EXPECT_NEAR(static_cast<double>(std::accumulate(pairs.begin(), pairs.end(), int64_t{0})), 8.2e9, 0.01e9);
}

TEST(Facts, ContiguousSplitIsUneven) {
  // 16 tokens on 4 ranks in contiguous quarters: 58 against 10 pairs.
  EXPECT_EQ(causal_pairs(Split::kContiguous, 0, 16, 4), (Pairs{10, 26, 42, 58}));
  // The last piece costs 2C − 1 times the first of a long prompt.
  const Pairs eighths = causal_pairs(Split::kContiguous, 0, 128'000, 8);
  EXPECT_NEAR(static_cast<double>(eighths[7]) / static_cast<double>(eighths[0]), 15, 0.01);
  EXPECT_EQ(causal_pairs(Split::kZigzag, 0, 16, 4), (Pairs{34, 34, 34, 34}));
  EXPECT_EQ(causal_pairs(Split::kInterleave, 0, 16, 4), (Pairs{28, 32, 36, 40}));
}

TEST(Zigzag, EveryRanksTwoPiecesCostTogetherTwoCUnits) {
  // In units of a piece squared (halves): piece p costs 2p + 1; pieces r and 2C−1−r cost 4C together,
  // that is 2C units of a whole piece square.
  for (int C : {2, 4, 8}) {
    const Pairs pairs = causal_pairs(Split::kZigzag, 0, 2 * C * 100, C);
    for (int64_t n : pairs) EXPECT_EQ(n, pairs[0]);
    EXPECT_NEAR(static_cast<double>(pairs[0]) / (100.0 * 100.0), 2 * C, 0.02 * C);
  }
}

TEST(Zigzag, WholePiecesGoThereAndBack) {
  for (int C : {1, 2, 3, 8}) {
    for (int64_t piece : {1, 5, 64}) {
      std::vector<int> want;
      for (int p = 0; p < 2 * C; ++p)
        want.insert(want.end(), static_cast<size_t>(piece), std::min(p, 2 * C - 1 - p));
      for (int64_t left_over = 0; left_over < 2 * C; ++left_over) {
        const OwnedSpan span{Split::kZigzag, 17, left_over + std::ssize(want)};
        const RowOwners owners = split_rows({&span, 1}, 0, C).front();
        for (size_t row = 0; row < want.size(); ++row) {
          ASSERT_EQ(owners.owner(left_over + static_cast<int64_t>(row)), want[row])
              << row << " of " << span.rows;
        }
      }
    }
  }
}

TEST(Zigzag, BothPartsOfASpanAreEven) {
  // 8 pieces of 128 rows that see fewer than 2048 keys, and 8 of 1024 that attend to 2048 each.
  const std::vector<OwnedSpan> spans = {{Split::kZigzag, 1024, 1024 + 8192}};
  const Pairs scored = count_pairs(spans, 2048, 4, false), attended = count_pairs(spans, 2048, 4, true);
  EXPECT_EQ(scored, Pairs(4, scored[0]));
  EXPECT_EQ(attended, Pairs(4, attended[0]));
  EXPECT_LT(attended[0], scored[0]);
}

TEST(Split, EveryRowHasAnOwner) {
  for (int C : {1, 2, 3, 4, 8, 72}) {
    for (int64_t rows : {1, 2, 7, 15, 16, 17, 64, 200}) {
      for (Split split : {Split::kZigzag, Split::kInterleave, Split::kContiguous}) {
        const OwnedSpan span{split, 0, rows};
        const RowOwners owners = split_rows({&span, 1}, 20, C).front();
        for (int64_t row = 0; row < rows; ++row) {
          const int owner = owners.owner(row);
          if (split == Split::kContiguous && row > 0) {
            EXPECT_GE(owner, owners.owner(row - 1));
          }
          EXPECT_TRUE(owner >= 0 && owner < C) << split_name(split) << ", row " << row << " of " << rows;
        }
      }
    }
  }
}

// A step's worth of spans: any lengths, a third of them tiny, half of them behind a cached prefix.
std::vector<OwnedSpan> random_step(SplitMix64& random) {
  std::vector<OwnedSpan> spans(1 + random.below(40));
  for (OwnedSpan& span : spans) {
    span.split = Split::kZigzag;
    span.start =
        random.below(2) == 0 ? 0 : static_cast<int64_t>(random.below(random.below(2) == 0 ? 300 : 200'000));
    span.rows = 1 + static_cast<int64_t>(random.below(random.below(3) == 0 ? 20 : 700));
  }
  return spans;
}

TEST(Zigzag, NoRankHasMoreThanTheLongestRowAboveAnother) {
  const uint64_t seed = 20250117;
  SplitMix64 random(seed);
  int64_t uneven = 0;
  for (int round = 0; round < 1000; ++round) {
    const std::vector<OwnedSpan> spans = random_step(random);
    const int64_t top_k = std::vector<int64_t>{0, 64, 256, 2048}[random.below(4)];
    int64_t longest = 0;
    for (const OwnedSpan& span : spans) longest = std::max(longest, span.start + span.rows - 1);
    for (int C : {2, 3, 4, 5, 6, 7, 8, 72}) {
      for (bool attended : {false, true}) {
        const Pairs pairs = count_pairs(spans, top_k, C, attended);
        const auto [least, most] = std::minmax_element(pairs.begin(), pairs.end());
        ASSERT_LE(*most - *least, keys_of(longest, attended ? top_k : 0))
            << "seed " << seed << ", round " << round << ", C " << C << ", top-k " << top_k;
        uneven += *most != *least;
      }
    }
  }
  EXPECT_GT(uneven, 0);
}

}  // namespace
}  // namespace weft::kv
