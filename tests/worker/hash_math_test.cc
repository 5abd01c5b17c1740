// The oracle of the hash model itself: what grows equals what is computed anew, and no mistake that a cache
// can make leaves the words as they were.
#include <gtest/gtest.h>

#include <set>

#include "worker/model/hash_math.h"

namespace weft::worker::hash_model {
namespace {

std::vector<uint32_t> random_tokens(SplitMix64& random, int64_t count, uint32_t vocabulary) {
  std::vector<uint32_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<uint32_t>(random.below(vocabulary)));
  return tokens;
}

TEST(HashMath, AGrowingContextEqualsTheSlowForm) {
  constexpr uint64_t kSeed = 1;
  SplitMix64 random(kSeed);
  for (int trial = 0; trial < 20; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(kSeed) + ", trial " + std::to_string(trial));
    Shape shape;
    shape.layers = 1 + static_cast<int>(random.below(3));
    shape.parts = 1 << random.below(3);
    shape.heads = shape.parts * (1 + static_cast<int>(random.below(3)));
    shape.digits = 1 + static_cast<int>(random.below(kDigitsMax));
    shape.key_bits = 1 + static_cast<int>(random.below(kKeyBitsMax));
    shape.vocabulary = 1 + static_cast<uint32_t>(random.below(5000));
    const uint64_t salt = random.next();
    const std::vector<uint32_t> tokens = random_tokens(random, 40, shape.vocabulary);
    Context context(shape, salt);
    for (size_t count = 1; count <= tokens.size(); ++count) {
      context.append(tokens[count - 1]);
      const uint32_t token = next_token(shape, salt, std::span(tokens).first(count));
      ASSERT_EQ(context.next(), token);
      ASSERT_LT(token, shape.vocabulary);
    }
  }
}

// With a vocabulary of 2^32 − 1 two different words give one token about never.
TEST(HashMath, TokensDependOnEveryTokenAndOnTheSalt) {
  constexpr uint64_t kSeed = 2;
  SplitMix64 random(kSeed);
  Shape shape;
  shape.vocabulary = UINT32_MAX;
  const std::vector<uint32_t> tokens = random_tokens(random, 50, shape.vocabulary);
  std::set<uint32_t> seen = {next_token(shape, 7, tokens), next_token(shape, 8, tokens)};
  for (size_t i = 0; i < tokens.size(); ++i) {
    std::vector<uint32_t> other = tokens;
    ++other[i];
    seen.insert(next_token(shape, 7, other));
  }
  for (size_t count = 1; count < tokens.size(); ++count)
    seen.insert(next_token(shape, 7, std::span(tokens).first(count)));
  EXPECT_EQ(seen.size(), 2 + tokens.size() + tokens.size() - 1);
}

// What one head sees, after a mistake of each kind.
TEST(HashMath, EveryMistakeOfACacheShowsInTheSums) {
  constexpr uint64_t kSeed = 3;
  SplitMix64 random(kSeed);
  Shape shape;
  shape.digits = kDigitsMax;
  for (int trial = 0; trial < 200; ++trial) {
    SCOPED_TRACE("seed " + std::to_string(kSeed) + ", trial " + std::to_string(trial));
    const uint64_t salt = random.next();
    const std::vector<uint32_t> tokens =
        random_tokens(random, 1 + static_cast<int64_t>(random.below(100)), 500);
    const auto last = static_cast<int64_t>(tokens.size()) - 1;
    const int column = query_column(shape, salt, 0, 0, last, tokens.back());
    const auto stored = [&](int64_t u) {
      return entry(shape, salt, 0, 0, u, tokens[static_cast<size_t>(u)]);
    };
    Sums all;
    for (int64_t u = 0; u <= last; ++u) all.add(stored(u), column);
    const int64_t at = static_cast<int64_t>(random.below(tokens.size()));
    const Entry right = stored(at);
    const auto weight = static_cast<uint64_t>(right.weight(column));
    const Sums without{all.sum - weight * right.value, all.count - weight};
    Sums doubled = all, foreign = without, shifted = without, zero = without;
    doubled.add(right, column);
    foreign.add(entry(shape, salt + 1, 0, 0, at, tokens[static_cast<size_t>(at)]), column);
    shifted.add(entry(shape, salt, 0, 0, at + 1, tokens[static_cast<size_t>(at)]), column);
    zero.add({}, column);
    const std::set<uint64_t> words = {head_word(shape, 0, 0, all),
                                      head_word(shape, 0, 0, without),
                                      head_word(shape, 0, 0, doubled),
                                      head_word(shape, 0, 0, foreign),
                                      head_word(shape, 0, 0, shifted),
                                      head_word(shape, 0, 0, zero),
                                      head_word(shape, 0, 0, {2 * all.sum, 2 * all.count})};
    EXPECT_EQ(words.size(), at == last && last == 0 ? 6 : 7) << last;
  }
}

TEST(HashMath, SelectionsAreTheBestScoresInOrder) {
  constexpr uint64_t kSeed = 4;
  SplitMix64 random(kSeed);
  Shape shape;
  shape.layers = 2;
  shape.selection = {0, 0};
  shape.index_topk = 8;
  shape.index_heads = 3;
  shape.index_width = 16;
  const std::vector<uint32_t> tokens = random_tokens(random, 60, 100);
  const std::span all(tokens);
  EXPECT_EQ(seen(shape, 1, all.first(8), 0).size(), 8u);
  const std::vector<int64_t> chosen = seen(shape, 1, all, 0);
  ASSERT_EQ(chosen.size(), 8u);
  EXPECT_TRUE(std::is_sorted(chosen.begin(), chosen.end()));
  EXPECT_EQ(chosen, seen(shape, 1, all, 1));
  EXPECT_NE(chosen, seen(shape, 2, all, 0));
  EXPECT_EQ(seen(shape, 1, all.first(9), 0).size(), 8u);
}

TEST(HashMath, WindowsHideWhatCameBefore) {
  Shape shape;
  shape.layers = 2;
  shape.windows = {3, 0};
  const std::vector<uint32_t> tokens = {5, 6, 7, 8};
  EXPECT_EQ(seen(shape, 1, tokens, 0), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(seen(shape, 1, tokens, 1), (std::vector<int64_t>{0, 1, 2, 3}));
}

}  // namespace
}  // namespace weft::worker::hash_model
