// Goal: blocks that lose their room come back from the host instead of being computed again, whatever
// grouping they come back to; a spill or load that did not happen leaves what was there before; room and
// order are kept. Method: exact scenes on small pools; the fake workers check every byte that a row reads.
#include <gtest/gtest.h>

#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

// Pools for 12 blocks if all is on every rank, a host pool for `host` of them.
Limits with_host(int ranks, int64_t host, HostWrite write = HostWrite::kBack) {
  Limits limits = small_limits(ranks, 12);
  limits.host_pages = {host, host};
  limits.host_write = write;
  return limits;
}

std::vector<uint32_t> joined(std::vector<uint32_t> a, const std::vector<uint32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

constexpr int64_t kBlockBytes = 4 * (2 * 16 + 8);

// Fills the pools with something else.
void displace(Harness& harness, uint32_t seed, GroupingWish grouping = kTpWish) {
  const RequestId id = harness.submit(text(seed, 44), 4, grouping);
  harness.run_all();
  harness.expect_right(id);
}

TEST(HostTier, WhatMadeRoomComesBackUnderEveryGrouping) {
  const GroupingWish wishes[] = {kTpWish, wish(kv::DecodeKind::kDcp, 2),
                                 wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit),
                                 wish(kv::DecodeKind::kDp)};
  for (const HostWrite write : {HostWrite::kBack, HostWrite::kThrough}) {
    for (const GroupingWish& before : wishes) {
      for (const GroupingWish& after : wishes) {
        Harness harness(with_host(4, 200, write));
        const RequestId first = harness.submit(text(1, 40), 2, before);
        harness.run_all();
        harness.expect_right(first);
        for (uint32_t seed = 2; seed < 14; ++seed) displace(harness, seed, seed % 2 == 0 ? kTpWish : before);
        const int64_t computed = harness.plane.counters().computed_prompt_tokens;
        const RequestId again = harness.submit(joined(text(1, 40), text(90, 5)), 2, after);
        harness.run_all();
        harness.expect_right(again);
        EXPECT_EQ(harness.finished(again).cached_tokens, 40);
        EXPECT_EQ(harness.plane.counters().computed_prompt_tokens - computed, 5);
        EXPECT_EQ(harness.plane.counters().host_hit_tokens, 40);
        EXPECT_EQ(harness.plane.counters().spilled_bytes % kBlockBytes, 0);
        EXPECT_GE(harness.plane.counters().loaded_bytes, 10 * kBlockBytes);
        EXPECT_EQ(harness.plane.host_pool(kv::Stream::kEntries).used, 0) << "still locked";
      }
    }
  }
}

TEST(HostTier, PagesAreSpilledBeforeTheyAreGivenUp) {
  Harness harness(with_host(1, 40));
  harness.submit(text(1, 40), 1);
  harness.run_all();
  EXPECT_EQ(harness.plane.counters().spilled_bytes, 0);
  harness.submit(text(2, 44), 1);
  // Ten of twelve pages are cached: the chunk gets the two free ones, and what is next in order is spilled
  // meanwhile.
  const auto first = harness.plan();
  ASSERT_TRUE(first.has_value());
  ASSERT_EQ(first->spans.size(), 1u);
  EXPECT_EQ(first->spans[0].rows, 8);
  EXPECT_EQ(first->spills.size(), 20u) << "ten blocks of two parts";
  EXPECT_EQ(harness.plane.host_pool(kv::Stream::kEntries).used, 10);
  EXPECT_FALSE(harness.plan().has_value()) << "they are not there before all have acknowledged";
  harness.run_oldest();
  EXPECT_EQ(harness.plane.host_pool(kv::Stream::kEntries).cached, 10);
  const auto second = harness.plan();
  ASSERT_TRUE(second.has_value());
  EXPECT_EQ(second->spans.at(0).rows, 36);
  EXPECT_TRUE(second->spills.empty());
}

TEST(HostTier, APlanMayCarrySpillsAlone) {
  Limits limits = with_host(1, 40);
  limits.pool_pages[0] = {10, 10};
  Harness harness(limits);
  harness.submit(text(1, 40), 1);
  harness.run_all();
  const RequestId second = harness.submit(text(2, 38), 2);
  const auto spills = harness.plan();
  ASSERT_TRUE(spills.has_value());
  EXPECT_TRUE(spills->spans.empty());
  EXPECT_FALSE(spills->spills.empty());
  harness.run_oldest();
  harness.run_all();
  harness.expect_right(second);
}

TEST(HostTier, WrittenThroughRoomIsThereAtOnce) {
  Harness harness(with_host(1, 40, HostWrite::kThrough));
  harness.submit(text(1, 40), 1);
  harness.run_all();
  EXPECT_EQ(harness.plane.counters().spilled_bytes, 10 * kBlockBytes);
  harness.submit(text(2, 44), 1);
  const auto plan = harness.plan();
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->spans.at(0).rows, 44);
  EXPECT_TRUE(plan->spills.empty());
}

TEST(HostTier, AnAbandonedSpillIsNoCopy) {
  Harness harness(with_host(1, 40));
  harness.submit(text(1, 40), 1);
  harness.run_all();
  const RequestId second = harness.submit(text(2, 44), 1);
  const auto plan = harness.plan();
  ASSERT_FALSE(plan->spills.empty());
  harness.execute(*plan, 30);  // dies on the way
  harness.in_flight.clear();
  harness.feed(PlansAbandoned{});
  EXPECT_EQ(harness.plane.host_pool(kv::Stream::kEntries).free, 40);
  EXPECT_EQ(harness.plane.counters().spilled_bytes, 0);
  harness.run_all();
  harness.expect_right(second);
  // Nothing was given up before it was spilled again.
  const RequestId again = harness.submit(text(1, 40), 1);
  harness.run_all();
  harness.expect_right(again);
  EXPECT_EQ(harness.finished(again).cached_tokens, 39);
}

TEST(HostTier, AnAbandonedLoadIsMadeAgain) {
  Harness harness(with_host(2, 40));
  harness.submit(text(1, 40), 1);
  harness.run_all();
  displace(harness, 2);
  const RequestId again = harness.submit(joined(text(1, 40), text(90, 3)), 2, wish(kv::DecodeKind::kDcp, 2));
  auto plan = harness.plan();
  while (plan && plan->loads.empty()) {
    harness.run_oldest();
    plan = harness.plan();
  }
  ASSERT_TRUE(plan.has_value());
  harness.execute(*plan, 3);
  harness.in_flight.clear();
  harness.feed(PlansAbandoned{});
  const auto repeated = harness.plan();
  ASSERT_TRUE(repeated.has_value());
  EXPECT_EQ(repeated->loads.size(), plan->loads.size());
  harness.run_oldest();
  harness.run_all();
  harness.expect_right(again);
  EXPECT_EQ(harness.finished(again).cached_tokens, 40);
}

TEST(HostTier, AContextLosesItsEndFirst) {
  Harness harness(with_host(1, 16));
  harness.submit(text(1, 40), 1);
  harness.run_all();
  displace(harness, 2);  // ten blocks of the first are spilled
  EXPECT_EQ(harness.plane.host_pool(kv::Stream::kEntries).cached, 10);
  const RequestId third = harness.submit(text(3, 12), 20);  // and now eleven of the second
  harness.run_all();
  harness.expect_right(third);
  const int64_t hits = harness.plane.counters().host_hit_tokens;
  const RequestId again = harness.submit(text(1, 40), 1);
  harness.run_all();
  harness.expect_right(again);
  EXPECT_EQ(harness.finished(again).cached_tokens, 20) << "five blocks made room";
  EXPECT_EQ(harness.plane.counters().host_hit_tokens - hits, 20);
}

TEST(HostTier, AHostPoolSmallerThanABlockIsNone) {
  Limits limits = with_host(1, 1);
  limits.geometry.streams[0].parts = 2;
  limits.geometry.heads = 2;
  limits.pool_pages[0] = {24, 12};
  Harness harness(limits);
  for (uint32_t seed = 1; seed < 5; ++seed) displace(harness, seed);
  EXPECT_EQ(harness.plane.counters().spilled_bytes, 0);
  EXPECT_GT(harness.plane.counters().evicted_blocks, 0);
}

TEST(HostTier, ALongContextComesInSeveralPlansBesideTheRowsOfOthers) {
  Limits limits = with_host(1, 100);
  limits.pool_pages[0] = {20, 20};
  limits.host_plan_bytes = 3 * kBlockBytes;
  Harness harness(limits);
  harness.submit(text(1, 40), 1);
  harness.run_all();
  for (uint32_t seed = 2; seed < 6; ++seed) displace(harness, seed);
  const RequestId other = harness.submit(text(70, 8), 20);
  harness.step();
  const RequestId again = harness.submit(joined(text(1, 40), text(90, 3)), 2);
  int loading = 0;
  bool beside = false;
  while (const auto plan = harness.plan()) {
    if (!plan->loads.empty()) {
      ++loading;
      EXPECT_LE(plan->loads.size(), 6u);
      for (const Span& span : plan->spans) beside = beside || span.request == other;
    }
    harness.run_oldest();
  }
  EXPECT_EQ(loading, 4) << "ten blocks, three at a time";
  EXPECT_TRUE(beside);
  harness.expect_right(again);
  harness.expect_right(other);
  EXPECT_EQ(harness.finished(again).cached_tokens, 40);
}

TEST(HostTier, WhoseCopiesKillWorkersEndsAndNobodyElse) {
  Limits limits = with_host(1, 100);
  limits.pool_pages[0] = {20, 20};
  limits.host_plan_bytes = 3 * kBlockBytes;
  Harness harness(limits);
  harness.submit(text(1, 40), 1);
  harness.run_all();
  for (uint32_t seed = 2; seed < 6; ++seed) displace(harness, seed);
  const RequestId other = harness.submit(text(70, 8), 20);
  harness.step();
  const RequestId again = harness.submit(joined(text(1, 40), text(90, 3)), 2);
  int abandoned = 0;
  while (const auto plan = harness.plan()) {
    if (plan->loads.empty()) {
      harness.run_oldest();
      continue;
    }
    ASSERT_LT(abandoned, 2) << "and so on for ever";
    for (const Span& span : plan->spans) {
      EXPECT_EQ(span.request, other) << "it waits for the rest of its blocks";
      EXPECT_EQ(abandoned, 0) << "the second time it is alone";
    }
    harness.in_flight.clear();
    harness.feed(PlansAbandoned{});
    ++abandoned;
  }
  EXPECT_EQ(abandoned, 2);
  harness.expect_right(other);
  EXPECT_EQ(harness.finished(again).error.code, ErrorCode::kInternal);
}

TEST(HostTier, WhoWaitsFindsItsBlocksLoaded) {
  Limits limits = with_host(2, 100);
  limits.pool_pages.assign(2, {30, 30});
  limits.max_running = 1;
  limits.host_plan_bytes = 4 * kBlockBytes;
  Harness harness(limits);
  harness.submit(text(1, 40), 1);
  harness.run_all();
  for (uint32_t seed = 2; seed < 8; ++seed) displace(harness, seed);
  const RequestId running = harness.submit(text(70, 8), 30);
  harness.step();
  const RequestId waiting =
      harness.submit(joined(text(1, 40), text(90, 3)), 2, wish(kv::DecodeKind::kDcp, 2));
  size_t loads = 0;
  while (!harness.outcome(running).finished) {
    const auto plan = harness.plan();
    ASSERT_TRUE(plan.has_value());
    for (const HostCopy& load : plan->loads) EXPECT_EQ(load.request, waiting);
    loads += plan->loads.size();
    harness.run_oldest();
  }
  EXPECT_EQ(loads, 10u * 3) << "striped entries once, copied index keys on both ranks";
  const auto plan = harness.plan();
  ASSERT_TRUE(plan.has_value());
  EXPECT_TRUE(plan->loads.empty());
  EXPECT_EQ(plan->spans.at(0).start, 40);
  harness.run_oldest();
  harness.run_all();
  harness.expect_right(running);
  harness.expect_right(waiting);
  EXPECT_EQ(harness.finished(waiting).cached_tokens, 40);
  EXPECT_EQ(harness.plane.counters().host_hit_tokens, 40);
}

TEST(HostTier, APrefetchThatIsAbandonedOrNotWantedLeavesNothingBehind) {
  for (const bool abandoned : {false, true}) {
    Limits limits = with_host(1, 100);
    limits.pool_pages[0] = {30, 30};
    limits.max_running = 1;
    Harness harness(limits);
    harness.submit(text(1, 40), 1);
    harness.run_all();
    for (uint32_t seed = 2; seed < 8; ++seed) displace(harness, seed);
    const RequestId running = harness.submit(text(70, 8), 30);
    harness.step();
    const RequestId waiting = harness.submit(joined(text(1, 40), text(90, 3)), 2);
    auto plan = harness.plan();
    while (plan && plan->loads.empty()) {
      harness.run_oldest();
      plan = harness.plan();
    }
    ASSERT_TRUE(plan.has_value());
    EXPECT_EQ(harness.plane.host_pool(kv::Stream::kEntries).used, 10);
    if (abandoned) {
      harness.execute(*plan, 5);
      harness.in_flight.clear();
      harness.feed(PlansAbandoned{});
    } else {
      harness.feed(CancelRequested{waiting});
      while (!harness.in_flight.empty()) harness.run_oldest();
    }
    EXPECT_EQ(harness.plane.host_pool(kv::Stream::kEntries).used, 0);
    harness.run_all();
    harness.expect_right(running);
    if (abandoned) harness.expect_right(waiting);
    const RequestId again = harness.submit(joined(text(1, 40), text(91, 3)), 2);
    harness.run_all();
    harness.expect_right(again);
    EXPECT_EQ(harness.finished(again).cached_tokens, 40);
  }
}

TEST(HostTier, ACancelledLoadLeavesTheCopies) {
  for (const int plans : {0, 1}) {
    Limits limits = with_host(1, 40);
    limits.host_plan_bytes = 3 * kBlockBytes;
    Harness harness(limits);
    harness.submit(text(1, 40), 1);
    harness.run_all();
    displace(harness, 2);
    displace(harness, 3);
    const RequestId cancelled = harness.submit(joined(text(1, 40), text(90, 3)), 2);
    auto plan = harness.plan();
    for (int i = 0; i < plans; ++i) harness.run_oldest(), plan = harness.plan();
    EXPECT_GT(harness.plane.host_pool(kv::Stream::kEntries).used, 0);
    harness.feed(CancelRequested{cancelled});
    while (!harness.in_flight.empty()) harness.run_oldest();
    EXPECT_EQ(harness.plane.host_pool(kv::Stream::kEntries).used, 0);
    EXPECT_EQ(harness.entries().used, 0);
    const RequestId again = harness.submit(joined(text(1, 40), text(90, 3)), 2);
    harness.run_all();
    harness.expect_right(again);
    EXPECT_EQ(harness.finished(again).cached_tokens, 40);
  }
}

TEST(HostTier, ARegroupMovesWhatIsOnDevicesAndLoadsTheRest) {
  Limits limits = with_host(2, 40);
  limits.host_pages = {200, 200};
  limits.host_plan_bytes = 1;  // a block in each plan
  Harness harness(limits);
  harness.submit(text(1, 40), 1);
  harness.run_all();
  for (uint32_t seed = 2; seed < 8; ++seed) displace(harness, seed);
  const RequestId again = harness.submit(joined(text(1, 40), text(90, 3)), 2, wish(kv::DecodeKind::kDcp, 2));
  for (int loaded = 0; loaded < 3;) {
    const auto plan = harness.plan();
    ASSERT_TRUE(plan.has_value());
    if (!plan->loads.empty()) {
      EXPECT_EQ(plan->loads.size(), 3u) << "striped entries once, copied index keys on both ranks";
      ++loaded;
    }
    harness.run_oldest();
  }
  harness.feed(RegroupRequested{1, again, false, true, false, kTpWish});
  ASSERT_EQ(harness.regrouped.size(), 1u);
  ASSERT_EQ(harness.regrouped[0].error.code, ErrorCode::kOk);
  const int64_t page_bytes = limits.geometry.page_bytes(kv::Stream::kEntries);
  EXPECT_EQ(harness.regrouped[0].bytes_moved, 3 * page_bytes);
  int64_t copied = 0, loads = 0;
  while (const auto plan = harness.plan()) {
    copied += std::ssize(plan->copies) * page_bytes;
    loads += std::ssize(plan->loads);
    harness.run_oldest();
  }
  harness.expect_right(again);
  EXPECT_EQ(copied, 3 * page_bytes);
  EXPECT_EQ(loads, 7 * 4) << "seven blocks, all of each to both ranks";
}

// The drafts of a decode span want a block that has no page yet; the switch of its table then finds it
// without one, too.
TEST(HostTier, ASwitchThatWaitsForASpillAsksForNoGuesses) {
  int64_t tried = 0;
  for (int64_t prompt = 1; prompt < 16; ++prompt) {
    Limits limits = with_host(2, 40);
    limits.draft_layers = 1;
    Harness harness(limits);
    RequestArrived arrived = harness.arrival(text(1, prompt), 25 - prompt);
    arrived.speculation = {DraftSource::kMtp, 3, {}};
    const RequestId id = harness.submit(arrived);
    for (int i = 0; i < 3; ++i) harness.step();
    harness.feed(PauseChanged{id, true});
    const auto fill = [&](uint32_t seed, int64_t blocks) {
      if (blocks > 0) harness.submit(text(seed, blocks * 4), 1);
      harness.run_all();
    };
    fill(2, 6);  // of twelve blocks, of which the first one counts on six
    fill(3, harness.entries().free);
    ASSERT_EQ(harness.entries().free, 0);
    harness.feed(RegroupRequested{1, id, false, true, false, wish(kv::DecodeKind::kDp)});
    harness.feed(PauseChanged{id, false});
    const auto plan = harness.plan();
    ASSERT_TRUE(plan.has_value());
    for (const Span& span : plan->spans) {
      EXPECT_GE(span.draft_tokens, 0);
      tried += span.rows > 1 && !plan->spills.empty() ? 1 : 0;
    }
    harness.run_oldest();
    harness.run_all();
    harness.expect_right(id);
  }
  EXPECT_GT(tried, 3);
}

// Their pages on the rank that was to join are given back.
TEST(HostTier, BlocksOnTheHostOutliveAChangeOfRanksThatFails) {
  for (const bool lost : {false, true}) {
    Limits limits = with_host(3, 200);
    limits.topology = kv::Topology(0b011);
    limits.host_plan_bytes = 1;  // a block in each plan
    Harness harness(limits);
    harness.submit(text(1, 40), 1);
    harness.run_all();
    for (uint32_t seed = 2; seed < 8; ++seed) displace(harness, seed);
    const RequestId again = harness.submit(joined(text(1, 40), text(90, 3)), 2);
    for (bool loaded = false; !loaded; harness.run_oldest()) {
      const auto plan = harness.plan();
      ASSERT_TRUE(plan.has_value());
      loaded = !plan->loads.empty();
    }
    harness.feed(TopologyRequested{1, 2, true});
    auto moves = harness.plan();
    while (moves && moves->copies.empty()) {  // room is made first
      harness.run_oldest();
      moves = harness.plan();
    }
    ASSERT_TRUE(moves.has_value());
    EXPECT_TRUE(moves->spans.empty());
    harness.in_flight.clear();
    if (lost) {
      harness.workers.lose(1);
      harness.feed(MemoryLost{1});
    } else {
      harness.feed(PlansAbandoned{});
    }
    ASSERT_EQ(harness.topologies.size(), 1u);
    EXPECT_EQ(harness.topologies[0].error.code, ErrorCode::kUnavailable);
    EXPECT_EQ(harness.entries(2).used, 0);
    harness.run_all();
    harness.expect_right(again);
    EXPECT_EQ(harness.finished(again).cached_tokens, 40);
  }
}

TEST(HostTier, WhatAFailedRequestComputedIsNotKept) {
  Harness harness(with_host(1, 40, HostWrite::kThrough));
  // Its last row draws no token.
  const RequestId failed = harness.submit(harness.arrival(text(1, 24), 9), 27);
  harness.run_all();
  ASSERT_EQ(harness.finished(failed).reason, FinishReason::kError);
  EXPECT_GT(harness.plane.counters().spilled_bytes, 0);
  while (!harness.in_flight.empty()) harness.run_oldest();
  EXPECT_EQ(harness.plane.host_pool(kv::Stream::kEntries).cached, 0);
  EXPECT_EQ(harness.plane.host_pool(kv::Stream::kEntries).used, 0);
  const RequestId again = harness.submit(text(1, 24), 2);
  harness.run_all();
  harness.expect_right(again);
  EXPECT_EQ(harness.finished(again).cached_tokens, 0);
}

TEST(HostTier, ARequestWithoutPrefixCacheLeavesItAlone) {
  Harness harness(with_host(1, 40, HostWrite::kThrough));
  RequestArrived arrived = harness.arrival(text(1, 40), 1);
  arrived.use_prefix_cache = false;
  harness.submit(arrived);
  harness.run_all();
  EXPECT_EQ(harness.plane.counters().spilled_bytes, 0);
}

// Two requests that need the same ten blocks, which only the host has.
class OneLoadForTwo : public ::testing::Test {
 protected:
  OneLoadForTwo() : harness(limits()) {
    harness.submit(text(1, 40), 1);
    harness.run_all();
    for (uint32_t seed = 2; seed < 4; ++seed) {
      harness.submit(text(seed, 160), 1);
      harness.run_all();
    }
    before = harness.plane.counters();
  }
  static Limits limits() {
    Limits limits = small_limits(1, 48);
    limits.host_pages = {100, 100};
    return limits;
  }
  RequestId submit(uint32_t seed, int priority = 0) {
    RequestArrived arrived = harness.arrival(joined(text(1, 40), text(seed, 5)), 3);
    arrived.priority = priority;
    return harness.submit(arrived);
  }
  bool waits(RequestId id) { return harness.plane.request(id)->state == RequestState::kWaiting; }
  int64_t loads() { return (harness.plane.counters().loaded_bytes - before.loaded_bytes) / kBlockBytes; }
  void finish(std::initializer_list<RequestId> ids) {
    while (!harness.in_flight.empty()) harness.run_oldest();
    harness.run_all();
    for (const RequestId id : ids) harness.expect_right(id);
    EXPECT_EQ(harness.plane.host_pool(kv::Stream::kEntries).used, 0);
  }
  Harness harness;
  Counters before;
};

TEST_F(OneLoadForTwo, TheSecondWaitsForTheFirst) {
  const RequestId first = submit(90), second = submit(91);
  ASSERT_TRUE(harness.plan());
  EXPECT_FALSE(waits(first));
  EXPECT_TRUE(waits(second));
  while (waits(second)) {
    EXPECT_EQ(harness.plane.request(first)->completion_tokens, 0);
    harness.run_oldest();
    ASSERT_TRUE(harness.plan());
  }
  EXPECT_EQ(harness.plane.request(second)->cached_tokens, 40);
  finish({first, second});
  EXPECT_EQ(loads(), 10);
  EXPECT_EQ(harness.plane.counters().host_hit_tokens - before.host_hit_tokens, 40);
}

TEST_F(OneLoadForTwo, NotIfTheFirstIsCancelled) {
  const RequestId first = submit(90), second = submit(91);
  ASSERT_TRUE(harness.plan());
  harness.feed(CancelRequested{first});
  harness.plan();
  EXPECT_FALSE(waits(second));
  finish({second});
}

TEST_F(OneLoadForTwo, NotIfTheFirstCannotRun) {
  const RequestId first = submit(90), second = submit(91);
  ASSERT_TRUE(harness.plan());
  harness.feed(PauseChanged{first, true});
  harness.plan();
  EXPECT_FALSE(waits(second));
  harness.feed(PauseChanged{first, false});
  finish({first, second});
}

TEST_F(OneLoadForTwo, NotForALessUrgentOne) {
  const RequestId first = submit(90, 1);
  ASSERT_TRUE(harness.plan());
  const RequestId second = submit(91);
  harness.plan();
  EXPECT_FALSE(waits(second));
  finish({first, second});
  EXPECT_EQ(loads(), 20);
}

TEST_F(OneLoadForTwo, AnAbandonedLoadIsTriedAgain) {
  const RequestId first = submit(90), second = submit(91);
  ASSERT_TRUE(harness.plan());
  harness.in_flight.clear();
  harness.feed(PlansAbandoned{});
  finish({first, second});
  EXPECT_EQ(loads(), 10) << "what was abandoned does not count";
}

}  // namespace
}  // namespace weft::controlplane
