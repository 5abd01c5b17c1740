// Goal: a request that finds no room gets it in this order: from cached blocks, from copies that others give
// up, from less urgent ones that leave; never in vain, never twice for nothing, and nobody's answer changes.
// Method: exact scenes on small pools, and random ones with everything that can happen in between.
#include <gtest/gtest.h>

#include "controlplane/pressure.h"
#include "proto/vocab/random.h"
#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

using What = PressureNotice::What;

Limits pressed(int ranks, int64_t pages, OnPressure on_pressure = OnPressure::kPreempt, int64_t host = 0) {
  Limits limits = small_limits(ranks, pages);
  limits.on_pressure = on_pressure;
  limits.max_context = 1024;
  limits.host_pages = {host, host};
  return limits;
}

const GroupingWish kSplitWish = wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit);

class PressureTest : public ::testing::Test {
 protected:
  void make(const Limits& limits) { harness_.emplace(limits); }
  Harness& h() { return *harness_; }
  // Needs so many blocks, and answers with `answer` tokens.
  RequestId submit(uint32_t seed, int64_t blocks, int64_t answer, int priority = 0,
                   GroupingWish grouping = kTpWish) {
    RequestArrived arrived = h().arrival(text(seed, blocks * 4 - answer + 1), answer, grouping);
    arrived.priority = priority;
    return h().submit(arrived);
  }
  bool waits(RequestId id) { return h().plane.request(id)->state == RequestState::kWaiting; }
  std::string placed(RequestId id) {
    return placement_name(h().plane.limits(), h().plane.request(id)->placement);
  }
  bool thinned(RequestId id) { return h().plane.request(id)->thinned; }
  Counters counters() { return h().plane.counters(); }
  void expect_counts(int64_t thinned, int64_t preempted) {
    EXPECT_EQ(counters().thinned, thinned);
    EXPECT_EQ(counters().preempted, preempted);
  }
  std::optional<Harness> harness_;
};

TEST(ThinWish, IsTheMostStripedFormWithTheSameBits) {
  const auto named = [](int ranks, kv::DecodeWish decode, kv::IndexWish index = {}) {
    const Limits limits = small_limits(ranks, 8);
    GroupingWish wish;
    wish.decode = decode;
    wish.index = index;
    const GroupingWish thin = thin_wish(limits, wish);
    EXPECT_TRUE(kv::validate_decode(thin.decode, ranks));
    EXPECT_EQ(thin_wish(limits, thin), thin);
    return kv::decode_name(thin.decode) + " " + kv::index_name(thin.index);
  };
  using enum kv::DecodeKind;
  EXPECT_EQ(named(4, {kTp}), "dcp(4) split");
  EXPECT_EQ(named(8, {kDcp, 2}), "dcp(8) split");
  EXPECT_EQ(named(8, {kDcp, 8}, kv::IndexKind::kSplit), "dcp(8) split");
  EXPECT_EQ(named(8, {kTp}, {kv::IndexKind::kSplit, 2}), "dcp(8) split");
  EXPECT_EQ(named(8, {kDp, 1, 4}), "dp(4)xdcp(4) split");
  EXPECT_EQ(named(8, {kDp, 1, 1}), "dp copied") << "there is one copy";
  EXPECT_EQ(named(1, {kTp}), "tp copied");
  EXPECT_EQ(named(6, {kTp}), "dcp(2) split") << "3 and 6 do not divide the number of shards";
  EXPECT_EQ(named(6, {kDcp, 3}), "dcp(3) split(2)");
  EXPECT_EQ(named(3, {kTp}), "tp copied");
}

TEST_F(PressureTest, CachedBlocksGoFirst) {
  make(pressed(4, 20));
  submit(1, 10, 1);
  h().run_all();
  const RequestId running = submit(2, 10, 8, 1);
  h().step();
  const RequestId urgent = submit(3, 10, 8);
  h().step();
  EXPECT_FALSE(waits(urgent));
  h().run_all();
  h().expect_right(running);
  h().expect_right(urgent);
  expect_counts(0, 0);
}

TEST_F(PressureTest, ItComesInThinBeforeOthersGiveUpAnything) {
  make(pressed(4, 20));
  const RequestId running = submit(1, 14, 8, 1);
  h().step();
  const RequestId next = submit(2, 14, 8);
  h().step();
  EXPECT_EQ(placed(running), "tp, index copied");
  EXPECT_EQ(placed(next), "dcp(4), index split");
  EXPECT_TRUE(thinned(next));
  EXPECT_EQ(h().plane.request(next)->wish.decode.kind, kv::DecodeKind::kTp) << "the wish stays";
  h().run_all();
  h().expect_right(running);
  h().expect_right(next);
  expect_counts(1, 0);
}

TEST_F(PressureTest, ThinningMovesNothingAndIsThereInOneStep) {
  make(pressed(4, 20));
  const RequestId running = submit(1, 20, 30, 1);
  for (int i = 0; i < 3; ++i) h().step();
  EXPECT_EQ(h().entries(1).used + h().entries(1).reserved, 20);
  const RequestId next = submit(2, 40, 8, 0, kSplitWish);  // 10 of each rank
  h().step();                                              // the switch
  EXPECT_EQ(placed(running), "dcp(4), index split");
  h().step();
  EXPECT_FALSE(waits(next));
  for (const PressureNotice& notice : h().pressed) EXPECT_EQ(notice.what, What::kThinned);
  ASSERT_EQ(h().pressed.size(), 1u);
  EXPECT_EQ(h().pressed[0].request, running);
  h().run_all();
  h().expect_right(running);
  h().expect_right(next);
  expect_counts(1, 0);
}

TEST_F(PressureTest, NobodyIsThinnedInVain) {
  for (const OnPressure mode : {OnPressure::kThin, OnPressure::kPreempt}) {
    make(pressed(4, 20, mode));
    const RequestId running = submit(1, 20, 30);
    for (int i = 0; i < 3; ++i) h().step();
    // Split it takes 16 on each rank; the other one needs 5 then.
    const RequestId next = submit(2, 64, 8, 0, kSplitWish);
    for (int i = 0; i < 3; ++i) h().step();
    EXPECT_TRUE(waits(next));
    EXPECT_EQ(placed(running), "tp, index copied");
    expect_counts(0, 0);
    h().run_all();
    h().expect_right(running);
    h().expect_right(next);
    expect_counts(0, 0);
  }
}

TEST_F(PressureTest, AsFewAsDoAreThinned) {
  make(pressed(4, 40));
  const RequestId small = submit(1, 8, 20);
  const RequestId large = submit(2, 20, 20);
  const RequestId middle = submit(3, 12, 20);
  for (int i = 0; i < 2; ++i) h().step();
  const RequestId next = submit(4, 60, 8, 0, kSplitWish);  // 15 on each: what thinning the large one gives
  for (int i = 0; i < 2; ++i) h().step();
  EXPECT_FALSE(waits(next));
  EXPECT_FALSE(thinned(small));
  EXPECT_TRUE(thinned(large));
  EXPECT_FALSE(thinned(middle));
  h().run_all();
  for (const RequestId id : {small, large, middle, next}) h().expect_right(id);
}

TEST_F(PressureTest, MoreUrgentOnesKeepTheirCopies) {
  make(pressed(4, 20));
  const RequestId running = submit(1, 20, 30, -1);
  for (int i = 0; i < 3; ++i) h().step();
  const RequestId next = submit(2, 8, 8);
  for (int i = 0; i < 3; ++i) h().step();
  EXPECT_TRUE(waits(next));
  EXPECT_FALSE(thinned(running));
  h().run_all();
  expect_counts(0, 0);
  h().expect_right(next);
}

TEST_F(PressureTest, CopiesComeBackWhenItIsCalm) {
  Limits limits = pressed(4, 32);
  limits.calm_plans = 10;
  make(limits);
  const RequestId running = submit(1, 20, 60);
  for (int i = 0; i < 3; ++i) h().step();
  const RequestId next = submit(2, 20, 4);
  h().step();
  ASSERT_TRUE(thinned(next));
  while (!h().outcome(next).finished) h().step();
  expect_counts(1, 0);
  // The other way round: one that stays gives up its copies for one that ends soon.
  const RequestId third = submit(3, 52, 4, 0, kSplitWish);
  const auto before = counters().plans;
  for (int i = 0; i < 2; ++i) h().step();
  ASSERT_TRUE(thinned(running));
  while (!h().outcome(third).finished) h().step();
  int64_t steps = 0;
  while (thinned(running)) {
    ASSERT_TRUE(h().plan());
    const bool back = !thinned(running);
    EXPECT_EQ(!h().in_flight.back().copies.empty(), back) << "with the plan that gives them back";
    h().run_oldest();
    ++steps;
  }
  EXPECT_GE(counters().plans - before, limits.calm_plans);
  EXPECT_LT(steps, 2 * limits.calm_plans);
  EXPECT_EQ(placed(running), "tp, index copied");
  EXPECT_EQ(counters().thickened, 1);
  h().run_all();
  h().expect_right(running);
  h().expect_right(third);
}

TEST_F(PressureTest, WithoutAMarginCopiesDoNotComeBack) {
  Limits limits = pressed(4, 20);
  limits.calm_plans = 2;
  make(limits);
  const RequestId running = submit(1, 20, 60);  // all there is, if it lies everywhere
  for (int i = 0; i < 3; ++i) h().step();
  const RequestId next = submit(2, 8, 4);
  while (!h().outcome(next).finished) h().step();
  for (int i = 0; i < 20; ++i) h().step();
  EXPECT_TRUE(thinned(running));
  EXPECT_EQ(counters().thickened, 0);
  h().run_all();
  h().expect_right(running);
}

TEST_F(PressureTest, TheLeastUrgentAndLatestLeavesWhenItsRowsAreDone) {
  make(pressed(1, 30));
  const RequestId first = submit(1, 10, 20, 1);
  const RequestId second = submit(2, 10, 20, 2);
  const RequestId third = submit(3, 10, 20, 2);
  for (int i = 0; i < 5; ++i) h().step();
  ASSERT_TRUE(h().plan());  // in flight
  const size_t told = h().outcome(third).tokens.size();
  const RequestId urgent = submit(4, 10, 6);
  const auto without = h().plan();
  ASSERT_TRUE(without);
  for (const Span& span : without->spans) EXPECT_NE(span.request, third) << "is planned no more";
  EXPECT_FALSE(waits(third));
  h().run_oldest();
  EXPECT_EQ(h().outcome(third).tokens.size(), told + 1) << "its rows count";
  h().plan();
  EXPECT_TRUE(waits(third));
  EXPECT_FALSE(waits(urgent));
  EXPECT_EQ(h().plane.request(third)->preempted, 1);
  while (!h().in_flight.empty()) h().run_oldest();
  h().run_all();
  for (const RequestId id : {first, second, third, urgent}) h().expect_right(id);
  expect_counts(0, 1);
}

TEST_F(PressureTest, EquallyUrgentOnesDoNotLeave) {
  make(pressed(1, 20));
  const RequestId running = submit(1, 20, 30);
  h().step();
  const RequestId next = submit(2, 20, 4);
  for (int i = 0; i < 5; ++i) h().step();
  EXPECT_TRUE(waits(next));
  h().run_all();
  h().expect_right(running);
  h().expect_right(next);
  expect_counts(0, 0);
}

TEST_F(PressureTest, NobodyLeavesInVain) {
  make(pressed(1, 30));
  const RequestId kept = submit(1, 10, 30);
  const RequestId other = submit(2, 10, 30, 1);
  for (int i = 0; i < 2; ++i) h().step();
  const RequestId next = submit(3, 24, 4);  // 20 could be had
  for (int i = 0; i < 5; ++i) h().step();
  EXPECT_TRUE(waits(next));
  EXPECT_FALSE(waits(other));
  h().run_all();
  for (const RequestId id : {kept, other, next}) h().expect_right(id);
  expect_counts(0, 0);
}

TEST_F(PressureTest, NoMoreLeaveThanNeeded) {
  make(pressed(1, 30));
  const RequestId large = submit(1, 16, 20, 1);
  const RequestId small = submit(2, 4, 12, 2);  // less urgent, and too small to help
  const RequestId other = submit(3, 10, 20, 1);
  for (int i = 0; i < 3; ++i) h().step();
  const RequestId urgent = submit(4, 10, 4);
  for (int i = 0; i < 2; ++i) h().step();
  EXPECT_FALSE(waits(urgent));
  EXPECT_FALSE(waits(large));
  EXPECT_FALSE(waits(small)) << "the other one is needed and does alone";
  EXPECT_TRUE(waits(other));
  h().run_all();
  for (const RequestId id : {large, small, other, urgent}) h().expect_right(id);
  expect_counts(0, 1);
}

TEST_F(PressureTest, OthersAreThinnedBesideThoseWhoLeave) {
  make(pressed(4, 40));
  const RequestId same = submit(1, 20, 30);
  const RequestId less = submit(2, 20, 30, 1);
  for (int i = 0; i < 3; ++i) h().step();
  const RequestId urgent = submit(3, 140, 4, 0, kSplitWish);  // 35 on each
  for (int i = 0; i < 3; ++i) h().step();
  EXPECT_FALSE(waits(urgent));
  EXPECT_TRUE(thinned(same));
  EXPECT_TRUE(waits(less));
  h().run_all();
  for (const RequestId id : {same, less, urgent}) h().expect_right(id);
}

TEST_F(PressureTest, WhatLeftComesBackFromTheHost) {
  for (const HostWrite write : {HostWrite::kBack, HostWrite::kThrough}) {
    Limits limits = pressed(1, 20, OnPressure::kPreempt, 60);
    limits.host_write = write;
    make(limits);
    const RequestId running = submit(1, 20, 40, 1);
    while (h().outcome(running).tokens.size() < 11) h().step();
    const int64_t rows = 41 + 11 - 1;
    const RequestId urgent = submit(2, 20, 4);
    h().run_all();
    h().expect_right(running);
    h().expect_right(urgent);
    expect_counts(0, 1);
    EXPECT_GT(counters().loaded_bytes, 0);
    EXPECT_EQ(counters().replayed_rows, rows % 4) << "those of the block that was not full";
  }
}

TEST_F(PressureTest, WithoutAHostPoolItIsComputedAgain) {
  make(pressed(1, 20));
  const RequestId running = submit(1, 20, 40, 1);
  while (h().outcome(running).tokens.size() < 11) h().step();
  const RequestId urgent = submit(2, 20, 4);
  h().run_all();
  h().expect_right(running);
  h().expect_right(urgent);
  expect_counts(0, 1);
  EXPECT_EQ(counters().replayed_rows, 41 + 11 - 1);
  EXPECT_EQ(counters().computed_prompt_tokens, 41 + 77);
}

TEST_F(PressureTest, AHalfReadPromptIsNotToldTwice) {
  Limits limits = pressed(1, 20);
  limits.max_chunk_rows = 10;
  make(limits);
  const RequestId running = submit(1, 20, 4, 1);
  for (int i = 0; i < 3; ++i) h().step();
  const RequestId urgent = submit(2, 20, 4);
  h().run_all();
  h().expect_right(running);
  h().expect_right(urgent);
  expect_counts(0, 1);
  const auto& done = h().outcome(running).prefill_done;
  EXPECT_TRUE(std::is_sorted(done.begin(), done.end()));
  EXPECT_EQ(done.back(), 77);
  EXPECT_EQ(counters().replayed_rows, 30);
  EXPECT_EQ(counters().computed_prompt_tokens, 2 * 77);
}

TEST_F(PressureTest, NobodyIsAskedAgainBeforeItComputedSomethingNew) {
  make(pressed(1, 20));
  const RequestId running = submit(1, 20, 40, 1);
  while (h().outcome(running).tokens.size() < 11) h().step();
  const RequestId urgent = submit(2, 20, 2);
  while (!h().outcome(urgent).finished) h().step();
  ASSERT_TRUE(h().plan());  // it comes back, its rows are computed again
  EXPECT_FALSE(waits(running));
  const RequestId more = submit(3, 20, 2);
  EXPECT_EQ(h().outcome(running).tokens.size(), 11u);
  while (h().outcome(running).tokens.size() == 11) {
    EXPECT_TRUE(waits(more));
    h().plan();
    h().run_oldest();
  }
  while (!h().in_flight.empty()) h().run_oldest();
  h().step();
  EXPECT_TRUE(waits(running));
  EXPECT_FALSE(waits(more));
  h().run_all();
  for (const RequestId id : {running, urgent, more}) h().expect_right(id);
  expect_counts(0, 2);
}

TEST_F(PressureTest, WithoutThePrefixCacheAllIsComputedAgain) {
  make(pressed(1, 20, OnPressure::kPreempt, 60));
  RequestArrived arrived = h().arrival(text(1, 41), 40);
  arrived.use_prefix_cache = false;
  arrived.priority = 1;
  arrived.hashes.clear();
  const RequestId running = h().submit(arrived);
  while (h().outcome(running).tokens.size() < 11) h().step();
  const RequestId urgent = submit(2, 20, 4);
  h().run_all();
  h().expect_right(running);
  h().expect_right(urgent);
  EXPECT_EQ(counters().replayed_rows, 51);
}

TEST_F(PressureTest, ThinAloneNeverMakesAnybodyLeave) {
  make(pressed(1, 20, OnPressure::kThin));
  const RequestId running = submit(1, 20, 10, 1);
  h().step();
  const RequestId urgent = submit(2, 20, 4);
  for (int i = 0; i < 3; ++i) h().step();
  EXPECT_TRUE(waits(urgent));
  h().run_all();
  expect_counts(0, 0);
  h().expect_right(running);
}

TEST_F(PressureTest, WhenNobodyNeedsTheRoomAnyMoreNobodyLeaves) {
  make(pressed(1, 20));
  const RequestId running = submit(1, 20, 30, 1);
  for (int i = 0; i < 3; ++i) h().step();
  ASSERT_TRUE(h().plan());
  const RequestId urgent = submit(2, 20, 4);
  h().plan();
  h().feed(CancelRequested{urgent});
  h().run_oldest();
  ASSERT_TRUE(h().plan());
  EXPECT_FALSE(waits(running));
  while (!h().in_flight.empty()) h().run_oldest();
  h().run_all();
  h().expect_right(running);
  expect_counts(0, 0);
}

TEST_F(PressureTest, ACommandForCopiesIsObeyed) {
  make(pressed(4, 32));
  const RequestId running = submit(1, 20, 60);
  for (int i = 0; i < 3; ++i) h().step();
  const RequestId next = submit(2, 52, 4, 0, kSplitWish);
  for (int i = 0; i < 2; ++i) h().step();
  ASSERT_TRUE(thinned(running));
  RegroupRequested prefill{1, running, true, false, false, kTpWish, false};
  h().feed(prefill);
  EXPECT_TRUE(thinned(running)) << "it did not speak of the cache";
  while (!h().outcome(next).finished) h().step();
  h().feed(RegroupRequested{2, running, false, true, true, kTpWish, false});
  EXPECT_FALSE(thinned(running));
  EXPECT_GT(h().regrouped.back().bytes_moved, 0);
  h().step();
  EXPECT_EQ(placed(running), "tp, index copied");
  h().run_all();
  h().expect_right(running);
}

TEST_F(PressureTest, WhoeverIsThinStaysSoWhenRanksComeAndGo) {
  make(pressed(4, 20));
  const RequestId running = submit(1, 14, 4);
  h().step();
  const RequestId next = submit(2, 14, 30);
  h().step();
  ASSERT_TRUE(thinned(next));
  const auto change = [&](bool joins) {
    h().feed(TopologyRequested{1, 3, joins});
    while (!h().in_flight.empty() || h().topologies.empty())
      h().in_flight.empty() ? (void)h().plan() : h().run_oldest();
    const TopologyNotice done = h().topologies.back();
    h().topologies.clear();
    return done.error;
  };
  EXPECT_EQ(change(false).code, ErrorCode::kResourceExhausted) << "over 3 ranks there is no thin form";
  while (!h().outcome(running).finished) h().step();
  EXPECT_EQ(change(false).code, ErrorCode::kOk);
  EXPECT_EQ(placed(next), "tp, index copied");
  EXPECT_EQ(change(true).code, ErrorCode::kOk);
  EXPECT_EQ(placed(next), "dcp(4), index split");
  h().run_all();
  h().expect_right(running);
  h().expect_right(next);
}

// Everything at once; who ended leaves nothing behind, and each time somebody left cost a new row.
TEST_F(PressureTest, AtAnyTimeWithAnybody) {
  int64_t thinned = 0, thickened = 0, preempted = 0, replayed = 0;
  for (uint64_t seed = 1; seed <= 80; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SplitMix64 random(seed);
    const int ranks = 1 << random.below(4);
    Limits limits = pressed(ranks, 20 + static_cast<int64_t>(random.below(20)), OnPressure::kPreempt,
                            random.below(2) == 0 ? 0 : static_cast<int64_t>(random.below(80)));
    limits.host_write = random.below(2) == 0 ? HostWrite::kBack : HostWrite::kThrough;
    limits.calm_plans = 1 + static_cast<int64_t>(random.below(20));
    if (random.below(2) == 0) limits.max_chunk_rows = 1 + static_cast<int64_t>(random.below(20));
    if (random.below(2) == 0) limits.eviction = Eviction::kReuse;
    make(limits);
    std::vector<RequestId> ids;
    int64_t rows = 0;
    const auto any = [&] { return ids[random.below(ids.size())]; };
    for (int event = 0; event < 250; ++event) {
      h().now = h().now + std::chrono::milliseconds(1);
      const uint64_t what = random.below(24);
      if (what < 5 && h().plane.waiting_count() < limits.max_waiting) {
        const std::vector<kv::DecodeWish> wishes = kv::decode_wishes(ranks);
        RequestArrived arrived = h().arrival(
            text(static_cast<uint32_t>(random.below(4)), 1 + static_cast<int64_t>(random.below(60))),
            1 + static_cast<int64_t>(random.below(20)));
        if (random.below(2) == 0) arrived.grouping.decode = wishes[random.below(wishes.size())];
        arrived.grouping.index = random.below(2) == 0 ? kv::IndexKind::kCopied : kv::IndexKind::kSplit;
        arrived.use_prefix_cache = random.below(4) != 0;
        arrived.priority = static_cast<int>(random.below(3));
        arrived.digest = random.below(4) == 0;
        if (random.below(4) == 0) arrived.deadline = std::chrono::milliseconds(1 + random.below(100));
        if (random.below(3) == 0) {
          arrived.speculation.source = random.below(2) == 0 ? DraftSource::kLookup : DraftSource::kMtp;
          arrived.speculation.draft_tokens = 3;
        }
        rows += std::ssize(arrived.prompt) + arrived.max_tokens;
        ids.push_back(h().submit(arrived));
      } else if (what == 5 && !ids.empty()) {
        h().feed(CancelRequested{any()});
      } else if (what == 6 && !ids.empty()) {
        h().feed(PauseChanged{any(), random.below(3) == 0});
      } else if (what == 7 && !ids.empty()) {
        const auto wishes = kv::decode_wishes(ranks);
        RegroupRequested regroup{1, any(), false, true, random.below(2) == 0, kTpWish, false};
        regroup.wish.decode = wishes[random.below(wishes.size())];
        h().feed(regroup);
      } else if (what == 8 && random.below(6) == 0) {
        h().in_flight.clear();
        h().feed(PlansAbandoned{});
      } else if (what == 9 && random.below(6) == 0) {
        const int rank = static_cast<int>(random.below(static_cast<uint64_t>(ranks)));
        h().in_flight.clear();
        h().workers.lose(rank);
        h().feed(MemoryLost{rank});
      } else if (what < 16) {
        h().plan();
      } else if (!h().in_flight.empty()) {
        h().run_oldest();
      }
      if (HasFatalFailure()) return;
    }
    for (const RequestId id : ids) h().feed(PauseChanged{id, false});
    while (!h().in_flight.empty()) h().run_oldest();
    h().run_all();
    h().pass_time(h().now);
    for (const RequestId id : ids) {
      ASSERT_TRUE(h().outcome(id).finished.has_value()) << number(id);
      if (h().finished(id).reason != FinishReason::kError &&
          h().finished(id).reason != FinishReason::kCancelled)
        h().expect_right(id);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(h().entries(rank).used, 0);
      EXPECT_EQ(h().entries(rank).reserved, 0);
    }
    EXPECT_EQ(h().plane.host_pool(kv::Stream::kEntries).used, 0);
    EXPECT_EQ(counters().thinned_now, 0);
    EXPECT_LE(counters().preempted, rows);
    thinned += counters().thinned;
    thickened += counters().thickened;
    preempted += counters().preempted;
    replayed += counters().replayed_rows;
    if (HasFailure()) return;
  }
  std::printf("%lld thinned, %lld thickened, %lld preempted, %lld rows computed again\n",
              static_cast<long long>(thinned), static_cast<long long>(thickened),
              static_cast<long long>(preempted), static_cast<long long>(replayed));
  EXPECT_GT(thinned, 100);
  EXPECT_GT(thickened, 5);
  EXPECT_GT(preempted, 50);
}

}  // namespace
}  // namespace weft::controlplane
