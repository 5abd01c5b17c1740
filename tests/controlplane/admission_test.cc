// Goal: what can never run is refused at once with field and limit; what can run later waits; an admitted
// request never lacks a page; load spreads over ranks.
#include "controlplane/admission.h"

#include <gtest/gtest.h>

#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

TEST(Admission, ContextLimitNamesTheField) {
  Limits limits = small_limits(2, 1000);
  limits.max_context = 32;
  Harness h(limits);
  const RequestId fits = h.submit(text(1, 20), 12);
  const RequestId answer = h.submit(text(1, 20), 13);
  const RequestId prompt = h.submit(text(1, 32), 1);
  const RequestId absurd =
      h.submit(h.arrival(text(1, 20), 4));  // truth needs a sane number; the event below has not
  RequestArrived event = h.arrival(text(1, 20), 4);
  h.workers.add(event.request, h.truth_of(event.prompt, 4, {}, -1));
  event.max_tokens = std::numeric_limits<int64_t>::max();
  h.feed(event);
  EXPECT_FALSE(h.outcome(fits).finished);
  EXPECT_FALSE(h.outcome(absurd).finished);
  for (const auto& [id, field] :
       {std::pair{answer, "max_tokens"}, {prompt, "prompt"}, {event.request, "max_tokens"}}) {
    EXPECT_EQ(h.finished(id).error.code, ErrorCode::kTooLarge);
    EXPECT_EQ(h.finished(id).error.field, field);
    EXPECT_NE(h.finished(id).error.message.find("32"), std::string::npos);
  }
}

TEST(Admission, PoolLimitDependsOnThePattern) {
  Harness h(small_limits(4, 10));  // 10 blocks of 4 tokens on each rank
  const RequestId tp = h.submit(text(1, 60), 1);
  const RequestId dcp = h.submit(text(1, 60), 1, wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit));
  const RequestId answer = h.submit(text(1, 30), 20);
  EXPECT_EQ(h.finished(tp).error.code, ErrorCode::kTooLarge);
  EXPECT_EQ(h.finished(tp).error.field, "prompt");
  EXPECT_NE(h.finished(tp).error.message.find("need 15 pages of entries on rank 0"), std::string::npos)
      << h.finished(tp).error.message;
  EXPECT_NE(h.finished(tp).error.message.find("its pool has 10, for 40 tokens"), std::string::npos);
  EXPECT_EQ(h.finished(answer).error.field, "max_tokens");
  h.run_all();
  h.expect_right(dcp);
}

TEST(Admission, WhatFitsWaitsForItsTurnInOrder) {
  Limits limits = small_limits(1, 10);
  limits.max_passes = 0;
  Harness h(limits);
  const RequestId a = h.submit(text(1, 20), 5);  // 6 pages
  const RequestId b = h.submit(text(2, 20), 5);  // 6 pages: must wait
  const RequestId c = h.submit(text(3, 4), 1);   // 1 page: would fit, but came later
  h.step();
  EXPECT_EQ(h.plane.running_count(), 1);
  EXPECT_EQ(h.plane.waiting_count(), 2);
  EXPECT_EQ(h.plane.request(b)->state, RequestState::kWaiting);
  h.run_all();
  for (const RequestId id : {a, b, c}) h.expect_right(id);
}

// A request that finds no room is passed by smaller ones, but not for ever, and never by less urgent ones.
TEST(Admission, WhatDoesNotFitIsPassedWithinBounds) {
  Limits limits = small_limits(1, 20);
  limits.max_passes = 3;
  Harness h(limits);
  const RequestId holder = h.submit(text(1, 40), 25);  // 16 of the 20 pages
  h.step();
  const RequestId big = h.submit(text(2, 40), 1);
  RequestArrived lax = h.arrival(text(3, 4), 1);
  lax.priority = 1;
  const RequestId less_urgent = h.submit(lax);
  h.step();
  EXPECT_FALSE(h.outcome(less_urgent).finished);
  for (uint32_t turn = 0; turn < 3; ++turn) {
    const RequestId small = h.submit(text(10 + turn, 4), 1);
    h.step();
    EXPECT_TRUE(h.outcome(small).finished) << turn;
  }
  const RequestId one_too_many = h.submit(text(20, 4), 1);
  h.step();
  EXPECT_FALSE(h.outcome(one_too_many).finished);
  h.run_all();
  for (const RequestId id : {holder, big, less_urgent, one_too_many}) h.expect_right(id);
}

TEST(Admission, ReservesTheWholeAnswer) {
  Harness h(small_limits(1, 10));
  h.submit(text(1, 4), 29);  // 32 rows: 8 pages in the end, 1 now
  h.step();
  EXPECT_EQ(h.entries().used, 1);
  EXPECT_EQ(h.entries().reserved, 7);
  const RequestId second = h.submit(text(2, 9), 1);  // 3 pages: only 2 are not promised
  h.step();
  EXPECT_EQ(h.plane.request(second)->state, RequestState::kWaiting);
  h.run_all();
  h.expect_right(second);
}

TEST(Admission, AFullQueueRefuses) {
  Limits limits = small_limits(1, 100);
  limits.max_running = 2;
  limits.max_waiting = 2;
  Harness h(limits);
  std::vector<RequestId> ids;
  for (uint32_t i = 0; i < 5; ++i) ids.push_back(h.submit(text(i, 8), 3));
  EXPECT_EQ(h.plane.running_count(), 2) << "those at the head do not count as waiting";
  EXPECT_EQ(h.finished(ids[4]).error.code, ErrorCode::kResourceExhausted);
  EXPECT_NE(h.finished(ids[4]).error.message.find("max_waiting"), std::string::npos);
  h.run_all();
  for (int i = 0; i < 4; ++i) h.expect_right(ids[static_cast<size_t>(i)]);
}

TEST(Admission, DpPicksTheRankWithTheMostRoom) {
  Limits limits = small_limits(4, 50);
  limits.pool_pages[2] = {80, 80};
  Harness h(limits);
  std::vector<int> ranks;
  for (uint32_t i = 0; i < 4; ++i) {
    const RequestId id = h.submit(text(i, 80), 1, wish(kv::DecodeKind::kDp));  // 20 pages each
    h.plan();
    ranks.push_back(h.plane.request(id)->placement.grouping.base);
  }
  EXPECT_EQ(ranks, (std::vector<int>{2, 2, 0, 1}));
}

TEST(Admission, ShortStripedChainsSpreadOverTheRanks) {
  Harness h(small_limits(4, 40));
  for (uint32_t i = 0; i < 8; ++i)
    h.submit(text(i, 3), 2, wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit));
  h.plan();
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(h.entries(rank).used, 2) << rank;
}

TEST(Admission, ChainsInheritTheirOrigin) {
  Harness h(small_limits(4, 64));
  const GroupingWish dcp = wish(kv::DecodeKind::kDcp, 4);
  h.submit(text(7, 3), 1, dcp);
  h.run_all();
  const RequestId first = h.submit(text(1, 16), 3, dcp);
  h.plan();
  const int origin = h.plane.request(first)->origin;
  EXPECT_NE(origin, 0) << "the second chain starts elsewhere";
  h.run_oldest();
  const RequestId second = h.submit(text(1, 20), 3, wish(kv::DecodeKind::kDcp, 2));
  h.plan();
  EXPECT_EQ(h.plane.request(second)->origin, origin);
}

// A cached chain that lies on every rank can leave too little room beside it. It is given up, not waited for.
TEST(Admission, AHitThatDoesNotFitIsDoneWithout) {
  Harness h(small_limits(4, 12));
  h.submit(text(1, 40), 1);  // tp: 10 of 12 pages on every rank
  h.run_all();
  const RequestId id = h.submit(text(1, 120), 1, wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit));
  h.run_all();
  h.expect_right(id);
  EXPECT_EQ(h.finished(id).cached_tokens, 0);
}

TEST(Admission, EvictablePrefixBlocksAreRoom) {
  Harness h(small_limits(1, 10));
  h.submit(text(1, 36), 1);
  h.run_all();
  EXPECT_EQ(h.entries().cached, 9);
  const RequestId id = h.submit(text(2, 36), 1);
  h.run_all();
  h.expect_right(id);
  EXPECT_EQ(h.plane.counters().evicted_blocks, 8);
}

TEST(Admission, AModelWithoutIndexKeysTakesNoPagesForThem) {
  Limits limits = small_limits(4, 20);
  limits.geometry.streams[1] = {};
  for (auto& pool : limits.pool_pages) pool[1] = 0;
  Harness h(limits);
  const RequestId id = h.submit(text(1, 30), 5, wish(kv::DecodeKind::kDcp, 2, kv::IndexKind::kSplit));
  const Plan plan = h.plan().value();
  EXPECT_EQ(plan.spans[0].index_c, 1);
  ASSERT_EQ(plan.table_writes.size(), 1u);
  EXPECT_EQ(plan.table_writes[0].pages.size(), 8u * 4u);  // one part a block
  h.run_oldest();
  h.run_all();
  h.expect_right(id);
}

}  // namespace
}  // namespace weft::controlplane
