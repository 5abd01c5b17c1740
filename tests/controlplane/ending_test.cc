// Goal: whichever way a request ends, its last notice says how far it was and what it held until then.
#include <gtest/gtest.h>

#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

// What so many rows take by the layout's arithmetic, under the placement that the request has now.
kv::StoredBytes bytes_of(const Harness& h, RequestId id, int64_t rows) {
  const RequestSnapshot now = *h.plane.request(id);
  return kv::stored_bytes(h.limits.geometry, now.placement.residency, rows, now.origin, h.limits.rank_count);
}

const GroupingWish kQuarter = wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit);

TEST(Ending, ByLength) {
  Harness h(small_limits(4, 100));
  const RequestId id = h.submit(text(1, 30), 9, kQuarter);
  h.step();
  const kv::StoredBytes expected = bytes_of(h, id, 38);  // the last token is never a row
  h.run_all();
  h.expect_right(id);
  EXPECT_EQ(h.finished(id).reason, FinishReason::kLength);
  EXPECT_EQ(h.finished(id).stored, expected);
  EXPECT_EQ(h.finished(id).computed_tokens, 38);
}

TEST(Ending, ByAStopTokenWithARowPlannedAhead) {
  Harness h(small_limits(2, 100));
  RequestArrived arrived = h.arrival(text(1, 10), 20);
  arrived.stop_tokens = {h.truth_of(arrived.prompt, 20, {}, -1).tokens[12]};
  const RequestId id = h.submit(arrived);
  kv::StoredBytes expected{};
  while (h.plane.request(id)) {
    h.plan();
    h.plan();
    // Rows of plans in flight have their pages, too.
    const Span& last = h.in_flight.back().spans[0];
    expected = bytes_of(h, id, last.start + last.rows);
    h.run_oldest();
  }
  EXPECT_EQ(h.finished(id).reason, FinishReason::kStop);
  EXPECT_EQ(h.finished(id).stored, expected);
  EXPECT_EQ(h.finished(id).computed_tokens, 10 + h.finished(id).completion_tokens - 1);
}

TEST(Ending, ByACancelInPrefillInDecodeAndBeforeItRan) {
  Limits limits = small_limits(4, 100);
  limits.max_chunk_rows = 16;
  limits.max_running = 1;
  Harness h(limits);
  const RequestId early = h.submit(text(1, 40), 9, kQuarter), waiting = h.submit(text(2, 40), 9, kQuarter);
  h.step();
  const kv::StoredBytes chunk = bytes_of(h, early, 16);
  h.feed(CancelRequested{waiting});
  h.feed(CancelRequested{early});
  EXPECT_EQ(h.finished(waiting).stored, kv::StoredBytes{});
  EXPECT_EQ(h.finished(waiting).computed_tokens, 0);
  EXPECT_EQ(h.finished(early).stored, chunk);
  EXPECT_EQ(h.finished(early).computed_tokens, 16);

  const RequestId late = h.submit(text(3, 16), 9, kQuarter);
  h.step();
  h.step();
  const kv::StoredBytes rows = bytes_of(h, late, 17);
  h.feed(CancelRequested{late});
  EXPECT_EQ(h.finished(late).stored, rows);
  EXPECT_EQ(h.finished(late).computed_tokens, 17);
}

TEST(Ending, ByLogitsThatAreNotFinite) {
  Harness h(small_limits(4, 100));
  const RequestId id = h.submit(h.arrival(text(1, 30), 9, kQuarter), 31);
  h.step();
  const kv::StoredBytes expected = bytes_of(h, id, 32);
  h.run_all();
  EXPECT_EQ(h.finished(id).error.code, ErrorCode::kNumerical);
  EXPECT_EQ(h.finished(id).stored, expected);
}

TEST(Ending, ByWorkersThatFailOnItAlone) {
  Harness h(small_limits(4, 100));
  const RequestId id = h.submit(text(1, 30), 9, kQuarter);
  for (int attempt = 0; attempt < 2; ++attempt) {
    ASSERT_TRUE(h.plan());
    h.in_flight.clear();
    if (attempt == 1) break;
    h.feed(PlansAbandoned{});
  }
  const kv::StoredBytes expected = bytes_of(h, id, 30);
  h.feed(PlansAbandoned{});
  EXPECT_EQ(h.finished(id).error.code, ErrorCode::kInternal);
  EXPECT_EQ(h.finished(id).stored, expected);
  EXPECT_EQ(h.finished(id).computed_tokens, 0);
}

TEST(Ending, ByARefusal) {
  Harness h(small_limits(1, 4));
  const RequestId id = h.submit(text(1, 30), 9);
  EXPECT_EQ(h.finished(id).error.code, ErrorCode::kTooLarge);
  EXPECT_EQ(h.finished(id).prompt_tokens, 30);
  EXPECT_EQ(h.finished(id).stored, kv::StoredBytes{});
}

TEST(Ending, OfAPrefixHitCountsTheSharedBlocksInFull) {
  Harness h(small_limits(4, 100));
  const RequestId first = h.submit(text(1, 32), 2, kQuarter);
  h.run_all();
  const RequestId second = h.submit(text(1, 32), 2, kQuarter);
  h.run_all();
  EXPECT_EQ(h.finished(second).cached_tokens, 31);
  EXPECT_EQ(h.finished(second).computed_tokens, 33);
  EXPECT_EQ(h.finished(second).stored, h.finished(first).stored);
}

TEST(Ending, AfterARegroupThatDroppedPages) {
  Harness h(small_limits(4, 100));
  const RequestId id = h.submit(text(1, 32), 9);
  h.step();
  h.feed(RegroupRequested{1, id, false, true, true, kQuarter, false});
  h.step();
  const kv::StoredBytes expected = bytes_of(h, id, 40);
  h.run_all();
  h.expect_right(id);
  EXPECT_EQ(h.finished(id).stored, expected);
}

}  // namespace
}  // namespace weft::controlplane
