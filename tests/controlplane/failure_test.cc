// Goal: cancelling works in every state and gives the pages back within two steps; acknowledgements may come
// late, twice and out of order; abandoned plans are retried one sequence at a time; equal events give equal
// plans.
#include <gtest/gtest.h>

#include "proto/vocab/random.h"
#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

int64_t taken(const Harness& h) {
  int64_t pages = 0;
  for (int rank = 0; rank < h.limits.rank_count; ++rank)
    pages += h.entries(rank).used + h.entries(rank).in_flight;
  return pages;
}

TEST(Cancel, GivesThePagesBackWithinTwoStepsFromEveryState) {
  // Cancelled after n actions, each making or running a plan: waiting, prefilling, decoding, with 0, 1, 2 in
  // flight.
  for (int actions = 0; actions < 14; ++actions) {
    Limits limits = small_limits(2, 100);
    limits.max_chunk_rows = 8;
    Harness h(limits);
    const RequestId other = h.submit(text(2, 4), 60);
    h.step();
    RequestArrived arrived = h.arrival(text(1, 30), 10);
    arrived.use_prefix_cache = false;
    const RequestId id = h.submit(arrived);
    for (int i = 0; i < actions; ++i) {
      if (!h.plan()) h.run_oldest();
    }
    h.feed(CancelRequested{id});
    EXPECT_EQ(h.finished(id).reason, FinishReason::kCancelled);
    EXPECT_FALSE(h.plane.request(id));
    while (!h.in_flight.empty()) h.run_oldest();  // at most two
    EXPECT_EQ(taken(h), 2 * ceil_div(h.plane.request(other)->computed_tokens, 4)) << "after " << actions;
    EXPECT_EQ(h.entries().in_flight, 0);
    h.run_all();
    h.expect_right(other);
  }
}

TEST(Cancel, OfSomebodyUnknownIsIgnored) {
  Harness h(small_limits(1, 10));
  h.feed(CancelRequested{RequestId{5}});
  h.feed(PauseChanged{RequestId{5}, true});
  EXPECT_TRUE(h.outcomes.empty());
}

TEST(Acknowledge, OutOfOrderTwiceAndLate) {
  Harness h(small_limits(2, 100));
  const RequestId id = h.submit(text(1, 10), 4);
  const Plan first = h.plan().value(), second = h.plan().value();
  const auto samples1 = h.execute(first), samples2 = h.execute(second);
  h.in_flight.clear();
  h.feed(StepAcknowledged{second.step, 0, samples2});
  h.feed(StepAcknowledged{second.step, 1, {}});
  EXPECT_TRUE(h.outcome(id).tokens.empty()) << "the first step is still open";
  h.feed(StepAcknowledged{first.step, 1, samples1});
  h.feed(StepAcknowledged{first.step, 1, samples1});
  EXPECT_EQ(h.plane.counters().duplicate_acknowledgements, 1);
  EXPECT_TRUE(h.outcome(id).tokens.empty());
  h.feed(StepAcknowledged{first.step, 0, {}});
  EXPECT_EQ(h.outcome(id).tokens.size(), 2u);
  h.feed(StepAcknowledged{first.step, 0, {}});
  EXPECT_EQ(h.plane.counters().late_acknowledgements, 1);
  h.run_all();
  h.expect_right(id);
}

TEST(Acknowledge, AStepWithoutItsSampleEndsTheRequest) {
  Harness h(small_limits(1, 100));
  const RequestId id = h.submit(text(1, 10), 4), other = h.submit(text(2, 20), 4);
  const Plan plan = h.plan().value();
  auto samples = h.execute(plan);
  std::erase_if(samples, [&](const Sample& sample) { return sample.request == id; });
  h.in_flight.clear();
  h.feed(StepAcknowledged{plan.step, 0, samples});
  EXPECT_EQ(h.finished(id).error.code, ErrorCode::kInternal);
  h.run_all();
  h.expect_right(other);
}

TEST(Abandoned, SequencesAreRetriedOneAtATime) {
  Harness h(small_limits(2, 100));
  const RequestId a = h.submit(text(1, 10), 6), b = h.submit(text(2, 10), 6);
  h.step();
  h.plan();
  const Plan last = h.plan().value();
  h.in_flight.clear();
  h.feed(PlansAbandoned{});
  EXPECT_EQ(h.plane.counters().abandoned_plans, 2);
  const RequestId c = h.submit(text(3, 10), 6);
  std::vector<RequestId> order;
  for (int i = 0; i < 4; ++i) {  // each has two rows to catch up
    const Plan plan = h.plan().value();
    EXPECT_EQ(number(plan.step), number(last.step) + 1 + static_cast<uint64_t>(i));
    ASSERT_EQ(plan.spans.size(), 1u);
    order.push_back(plan.spans[0].request);
    EXPECT_FALSE(h.plan()) << "one in flight";
    h.run_oldest();
  }
  EXPECT_EQ(order, (std::vector<RequestId>{a, a, b, b}));
  EXPECT_EQ(h.plan()->spans.size(), 3u) << "all is well again";
  h.run_oldest();
  h.run_all();
  for (const RequestId id : {a, b, c}) h.expect_right(id);
}

TEST(Abandoned, OneThatFailsAloneEndsAndTheOthersGoOn) {
  Harness h(small_limits(2, 100));
  const RequestId bad = h.submit(text(1, 10), 6), good = h.submit(text(2, 10), 6);
  h.plan();
  h.in_flight.clear();
  h.feed(PlansAbandoned{});
  EXPECT_EQ(h.plan()->spans[0].request, bad);
  h.in_flight.clear();
  h.feed(PlansAbandoned{});
  EXPECT_EQ(h.finished(bad).error.code, ErrorCode::kInternal);
  h.run_all();
  h.expect_right(good);
  EXPECT_EQ(h.entries().used, 0);
}

TEST(Abandoned, APausedSuspectDoesNotStopTheRest) {
  Harness h(small_limits(2, 100));
  const RequestId a = h.submit(text(1, 10), 6), b = h.submit(text(2, 10), 6);
  h.plan();
  h.in_flight.clear();
  h.feed(PlansAbandoned{});
  h.feed(PauseChanged{a, true});
  h.run_all();
  h.expect_right(b);
  h.feed(PauseChanged{a, false});
  h.run_all();
  h.expect_right(a);
}

TEST(Abandoned, ARegroupInAnAbandonedPlanIsDoneAgain) {
  for (const bool widen : {false, true}) {
    Harness h(small_limits(4, 100));
    const GroupingWish dcp = wish(kv::DecodeKind::kDcp, 4);
    const RequestId id = h.submit(text(1, 18), 24, widen ? dcp : kTpWish);
    for (int i = 0; i < 4; ++i) h.step();
    h.feed(RegroupRequested{1, id, false, true, true, widen ? kTpWish : dcp, false});
    const Plan first = h.plan().value();
    h.execute(first, 5);
    h.plan();
    h.in_flight.clear();
    h.feed(PlansAbandoned{});
    EXPECT_EQ(h.plan()->copies.size(), first.copies.size());
    h.run_oldest();
    h.run_all();
    h.expect_right(id);
    for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(h.entries(rank).used, 0);
  }
}

TEST(Abandoned, TwoRegroupsAreUndoneNewestFirst) {
  Harness h(small_limits(4, 100));
  const GroupingWish dcp = wish(kv::DecodeKind::kDcp, 4);
  const RequestId id = h.submit(text(1, 18), 24, dcp);
  for (int i = 0; i < 4; ++i) h.step();  // the last block is partial
  const auto regroup = [&](const GroupingWish& wish) {
    h.feed(RegroupRequested{1, id, false, true, true, wish, false});
    return h.plan().value();
  };
  const Plan widened = regroup(kTpWish);
  EXPECT_FALSE(widened.copies.empty());
  EXPECT_TRUE(regroup(dcp).copies.empty());
  h.in_flight.clear();
  h.feed(PlansAbandoned{});  // nothing of it was run: the copies are still to be made
  h.feed(RegroupRequested{1, id, false, true, true, kTpWish, false});
  EXPECT_EQ(h.plan()->copies.size(), widened.copies.size());
  h.run_oldest();
  h.run_all();
  h.expect_right(id);
}

TEST(ControlPlane, EqualEventsGiveEqualPlans) {
  const auto trace = [] {
    Limits limits = small_limits(4, 30);
    limits.max_step_rows = 40;
    Harness h(limits);
    SplitMix64 random(11);
    std::vector<uint64_t> seen;
    for (int i = 0; i < 200; ++i) {
      if (random.below(3) == 0) {
        h.submit(text(static_cast<uint32_t>(random.below(5)), 1 + static_cast<int64_t>(random.below(60))),
                 1 + static_cast<int64_t>(random.below(9)),
                 wish(static_cast<kv::DecodeKind>(random.below(3)), 2));
      }
      if (const auto plan = h.plan()) {
        for (const Span& span : plan->spans) {
          seen.push_back(mix64(number(span.request) * 1000 + static_cast<uint64_t>(span.start)) +
                         number(span.table));
        }
        for (const TableWrite& write : plan->table_writes) {
          for (const PageId page : write.pages) seen.push_back(number(page));
        }
      } else if (!h.in_flight.empty()) {
        h.run_oldest();
      }
    }
    return seen;
  };
  const auto first = trace();
  EXPECT_GT(first.size(), 1000u);
  EXPECT_EQ(first, trace());
}

}  // namespace
}  // namespace weft::controlplane
