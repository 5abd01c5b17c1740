// Goal: the top-k found from offers is the top-k of all keys, whatever the distribution of the scores, the
// lengths of first parts and the number of ranks, ties included; and no more is read than the proof needs.
// Method: keys dealt out by blocks; offers of each rank's best; a full sort of everything beside it.
#include "kernels/split_top_k.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "kernels/reference/indexer.h"
#include "kv/layout.h"
#include "proto/vocab/random.h"
#include "tests/kernels/each_instruction_set.h"

namespace weft::kernels {
namespace {

// The keys of one row over c ranks, and what each offers.
struct Split {
  int64_t top_k;
  std::vector<Candidate> all;
  struct Rank {
    OfferHead head;
    std::vector<Candidate> best;
    std::vector<float> scores;
    std::vector<int32_t> positions;
  };
  std::vector<Rank> ranks;

  Split(std::vector<Candidate> keys, int c, int64_t block, int64_t k,
        const std::function<int64_t(int)>& first_part)
      : top_k(k), all(std::move(keys)), ranks(static_cast<size_t>(c)) {
    for (int r = 0; r < c; ++r) {
      Rank& rank = ranks[static_cast<size_t>(r)];
      std::vector<Candidate> own;
      for (const Candidate& key : all) {
        if (kv::residue_class(key.position / block, c) == r) own.push_back(key);
      }
      rank.best = reference::select(own, k);
      rank.scores.resize(rank.best.size());
      rank.positions.resize(rank.best.size());
      write_offer(rank.best, first_part(r), &rank.head, rank.scores.data(), rank.positions.data());
    }
  }

  std::vector<Offer> offers() const {
    std::vector<Offer> out;
    for (const Rank& rank : ranks) out.push_back({&rank.head, rank.scores.data(), rank.positions.data()});
    return out;
  }
};

void check_offer(const Split::Rank& rank) {
  ASSERT_EQ(rank.head.count, std::ssize(rank.best));
  std::vector<Candidate> laid;
  for (size_t i = 0; i < rank.scores.size(); ++i) laid.push_back({rank.scores[i], rank.positions[i]});
  const auto middle = laid.begin() + rank.head.first;
  EXPECT_EQ(std::vector(laid.begin(), middle), reference::select(rank.best, rank.head.first));
  EXPECT_TRUE(std::is_sorted(middle, laid.end(),
                             [](const auto& a, const auto& b) { return a.position < b.position; }));
  if (middle != laid.end()) {
    EXPECT_EQ(*std::min_element(middle, laid.end(), ranks_before), rank.head.next);
  }
}

void check(const Split& split, SplitTopK& found) {
  const std::vector<Candidate> want = reference::select(split.all, split.top_k);
  const Candidate last = *std::max_element(want.begin(), want.end(), ranks_before);
  const auto offers = split.offers();
  find_split_top_k(offers, split.top_k, found);
  EXPECT_EQ(found.last_score, last.score);

  // The top-k of the first parts alone: only a rest that has something before its last key may be read.
  std::vector<Candidate> first_parts;
  for (const Split::Rank& rank : split.ranks) {
    for (int32_t i = 0; i < rank.head.first; ++i) {
      first_parts.push_back({rank.scores[static_cast<size_t>(i)], rank.positions[static_cast<size_t>(i)]});
    }
  }
  std::sort(first_parts.begin(), first_parts.end(), ranks_before);
  const bool short_parts = std::ssize(first_parts) < split.top_k;
  std::vector<int32_t> positions;
  int64_t all_chosen = 0;
  bool any_rest = false;
  for (size_t i = 0; i < offers.size(); ++i) {
    const OfferHead& head = *offers[i].head;
    const SplitTopK::Read read = found.reads[i];
    const bool rest = head.count > head.first;
    ASSERT_EQ(read.scores, rest && read.scores > head.first ? head.count : head.first);
    any_rest = any_rest || read.scores > head.first;
    if (rest && !short_parts) {
      const Candidate& bound = first_parts[static_cast<size_t>(split.top_k - 1)];
      if (read.scores > head.first) {
        EXPECT_TRUE(ranks_before(head.next, bound));
      }
      if (!ranks_before(last, head.next)) {
        EXPECT_EQ(read.scores, head.count);
      }
    }
    const int64_t unread_positions = 16 + 4 * read.scores;
    if (!found.by_position) {
      EXPECT_EQ(read.bytes, unread_positions);
    }
    EXPECT_GE(read.bytes, unread_positions);
    EXPECT_LE(read.bytes, unread_positions + 4 * std::min(read.scores, split.top_k));

    std::vector<int32_t> own(static_cast<size_t>(head.count));
    own.resize(static_cast<size_t>(read_chosen(offers[i], static_cast<int64_t>(i), found, own.data())));
    EXPECT_EQ(std::ssize(own), read.chosen);
    EXPECT_LE(found.reads[i].bytes,
              unread_positions + 4 * std::min(read.scores, split.top_k) + 4 * read.chosen);
    positions.insert(positions.end(), own.begin(), own.end());
    all_chosen += read.chosen;
  }
  EXPECT_EQ(any_rest, found.second_read);
  EXPECT_EQ(all_chosen, split.top_k);
  std::sort(positions.begin(), positions.end());
  ASSERT_EQ(positions.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) ASSERT_EQ(positions[i], want[i].position);
}

TEST(SplitTopK, IsTheTopKOfAllKeys) {
  test::each_instruction_set([] {
    SplitTopK found;
    int64_t second_reads = 0, by_position = 0, rows = 0;
    for (uint64_t seed = 1; seed <= 600; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      SplitMix64 random(seed);
      const int c = static_cast<int>(2 + random.below(7));
      const int64_t block = random.below(2) == 0 ? 8 : 64;
      const auto keys = static_cast<int64_t>(2 + random.below(3000));
      const auto top_k = static_cast<int64_t>(1 + random.below(static_cast<uint64_t>(keys)));
      const uint64_t kind = random.below(7);
      std::vector<Candidate> all;
      for (int64_t i = 0; i < keys; ++i) {
        const auto x = static_cast<float>(i);
        const auto noise = static_cast<float>(random.uniform());
        const float kinds[] = {noise,
                               0.0f,
                               x,
                               -x,
                               static_cast<float>(random.below(4)),
                               static_cast<float>(i / block % c) + noise,
                               random.below(3) == 0 ? -std::numeric_limits<float>::infinity() : 1.0f};
        all.push_back({kinds[kind], static_cast<int32_t>(i)});
      }
      const bool usual = random.below(2) == 0;
      const Split split(all, c, block, top_k, [&](int) {
        return usual ? kv::first_offer(top_k, c)
                     : static_cast<int64_t>(1 + random.below(static_cast<uint64_t>(top_k)));
      });
      for (const Split::Rank& rank : split.ranks) check_offer(rank);
      check(split, found);
      ASSERT_FALSE(testing::Test::HasFailure());
      second_reads += found.second_read, by_position += found.by_position, ++rows;
    }
    // Every path was taken, often.
    EXPECT_GT(second_reads, rows / 10);
    EXPECT_LT(second_reads, rows * 9 / 10);
    EXPECT_GT(by_position, rows / 10);
  });
}

TEST(SplitTopK, ScoresThatChanceDealsOutAreProvedAtOnce) {
  constexpr int64_t kTop = 2048, kKeys = 65536;
  ASSERT_EQ(kv::first_offer(kTop, 8), 346);
  SplitTopK found;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SplitMix64 random(seed);
    std::vector<Candidate> all;
    for (int32_t i = 0; i < kKeys; ++i) all.push_back({static_cast<float>(random.uniform()), i});
    const Split split(all, 8, 64, kTop, [](int) { return kv::first_offer(kTop, 8); });
    find_split_top_k(split.offers(), kTop, found);
    EXPECT_FALSE(found.second_read) << "seed " << seed;
    for (const auto& read : found.reads) {
      EXPECT_LE(read.bytes, 16 + 4 * 346 + 8);  // two keys may share the last score
      EXPECT_GT(kTop * 8, 11 * read.bytes);
    }
    check(split, found);
  }
}

// The first keys of all ranks are chosen, which is proved by the positions of the first parts.
TEST(SplitTopK, EqualScoresAreProvedByPositions) {
  std::vector<Candidate> all;
  for (int32_t i = 0; i < 65536; ++i) all.push_back({0, i});
  const Split split(all, 8, 64, 2048, [](int) { return kv::first_offer(2048, 8); });
  SplitTopK found;
  find_split_top_k(split.offers(), 2048, found);
  EXPECT_TRUE(found.by_position);
  EXPECT_FALSE(found.second_read);
  for (const auto& read : found.reads) EXPECT_EQ(read.bytes, 16 + 4 * 346 + 4 * 346);
  check(split, found);
}

TEST(SplitTopK, RanksWithFewKeysOrNone) {
  SplitTopK found;
  std::vector<Candidate> all;
  for (int32_t i = 0; i < 20; ++i) all.push_back({static_cast<float>(i % 5), i});
  for (int64_t top_k = 1; top_k <= 20; ++top_k) {
    // Blocks of 8: five of the eight ranks have none.
    for (int64_t first : {int64_t{1}, kv::first_offer(top_k, 8)}) {
      check(Split(all, 8, 8, top_k, [&](int) { return first; }), found);
    }
  }
}

}  // namespace
}  // namespace weft::kernels
