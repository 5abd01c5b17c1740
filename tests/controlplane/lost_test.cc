// Goal: when what lay in one rank's pool is gone, only what lay there alone is computed again, and every
// answer is the one it would have been, each token told once. Method: the fake workers forget that rank's
// slots; every read afterwards is checked.
#include <gtest/gtest.h>

#include <algorithm>

#include "proto/vocab/random.h"
#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

class LostTest : public ::testing::Test {
 protected:
  void make(int ranks, int64_t pages) { harness_.emplace(small_limits(ranks, pages)); }
  Harness& h() { return *harness_; }
  void lose(int rank) {
    h().in_flight.clear();
    h().workers.lose(rank);
    h().feed(MemoryLost{rank});
  }
  std::optional<Harness> harness_;
};

TEST_F(LostTest, WhatLiesElsewhereTooIsNotComputedAgain) {
  make(4, 60);
  const RequestId id = h().submit(text(3, 41), 20, kTpWish);  // every rank has all of it
  for (int i = 0; i < 6; ++i) h().step();
  lose(2);
  const auto next = h().plan();
  ASSERT_TRUE(next.has_value());
  EXPECT_GT(next->copies.size(), 0u);
  for (const PageCopy& copy : next->copies) {
    EXPECT_EQ(copy.to_rank, 2);
    EXPECT_NE(copy.from_rank, 2);
  }
  h().run_oldest();
  h().run_all();
  h().expect_right(id);
  EXPECT_EQ(h().plane.counters().lost_blocks, 0);
  EXPECT_EQ(h().plane.counters().replayed_rows, 0);
}

TEST_F(LostTest, ASequenceGoesOnFromItsFirstLostBlock) {
  make(4, 60);
  const auto striped = wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit);
  const RequestId id = h().submit(text(3, 41), 30, striped);
  while (h().outcome(id).tokens.size() < 13) h().step();
  lose(1);
  EXPECT_EQ(h().outcome(id).tokens.size(), 13u);
  EXPECT_EQ(h().plane.request(id)->state, RequestState::kWaiting);
  const auto plan = h().plan();
  ASSERT_TRUE(plan.has_value());
  ASSERT_EQ(plan->spans.size(), 1u);
  const Span& span = plan->spans[0];
  int64_t first = 0;  // block of rank 1
  while (kv::class_owner(kv::residue_class(first, 4), span.origin, 4) != 1) ++first;
  EXPECT_EQ(span.start, first * 4);
  EXPECT_EQ(span.start + span.rows, 41 + 13 - 1);  // all that is known but the last, which draws
  EXPECT_TRUE(span.prefill);
  EXPECT_EQ(span.sample_rows, 0);
  h().run_oldest();
  h().run_all();
  h().expect_right(id);
  EXPECT_EQ(h().plane.counters().replayed_rows, 41 + 13 - 1 - first * 4);
}

// It finds its own beginning then, and that is no less its work.
TEST_F(LostTest, WhatOneThatFailsComputedBeforeItCameInAgainIsNotFound) {
  make(2, 60);
  const auto striped = wish(kv::DecodeKind::kDcp, 2, kv::IndexKind::kSplit);
  const RequestId failed = h().submit(h().arrival(text(3, 41), 20, striped), 52);  // this row draws no token
  while (h().outcome(failed).tokens.size() < 4) h().step();
  lose(kv::class_owner(kv::residue_class(1, 2), h().plane.request(failed)->origin, 2));
  h().step();
  ASSERT_EQ(h().plane.request(failed)->cached_tokens, 4);
  h().run_all();
  ASSERT_EQ(h().finished(failed).reason, FinishReason::kError);
  const RequestId next = h().submit(text(3, 41), 2, striped);
  h().run_all();
  h().expect_right(next);
  EXPECT_EQ(h().finished(next).cached_tokens, 0);
}

TEST_F(LostTest, WhoComesInAgainBesidePinsKeepsItsGroupingUntilThen) {
  make(2, 60);
  const RequestId pinned = h().submit(text(4, 40), 4, kTpWish);
  h().run_all();
  h().feed(PinRequested{1, pinned});
  const RequestId id = h().submit(text(3, 41), 20, wish(kv::DecodeKind::kDcp, 2, kv::IndexKind::kSplit));
  for (int i = 0; i < 6; ++i) h().step();
  lose(1);
  ASSERT_EQ(h().plane.request(id)->state, RequestState::kWaiting);
  h().feed(RegroupRequested{1, id, false, true, true, kTpWish});
  EXPECT_EQ(h().regrouped.at(0).error.code, ErrorCode::kResourceExhausted);
  h().step();
  h().feed(RegroupRequested{2, id, false, true, true, kTpWish});
  EXPECT_EQ(h().regrouped.at(1).error.code, ErrorCode::kOk);
  h().run_all();
  h().expect_right(id);
}

TEST_F(LostTest, APinThatHasLostEverythingKeepsNobodyBack) {
  make(2, 60);
  const auto striped = wish(kv::DecodeKind::kDcp, 2, kv::IndexKind::kSplit);
  const RequestId pinned = h().submit(text(4, 40), 4, striped);  // its beginning on one rank alone
  h().run_all();
  h().feed(PinRequested{1, pinned});
  const RequestId id = h().submit(text(3, 41), 20, striped);
  for (int i = 0; i < 6; ++i) h().step();
  lose(kv::class_owner(kv::residue_class(0, 2), 0, 2));
  ASSERT_EQ(h().plane.pins().size(), 1u);
  ASSERT_EQ(h().plane.pins()[0].blocks, 0);
  ASSERT_EQ(h().plane.request(id)->state, RequestState::kWaiting);
  h().feed(RegroupRequested{1, id, false, true, true, kTpWish});
  EXPECT_EQ(h().regrouped.at(0).error.code, ErrorCode::kOk);
  h().run_all();
  h().expect_right(id);
  h().feed(UnpinRequested{2, 1});
  EXPECT_EQ(h().plane.pins().size(), 0u);
}

// Two ranks have room for both, one has not.
TEST_F(LostTest, WhoComesInAgainMustFitBesidePinsWhenRanksLeave) {
  make(2, 20);
  const auto striped = wish(kv::DecodeKind::kDcp, 2, kv::IndexKind::kSplit);
  const RequestId pinned = h().submit(text(4, 40), 4, kTpWish);  // 10 full blocks on each
  h().run_all();
  h().feed(PinRequested{1, pinned});
  const RequestId id = h().submit(text(3, 41), 20, striped);  // 15 blocks
  for (int i = 0; i < 6; ++i) h().step();
  lose(1);
  ASSERT_EQ(h().plane.request(id)->state, RequestState::kWaiting);
  ASSERT_EQ(h().plane.pinned_blocks(), 10);
  h().feed(TopologyRequested{1, 1, false});
  h().run_all();
  EXPECT_EQ(h().topologies.at(0).error.code, ErrorCode::kTooLarge);
  h().expect_right(id);
}

TEST_F(LostTest, APromptThatIsBeingReadGoesOn) {
  Limits limits = small_limits(2, 60);
  limits.max_chunk_rows = 8;
  harness_.emplace(limits);
  const RequestId id = h().submit(text(3, 60), 5, wish(kv::DecodeKind::kDcp, 2, kv::IndexKind::kSplit));
  for (int i = 0; i < 3; ++i) h().step();
  ASSERT_TRUE(h().plan().has_value());  // in flight when it happens
  lose(0);
  h().run_all();
  h().expect_right(id);
}

TEST_F(LostTest, ThePrefixCacheForgetsWhatHangsBelow) {
  make(2, 60);
  const auto prompt = text(9, 64);
  h().submit(prompt, 2, wish(kv::DecodeKind::kDcp, 2, kv::IndexKind::kSplit));
  h().run_all();
  EXPECT_GT(h().entries(0).cached, 0);
  lose(1);
  int64_t first = 0;
  const int origin = 0;  // of the first request of all
  while (kv::class_owner(kv::residue_class(first, 2), origin, 2) != 1) ++first;
  auto longer = prompt;
  longer.push_back(1);
  const RequestId again = h().submit(longer, 3);
  h().run_all();
  h().expect_right(again);
  EXPECT_EQ(h().finished(again).cached_tokens, first * 4);
}

TEST_F(LostTest, AChangeOfRanksMeanwhileIsRolledBack) {
  make(4, 120);
  const RequestId id = h().submit(text(3, 41), 20, wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit));
  for (int i = 0; i < 4; ++i) h().step();
  h().feed(TopologyRequested{1, 3, false});
  ASSERT_TRUE(h().plan().has_value());
  lose(0);
  ASSERT_EQ(h().topologies.size(), 1u);
  EXPECT_EQ(h().topologies[0].error.code, ErrorCode::kUnavailable);
  EXPECT_EQ(h().plane.limits().active().ranks(), 0b1111u);
  h().run_all();
  h().expect_right(id);
}

TEST_F(LostTest, APinEndsWhereItsContextIsLost) {
  for (const int drained : {0, 1, 2}) {
    make(3, 120);
    const auto striped = wish(kv::DecodeKind::kDcp, 3, kv::IndexKind::kSplit);
    const RequestId id = h().submit(text(3, 41), 20, striped);
    for (int i = 0; i < 4; ++i) h().step();
    h().feed(PinRequested{1, id});
    ASSERT_EQ(h().pins.at(0).error.code, ErrorCode::kOk);
    lose(1);
    EXPECT_GT(h().plane.counters().lost_blocks, 0);
    int64_t first = 0;  // block of rank 1; the first request of all has origin 0
    while (kv::class_owner(kv::residue_class(first, 3), 0, 3) != 1) ++first;
    ASSERT_EQ(h().plane.pins().size(), 1u);
    EXPECT_EQ(h().plane.pins()[0].blocks, first);
    EXPECT_EQ(h().plane.pinned_blocks(), first);
    h().feed(TopologyRequested{1, drained, false});
    h().run_all();
    ASSERT_EQ(h().topologies.size(), 1u);
    EXPECT_EQ(h().topologies[0].error.code, ErrorCode::kOk);
    EXPECT_EQ(h().entries(drained).used, 0);
    h().expect_right(id);
    h().feed(UnpinRequested{2, 1});
    EXPECT_EQ(h().plane.pins().size(), 0u);
  }
}

// Pinned, its own blocks take all the room there is.
TEST_F(LostTest, ARequestWhoseOwnContextIsPinnedComesInAgain) {
  for (const int64_t steps : {1, 9}) {
    make(1, 12);
    const RequestId id = h().submit(text(3, 40), 8);
    for (int64_t i = 0; i < steps; ++i) h().step();
    if (steps > 1) h().feed(PinRequested{1, id});
    for (int64_t i = 1; i < steps / 3; ++i) h().step();
    lose(0);
    h().run_all();
    h().expect_right(id);
  }
}

TEST_F(LostTest, AtAnyTimeWithAnybody) {
  int64_t lost = 0, replayed = 0;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SplitMix64 random(seed);
    const int ranks = 1 + static_cast<int>(random.below(4));
    make(ranks, 20 + static_cast<int64_t>(random.below(100)));
    std::vector<RequestId> ids;
    for (int event = 0; event < 150; ++event) {
      switch (random.below(10)) {
        case 0:
        case 1: {
          const std::vector<kv::DecodeWish> wishes = kv::decode_wishes(ranks);
          RequestArrived arrived = h().arrival(
              text(static_cast<uint32_t>(random.below(3)), 1 + static_cast<int64_t>(random.below(60))),
              1 + static_cast<int64_t>(random.below(14)));
          arrived.grouping.decode = wishes[random.below(wishes.size())];
          arrived.grouping.index = random.below(2) == 0 ? kv::IndexKind::kCopied : kv::IndexKind::kSplit;
          arrived.use_prefix_cache = random.below(4) != 0;
          if (random.below(3) == 0) {
            arrived.speculation.source = random.below(2) == 0 ? DraftSource::kLookup : DraftSource::kMtp;
            arrived.speculation.draft_tokens = 3;
          }
          ids.push_back(h().submit(arrived));
          break;
        }
        case 2:
          if (random.below(3) == 0) {
            lose(static_cast<int>(random.below(static_cast<uint64_t>(ranks))));
            ++lost;
          }
          break;
        case 3:
        case 4:
        case 5:
          h().plan();
          break;
        default:
          if (!h().in_flight.empty()) h().run_oldest();
      }
    }
    while (!h().in_flight.empty()) h().run_oldest();
    h().run_all();
    for (const RequestId id : ids) {
      if (h().outcome(id).finished && h().finished(id).error.code == ErrorCode::kTooLarge) continue;
      if (h().outcome(id).finished && h().finished(id).error.code == ErrorCode::kResourceExhausted) continue;
      h().expect_right(id);
    }
    replayed += h().plane.counters().replayed_rows;
    if (HasFailure()) return;
  }
  std::printf("%lld losses, %lld rows computed again\n", static_cast<long long>(lost),
              static_cast<long long>(replayed));
  EXPECT_GT(lost, 100);
  EXPECT_GT(replayed, 100);
}

}  // namespace
}  // namespace weft::controlplane
