// The words that all code shares: checks, results, ids, units, time, random numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <type_traits>

#include "proto/vocab/check.h"
#include "proto/vocab/clock.h"
#include "proto/vocab/ids.h"
#include "proto/vocab/random.h"
#include "proto/vocab/result.h"
#include "proto/vocab/units.h"

namespace weft {
namespace {

// ---- check

TEST(Check, ATrueOneDoesNothing) {
  CHECK(true);
  CHECK_EQ(1, 1);
  CHECK_NE(1, 2);
  CHECK_LT(1, 2);
  CHECK_LE(2, 2);
  CHECK_GT(2, 1);
  CHECK_GE(2, 2);
}

TEST(Check, PartsAreEvaluatedOnFailureOnly) {
  int evaluated = 0;
  const auto part = [&] { return ++evaluated; };
  CHECK(true, "parts ", part());
  EXPECT_EQ(evaluated, 0);
  int once = 0;
  CHECK_GT(++once, 0);
  EXPECT_EQ(once, 1) << "an operand is evaluated once";
}

enum class Colour { kRed = 3, kBlue = 5 };

TEST(CheckDeathTest, AFalseOneSaysPlaceExpressionAndValues) {
  const int rank = 9;
  EXPECT_DEATH(CHECK(rank < 8), "CHECK failed at .*vocab_test.cc:[0-9]+: rank < 8\n");
  EXPECT_DEATH(CHECK(rank < 8, "rank ", rank, " of ", 8), "rank < 8 .* rank 9 of 8");
  EXPECT_DEATH(CHECK_EQ(rank, 8), "rank == 8 .* 9 against 8");
  EXPECT_DEATH(CHECK_NE(rank, 9), "rank != 9 .* 9 against 9");
  EXPECT_DEATH(CHECK_LT(rank, 9), "rank < 9 .* 9 against 9");
  EXPECT_DEATH(CHECK_LE(rank, 8), "rank <= 8 .* 9 against 8");
  EXPECT_DEATH(CHECK_GT(rank, 9), "rank > 9 .* 9 against 9");
  EXPECT_DEATH(CHECK_GE(rank, 10), "rank >= 10 .* 9 against 10");
  EXPECT_DEATH(CHECK_EQ(Colour::kRed, Colour::kBlue), "3 against 5") << "an enum shows its number";
}

TEST(CheckDeathTest, ACheckIsOneStatement) {
  const bool inner = false;
  if (inner)
    CHECK(false);
  else
    SUCCEED();
  EXPECT_DEATH(CHECK(false), "CHECK failed");
}

// ---- result

Result<int> half(int value) {
  if (value % 2 != 0) return error(ErrorCode::kInvalidArgument, "must be even", "value");
  return value / 2;
}

Result<int> quarter(int value) {
  TRY(const int once, half(value));
  TRY(const int twice, half(once));
  return twice;
}

Result<void> eighth(int value, int& out) {
  TRY(out, quarter(value));
  TRY_VOID([&]() -> Result<void> {
    TRY(out, half(out));
    return {};
  }());
  return {};
}

TEST(Result, HoldsAValueOrAnError) {
  const Result<int> good = half(8);
  ASSERT_TRUE(good.has_value());
  EXPECT_TRUE(static_cast<bool>(good));
  EXPECT_EQ(*good, 4);
  const Result<int> bad = half(7);
  ASSERT_FALSE(bad);
  EXPECT_EQ(bad.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(bad.error().message, "must be even");
  EXPECT_EQ(bad.error().field, "value");
}

TEST(Result, TryPassesTheFirstErrorOn) {
  EXPECT_EQ(*quarter(12), 3);
  EXPECT_FALSE(quarter(6));
  EXPECT_FALSE(quarter(5));
  int out = 0;
  EXPECT_TRUE(eighth(24, out));
  EXPECT_EQ(out, 3);
  const auto failed = eighth(20, out);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().field, "value");
}

TEST(Result, MovesWhatCannotBeCopied) {
  const auto make = [](bool good) -> Result<std::unique_ptr<int>> {
    if (!good) return error(ErrorCode::kNotFound, "none");
    return std::make_unique<int>(7);
  };
  std::unique_ptr<int> taken = std::move(make(true)).value();
  EXPECT_EQ(*taken, 7);
  const auto pass = [&](bool good) -> Result<int> {
    TRY(auto pointer, make(good));
    return *pointer;
  };
  EXPECT_EQ(*pass(true), 7);
  EXPECT_EQ(pass(false).error().code, ErrorCode::kNotFound);
}

TEST(Result, AValueMayBeAnEmptyStringOrAString) {
  EXPECT_EQ(*Result<std::string>(std::string()), "");
  EXPECT_EQ(Result<std::string>(std::string("x"))->size(), 1u);
}

TEST(ResultDeathTest, TheWrongSideIsABug) {
  EXPECT_DEATH((void)half(7).value(), "invalid_argument: value: must be even");
  EXPECT_DEATH((void)half(8).error(), "CHECK failed");
  EXPECT_DEATH(Result<void>(error(ErrorCode::kIo, "disk")).value(), "io: disk");
  EXPECT_DEATH((void)Result<void>().error(), "CHECK failed");
}

TEST(Error, TextHasTheNameTheFieldAndTheSentence) {
  EXPECT_EQ(error(ErrorCode::kTooLarge, "at most 7", "prompt").text(), "too_large: prompt: at most 7");
  EXPECT_EQ(error(ErrorCode::kIo, "disk full").text(), "io: disk full");
  EXPECT_EQ(error(ErrorCode::kCancelled, "").text(), "cancelled");
}

TEST(Error, EveryCodeHasANameOfItsOwn) {
  std::set<std::string> names;
  for (int code = 0; code <= static_cast<int>(ErrorCode::kNotPermitted); ++code) {
    EXPECT_TRUE(names.insert(error_code_name(static_cast<ErrorCode>(code))).second) << code;
  }
  EXPECT_STREQ(error_code_name(static_cast<ErrorCode>(999)), "internal") << "a peer may send any number";
}

// ---- ids

TEST(Ids, AreDistinctTypesWithNumbers) {
  static_assert(!std::is_convertible_v<RequestId, uint64_t>);
  static_assert(!std::is_convertible_v<RequestId, StepId>);
  static_assert(std::is_same_v<decltype(number(StepId{5})), uint64_t>);
  static_assert(std::is_same_v<decltype(number(PageId{5})), uint32_t>);
  EXPECT_EQ(number(StepId{5}), 5u);
  EXPECT_EQ(number(kNoPage), std::numeric_limits<uint32_t>::max());
}

TEST(Ids, MasksOfRanks) {
  EXPECT_EQ(all_ranks(1), 0b1u);
  EXPECT_EQ(all_ranks(kMaxRanks), 0xffu);
  for (int rank = 0; rank < kMaxRanks; ++rank) {
    EXPECT_EQ(rank_count_of(mask_of(rank)), 1);
    EXPECT_EQ(lowest_rank(mask_of(rank)), rank);
    EXPECT_EQ(lowest_rank(all_ranks(kMaxRanks) & ~all_ranks(rank)), rank);
    for (int other = 0; other < kMaxRanks; ++other) EXPECT_EQ(holds(mask_of(rank), other), rank == other);
  }
}

TEST(Ids, Types) {
  EXPECT_EQ(dtype_bytes(DType::kF32), 4u);
  EXPECT_EQ(dtype_bytes(DType::kBF16), 2u);
  EXPECT_STREQ(dtype_name(DType::kF32), "f32");
  EXPECT_STREQ(dtype_name(DType::kBF16), "bf16");
}

// ---- units

TEST(Units, Division) {
  EXPECT_EQ(ceil_div(0, 8), 0);
  EXPECT_EQ(ceil_div(1, 8), 1);
  EXPECT_EQ(ceil_div(8, 8), 1);
  EXPECT_EQ(ceil_div(9, 8), 2);
  EXPECT_EQ(round_up(0, 64), 0);
  EXPECT_EQ(round_up(1, 64), 64);
  EXPECT_EQ(round_up(64, 64), 64);
}

TEST(Units, BytesForPeople) {
  const std::pair<int64_t, const char*> cases[] = {{0, "0 B"},
                                                   {812, "812 B"},
                                                   {1023, "1023 B"},
                                                   {kKiB, "1.0 KiB"},
                                                   {1536, "1.5 KiB"},
                                                   {kMiB, "1.0 MiB"},
                                                   {10 * kGiB, "10.0 GiB"},
                                                   {2048 * kGiB, "2.0 TiB"},
                                                   {int64_t{1} << 52, "4096.0 TiB"}};
  for (const auto& [bytes, text] : cases) EXPECT_EQ(human_bytes(bytes), text);
}

TEST(Units, CountsForPeople) {
  const std::pair<int64_t, const char*> cases[] = {
      {0, "0"},        {7, "7"},          {999, "999"},
      {1000, "1,000"}, {32768, "32,768"}, {1048576, "1,048,576"},
      {-7, "-7"},      {-1000, "-1,000"}, {std::numeric_limits<int64_t>::max(), "9,223,372,036,854,775,807"}};
  for (const auto& [count, text] : cases) EXPECT_EQ(human_count(count), text);
}

// ---- clock

TEST(Clock, TimeIsAValue) {
  using std::chrono::milliseconds;
  const Time early{1'000}, late{3'500'000};
  EXPECT_LT(early, late);
  EXPECT_EQ(late - early, Duration(3'499'000));
  EXPECT_EQ((early + milliseconds(2)).ns, 2'001'000);
  EXPECT_EQ(early + (late - early), late);
  EXPECT_DOUBLE_EQ(seconds(milliseconds(250)), 0.25);
}

TEST(Clock, DoesNotRunBackwards) {
  Time last = monotonic_now();
  for (int i = 0; i < 1000; ++i) {
    const Time now = monotonic_now();
    ASSERT_GE(now, last);
    last = now;
  }
}

// ---- random

// The first numbers of the published generator for the seed 1234567.
TEST(SplitMix64, HasItsKnownAnswers) {
  SplitMix64 random(1234567);
  for (const uint64_t expected : {6457827717110365317ull, 3203168211198807973ull, 9817491932198370423ull,
                                  4593380528125082431ull, 16408922859458223821ull}) {
    EXPECT_EQ(random.next(), expected);
  }
  EXPECT_EQ(mix64(1234567), 6457827717110365317ull);
}

TEST(SplitMix64, StaysWithinItsBounds) {
  SplitMix64 random(7);
  for (const uint64_t bound : {uint64_t{1}, uint64_t{2}, uint64_t{7}, uint64_t{1} << 40, ~uint64_t{0}}) {
    for (int i = 0; i < 1000; ++i) ASSERT_LT(random.below(bound), bound);
  }
  std::set<uint64_t> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(random.below(7));
  EXPECT_EQ(seen.size(), 7u) << "every value comes";
  double least = 1, most = 0;
  for (int i = 0; i < 10'000; ++i) {
    const double value = random.uniform();
    ASSERT_GE(value, 0);
    ASSERT_LT(value, 1);
    least = std::min(least, value);
    most = std::max(most, value);
  }
  EXPECT_LT(least, 0.01);
  EXPECT_GT(most, 0.99);
}

// Philox4x32-10 as published (Random123 known answers: counter and key all zero, all ones, digits of pi).
TEST(Philox, HasItsKnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  EXPECT_EQ(philox4x32({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

}  // namespace
}  // namespace weft
