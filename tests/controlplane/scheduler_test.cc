// Goal: decode rows first, prompts in order of arrival, one budget; plans made while another runs.
#include <gtest/gtest.h>

#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

const Span* span_of(const Plan& plan, RequestId id) {
  for (const Span& span : plan.spans) {
    if (span.request == id) return &span;
  }
  return nullptr;
}

TEST(Scheduler, CutsPromptsIntoTheBudgetInOrder) {
  Limits limits = small_limits(1, 200);
  limits.max_step_rows = 20;
  Harness h(limits);
  const RequestId a = h.submit(text(1, 30), 4), b = h.submit(text(2, 30), 4);
  const Plan first = h.plan().value();
  EXPECT_EQ(span_of(first, a)->rows, 20);
  EXPECT_EQ(span_of(first, a)->sample_rows, 0);
  EXPECT_EQ(span_of(first, b), nullptr);
  h.run_oldest();
  const Plan second = h.plan().value();
  EXPECT_EQ(span_of(second, a)->start, 20);
  EXPECT_EQ(span_of(second, a)->rows, 10);
  EXPECT_EQ(span_of(second, a)->sample_rows, 1);
  EXPECT_EQ(span_of(second, b)->rows, 10);
  h.run_oldest();
  const Plan third = h.plan().value();
  EXPECT_EQ(third.spans[0].request, a) << "decode rows come first";
  EXPECT_EQ(third.spans[0].rows, 1);
  EXPECT_EQ(span_of(third, b)->rows, 19);
  EXPECT_EQ(h.outcome(a).prefill_done, (std::vector<int64_t>{20, 30}));
  h.run_oldest();
  h.run_all();
  h.expect_right(a);
  h.expect_right(b);
}

// Behind a prompt of 900,000 tokens a short one is read within the step after the one that runs: it needs no
// more than the half of a step that is not the long one's. The long one goes on with at least its half.
TEST(Scheduler, ALongPromptDoesNotStarveShortOnes) {
  Limits limits = small_limits(1, 2000);
  limits.max_context = 7500;
  limits.max_step_rows = 16;
  Harness h(limits);
  const RequestId big = h.submit(text(1, 7000), 1);
  for (uint32_t turn = 0; turn < 40; ++turn) {
    const int64_t length = 1 + turn % 8;
    const RequestId small = h.submit(text(turn + 2, length), 1);
    const Plan plan = h.plan().value();
    ASSERT_NE(span_of(plan, small), nullptr);
    EXPECT_EQ(span_of(plan, small)->rows, length);
    EXPECT_EQ(span_of(plan, big)->rows, 16 - length) << "nothing is left unused";
    h.run_oldest();
    h.expect_right(small);
  }
  h.run_all();
  h.expect_right(big);
}

// However many short ones come, the earliest prompt has half of every step.
TEST(Scheduler, ShortPromptsDoNotStarveALongOne) {
  Limits limits = small_limits(1, 500);
  limits.max_step_rows = 16;
  Harness h(limits);
  const RequestId big = h.submit(text(1, 160), 1);
  uint32_t seed = 2;
  for (int step = 0; step < 20; ++step) {
    while (h.plane.running_count() + h.plane.waiting_count() < 8) h.submit(text(seed++, 12), 1);
    const Plan plan = h.plan().value();
    ASSERT_NE(span_of(plan, big), nullptr);
    EXPECT_GE(span_of(plan, big)->rows, 8);
    h.run_oldest();
  }
  h.expect_right(big);
  h.run_all();
}

TEST(Scheduler, TheUrgentAreReadFirstAndOthersGetWhatTheyLeave) {
  Limits limits = small_limits(1, 500);
  limits.max_step_rows = 20;
  Harness h(limits);
  RequestArrived lax = h.arrival(text(1, 60), 1), urgent = h.arrival(text(2, 30), 1);
  lax.priority = 5;
  urgent.priority = -5;
  const RequestId last = h.submit(lax), first = h.submit(urgent);
  const Plan one = h.plan().value();
  EXPECT_EQ(span_of(one, first)->rows, 20);
  EXPECT_EQ(span_of(one, last), nullptr);
  h.run_oldest();
  const Plan two = h.plan().value();
  EXPECT_EQ(span_of(two, first)->rows, 10);
  EXPECT_EQ(span_of(two, last)->rows, 10);
  h.run_oldest();
  h.run_all();
  h.expect_right(first);
  h.expect_right(last);
}

TEST(Scheduler, WhatIsNotDoneByItsDeadlineEndsAndGivesEverythingBack) {
  Limits limits = small_limits(1, 100);
  limits.max_running = 1;
  limits.table_count = 2;
  Harness h(limits);
  RequestArrived runs = h.arrival(text(1, 10), 20), waits = h.arrival(text(2, 10), 20);
  runs.deadline = std::chrono::milliseconds(7);
  waits.deadline = std::chrono::milliseconds(5);
  const RequestId a = h.submit(runs), b = h.submit(waits);
  const RequestId c = h.submit(text(3, 10), 2);
  h.step();
  EXPECT_EQ(h.plane.next_deadline(), Time{5'000'000});
  h.pass_time(Time{4'999'999});
  EXPECT_FALSE(h.outcome(b).finished);
  h.pass_time(Time{5'000'000});
  EXPECT_EQ(h.finished(b).error.code, ErrorCode::kDeadlineExceeded);
  EXPECT_EQ(h.finished(b).error.field, "deadline_ms");
  EXPECT_FALSE(h.outcome(a).finished);
  h.pass_time(Time{8'000'000});
  EXPECT_EQ(h.finished(a).error.code, ErrorCode::kDeadlineExceeded);
  EXPECT_EQ(h.finished(a).completion_tokens, 1);
  EXPECT_FALSE(h.plane.next_deadline());
  h.run_all();
  h.expect_right(c);
  EXPECT_EQ(h.entries().used + h.entries().in_flight, 0);
  // What the late one had computed is right, and shared.
  const RequestId again = h.submit(text(1, 10), 2);
  h.run_all();
  EXPECT_EQ(h.finished(again).cached_tokens, 8);
}

TEST(Scheduler, AChunkLimitLetsPromptsShareAStep) {
  Limits limits = small_limits(1, 200);
  limits.max_step_rows = 40;
  limits.max_chunk_rows = 16;
  Harness h(limits);
  const RequestId a = h.submit(text(1, 60), 1), b = h.submit(text(2, 60), 1), c = h.submit(text(3, 60), 1);
  const Plan plan = h.plan().value();
  EXPECT_EQ(span_of(plan, a)->rows, 16);
  EXPECT_EQ(span_of(plan, b)->rows, 16);
  EXPECT_EQ(span_of(plan, c)->rows, 8);
}

// Mechanisms of a split cache are in the spans that have one, from the step after they were asked for.
TEST(Scheduler, MechanismsAreInThePlan) {
  Harness h(small_limits(4, 200));
  GroupingWish both = wish(kv::DecodeKind::kDcp, 4);
  both.mechanisms = kv::parse_mechanisms("query=replicated,partials=tree", {}).value();
  GroupingWish tp = both;
  tp.decode = {kv::DecodeKind::kTp, 1};
  const RequestId a = h.submit(text(1, 20), 9, both), b = h.submit(text(2, 20), 9, tp);
  const Plan prefill = h.plan().value();
  EXPECT_EQ(span_of(prefill, a)->split, kv::Split::kZigzag);
  EXPECT_FALSE(span_of(prefill, a)->replicate_query || span_of(prefill, a)->tree_partials);
  h.run_oldest();
  const Plan decode = h.plan().value();
  EXPECT_TRUE(span_of(decode, a)->replicate_query && span_of(decode, a)->tree_partials);
  EXPECT_FALSE(span_of(decode, b)->replicate_query || span_of(decode, b)->tree_partials);
  RegroupRequested change;
  change.command = 1;
  change.request = a;
  change.mechanisms = "partials=all-to-all";
  h.feed(change);
  EXPECT_EQ(h.regrouped.at(0).after, "dcp(4), index copied, query=replicated");
  EXPECT_EQ(h.regrouped.at(0).bytes_moved, 0);
  h.run_oldest();
  const Plan later = h.plan().value();
  EXPECT_TRUE(span_of(later, a)->replicate_query && !span_of(later, a)->tree_partials);
  h.run_oldest();
  h.run_all();
  h.expect_right(a);
  h.expect_right(b);
}

TEST(Scheduler, TheFormOfARequestIsFixed) {
  Harness h(small_limits(4, 200));
  const RequestId id = h.submit(text(1, 40), 4);
  h.step();
  RegroupRequested change;
  change.request = id;
  change.mechanisms = "form=expanded";
  h.feed(change);
  EXPECT_EQ(h.regrouped.at(0).error.field, "mechanisms");
  GroupingWish expanded = kTpWish;
  expanded.mechanisms.form = kv::AttentionForm::kExpanded;
  const RequestId other = h.submit(text(2, 40), 4, expanded);
  const Plan plan = h.plan().value();
  EXPECT_TRUE(span_of(plan, other)->expand_context);
  EXPECT_FALSE(span_of(plan, id)->expand_context);
  h.run_oldest();
  h.run_all();
}

TEST(Scheduler, ATreeNeedsAPowerOfTwo) {
  Harness h(small_limits(3, 200));
  GroupingWish tree = wish(kv::DecodeKind::kDcp, 3);
  tree.mechanisms.partials = kv::PartialsPath::kTree;
  const RequestId id = h.submit(text(1, 20), 9, tree);
  h.run_all();
  EXPECT_EQ(h.outcomes.at(id).finished.value().error.field, "mechanisms");
}

TEST(Scheduler, OneStepHoldsPrefillUnderPcpAndDecodeOfEveryGrouping) {
  Harness h(small_limits(4, 200));
  std::vector<RequestId> ids = {
      h.submit(text(1, 20), 9), h.submit(text(2, 20), 9, wish(kv::DecodeKind::kDcp, 2)),
      h.submit(text(3, 20), 9, wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit)),
      h.submit(text(4, 20), 9, wish(kv::DecodeKind::kDp))};
  h.step();
  ids.push_back(h.submit(text(5, 40), 3));
  const Plan plan = h.plan().value();
  ASSERT_EQ(plan.spans.size(), 5u);
  EXPECT_EQ(span_of(plan, ids[0])->grouping, (kv::Grouping{0, 4, 1}));
  EXPECT_EQ(span_of(plan, ids[1])->grouping, (kv::Grouping{0, 4, 2}));
  EXPECT_EQ(span_of(plan, ids[2])->grouping, (kv::Grouping{0, 4, 4}));
  EXPECT_EQ(span_of(plan, ids[2])->index_c, 4);
  EXPECT_EQ(span_of(plan, ids[3])->grouping.width, 1);
  EXPECT_EQ(span_of(plan, ids[4])->split, kv::Split::kZigzag);
  EXPECT_EQ(plan.padded.prefill, 64u);
  EXPECT_EQ(plan.padded.decode, 4u);
  EXPECT_EQ(plan.padded.head, 8u);
  h.run_oldest();
  h.run_all();
  for (const RequestId id : ids) h.expect_right(id);
}

TEST(Scheduler, PlansAheadWithTheTokenOfTheStepThatRuns) {
  Harness h(small_limits(2, 100));
  const RequestId id = h.submit(text(1, 10), 4);
  const Plan first = h.plan().value();
  const Plan second = h.plan().value();
  EXPECT_TRUE(second.spans[0].has_input_ref);
  EXPECT_EQ(second.spans[0].input_ref.step, first.step);
  EXPECT_EQ(second.spans[0].input_ref.sample_index, first.spans[0].sample_index);
  EXPECT_FALSE(h.plan()) << "two are in flight";
  h.run_oldest();
  const Plan third = h.plan().value();
  EXPECT_EQ(third.spans[0].input_ref.step, second.step);
  h.run_oldest();
  h.run_oldest();
  const Plan fourth = h.plan().value();
  EXPECT_FALSE(fourth.spans[0].has_input_ref) << "the token is known by now";
  h.run_oldest();
  EXPECT_FALSE(h.plan());
  h.expect_right(id);
}

TEST(Scheduler, MakesNoRowBeyondMaxTokens) {
  Harness h(small_limits(1, 100));
  const RequestId id = h.submit(text(1, 10), 2);
  ASSERT_TRUE(h.plan());
  ASSERT_TRUE(h.plan());
  h.run_oldest();
  EXPECT_FALSE(h.plan()) << "both tokens are under way";
  h.run_oldest();
  h.expect_right(id);
  EXPECT_EQ(h.workers.rows_run(), 11);
}

TEST(Scheduler, ARowPlannedAheadOfAStopTokenIsWasted) {
  Harness h(small_limits(1, 100));
  RequestArrived arrived = h.arrival(text(1, 10), 20);
  const Truth free_run = h.truth_of(arrived.prompt, 20, {}, -1);
  arrived.stop_tokens = {free_run.tokens[12]};  // the third token of the answer, or an earlier equal one
  const RequestId id = h.submit(arrived);
  while (h.plane.request(id)) {
    h.plan();
    h.plan();
    h.run_oldest();
  }
  EXPECT_EQ(h.in_flight.size(), 1u) << "the wasted row";
  EXPECT_GT(h.entries().in_flight, 0) << "its pages wait for it";
  h.run_oldest();
  EXPECT_EQ(h.entries().in_flight, 0);
  h.expect_right(id);
  EXPECT_EQ(h.finished(id).reason, FinishReason::kStop);
}

TEST(Scheduler, APausedRequestIsNotScheduledAndHoldsNobodyUp) {
  Harness h(small_limits(1, 100));
  const RequestId a = h.submit(text(1, 10), 6), b = h.submit(text(2, 10), 6);
  h.step();
  h.feed(PauseChanged{a, true});
  const Plan plan = h.plan().value();
  EXPECT_EQ(span_of(plan, a), nullptr);
  EXPECT_NE(span_of(plan, b), nullptr);
  h.run_oldest();
  h.run_all();
  h.expect_right(b);
  EXPECT_TRUE(h.plane.request(a)->paused);
  EXPECT_FALSE(h.plan());
  h.feed(PauseChanged{a, false});
  h.run_all();
  h.expect_right(a);
}

TEST(Scheduler, SamplersTakeTurns) {
  Harness h(small_limits(4, 100));
  for (uint32_t i = 0; i < 4; ++i) h.submit(text(i, 8), 4);
  std::vector<int> counts(4, 0);
  while (auto plan = h.plan()) {
    for (const Span& span : plan->spans) ++counts[static_cast<size_t>(span.sampler_rank)];
    h.run_oldest();
  }
  for (const int count : counts) EXPECT_EQ(count, 4);
}

TEST(Scheduler, PadsToAShortList) {
  EXPECT_EQ(padded_rows(0), 0u);
  EXPECT_EQ(padded_rows(1), 1u);
  EXPECT_EQ(padded_rows(3), 4u);
  EXPECT_EQ(padded_rows(64), 64u);
  EXPECT_EQ(padded_rows(65), 128u);
}

TEST(Scheduler, TablesAreWrittenOnceAndThenAppended) {
  Harness h(small_limits(1, 100));
  h.submit(text(1, 6), 8);
  int64_t blocks = 0;
  std::optional<uint32_t> version;
  while (auto plan = h.plan()) {
    for (const TableWrite& write : plan->table_writes) {
      EXPECT_EQ(write.first_block, blocks);
      blocks += static_cast<int64_t>(write.pages.size()) / 2;  // entries and index keys on one rank
      EXPECT_EQ(version.value_or(write.version), write.version) << "appending keeps the version";
      version = write.version;
    }
    h.run_oldest();
  }
  EXPECT_EQ(blocks, 4);  // 13 rows
}

TEST(Scheduler, AReusedTableHasANewVersion) {
  Limits limits = small_limits(1, 100);
  limits.max_running = 1;
  limits.table_count = 2;
  Harness h(limits);
  std::map<TableId, uint32_t> versions;
  for (uint32_t i = 0; i < 6; ++i) {
    h.submit(text(i, 6), 1);
    const Plan plan = h.plan().value();
    EXPECT_GT(plan.spans[0].table_version, versions[plan.spans[0].table]);
    versions[plan.spans[0].table] = plan.spans[0].table_version;
    h.run_oldest();
  }
}

}  // namespace
}  // namespace weft::controlplane
