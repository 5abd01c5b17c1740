// Streams and the request book: order, credit, blocking, and what a trace counts.
#include "daemon/stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/request_book.h"

namespace weft::daemon {
namespace {

using Sent = ClientEndpoint::Sent;
using testing::ElementsAre;

struct FakeClient {
  std::vector<std::string> got;
  size_t room = 1000;
  bool gone = false;
  Stream::Transport transport() {
    return [this](const std::string& frame) {
      if (gone) return Sent::kGone;
      if (room == 0) return Sent::kFull;
      --room;
      got.push_back(frame);
      return Sent::kSent;
    };
  }
};

TEST(Stream, GivesEverythingInOrderToAClientThatReads) {
  FakeClient client;
  Stream stream(client.transport(), 0);
  EXPECT_EQ(stream.push("accepted", Stream::Frame::kOther, Time{1}), Sent::kSent);
  EXPECT_EQ(stream.push("t0", Stream::Frame::kToken, Time{2}), Sent::kSent);
  EXPECT_FALSE(stream.complete());
  EXPECT_EQ(stream.push("end", Stream::Frame::kLast, Time{3}), Sent::kSent);
  EXPECT_TRUE(stream.complete());
  EXPECT_THAT(client.got, ElementsAre("accepted", "t0", "end"));
}

TEST(Stream, BlocksWhenTheClientIsFullAndGoesOnLater) {
  FakeClient client;
  client.room = 1;
  Stream stream(client.transport(), 0);
  stream.push("t0", Stream::Frame::kToken, Time{1});
  EXPECT_FALSE(stream.blocked());
  EXPECT_EQ(stream.push("t1", Stream::Frame::kToken, Time{10}), Sent::kFull);
  EXPECT_EQ(stream.push("end", Stream::Frame::kLast, Time{20}), Sent::kFull);
  EXPECT_TRUE(stream.blocked());
  EXPECT_FALSE(stream.complete());
  EXPECT_EQ(stream.stalled(Time{110}), Duration(100));
  client.room = 1;
  EXPECT_EQ(stream.flush(Time{200}), Sent::kFull);
  EXPECT_EQ(stream.stalled(Time{210}), Duration(10));  // it took something meanwhile
  client.room = 5;
  EXPECT_EQ(stream.flush(Time{300}), Sent::kSent);
  EXPECT_TRUE(stream.complete());
  EXPECT_EQ(stream.stalled(Time{400}), Duration(0));
  EXPECT_THAT(client.got, ElementsAre("t0", "t1", "end"));
}

TEST(Stream, CreditCountsTokensOnly) {
  FakeClient client;
  Stream stream(client.transport(), 2);
  for (const char* frame : {"t0", "t1", "t2"}) stream.push(frame, Stream::Frame::kToken, Time{1});
  EXPECT_TRUE(stream.blocked());
  stream.push("end", Stream::Frame::kLast, Time{1});
  EXPECT_THAT(client.got, ElementsAre("t0", "t1"));
  stream.grant(1);
  EXPECT_EQ(stream.flush(Time{2}), Sent::kSent);  // the end costs no credit
  EXPECT_THAT(client.got, ElementsAre("t0", "t1", "t2", "end"));
}

TEST(Stream, ACancelledStreamEndsWithoutCredit) {
  FakeClient client;
  Stream stream(client.transport(), 1);
  for (const char* frame : {"t0", "t1"}) stream.push(frame, Stream::Frame::kToken, Time{1});
  stream.lift_limit();
  EXPECT_EQ(stream.flush(Time{2}), Sent::kSent);
  stream.push("end", Stream::Frame::kLast, Time{3});
  EXPECT_TRUE(stream.complete());
  EXPECT_THAT(client.got, ElementsAre("t0", "t1", "end"));
}

TEST(Stream, AGoneClientIsToldAtOnce) {
  FakeClient client;
  client.gone = true;
  Stream stream(client.transport(), 0);
  EXPECT_EQ(stream.push("t0", Stream::Frame::kToken, Time{1}), Sent::kGone);
}

controlplane::Plan plan_of(RequestId id, bool prefill, kv::Grouping grouping = {0, 2, 1}) {
  controlplane::Plan plan;
  controlplane::Span span;
  span.request = id;
  span.prefill = prefill;
  span.rows = 1;
  span.split = prefill ? kv::Split::kZigzag : kv::Split::kShared;
  span.grouping = grouping;
  plan.spans.push_back(span);
  return plan;
}

kv::CrossedBytes crossed(kv::CrossKind kind, int64_t bytes) {
  kv::CrossedBytes out;
  out[kind] = bytes;
  return out;
}

controlplane::FinishedNotice end_of(RequestId id, int64_t tokens) {
  controlplane::FinishedNotice end;
  end.request = id;
  end.reason = controlplane::FinishReason::kLength;
  end.prompt_tokens = 10;
  end.cached_tokens = 4;
  end.computed_tokens = 10 + tokens - 1;
  end.completion_tokens = tokens;
  return end;
}

wire::Trace trace_of(const RequestRecord& record, Time now = Time{9999}) {
  wire::Trace trace;
  fill_trace(record, record.stored, record.change_waits, 2, now, &trace);
  return trace;
}

TEST(RequestBook, TraceOfARequestFromQueueToEnd) {
  RequestBook book;
  const RequestId id{7};
  RequestRecord record;
  record.id = id;
  record.arrived = Time{100};
  book.add(record);
  const auto prefill = plan_of(id, true), decode = plan_of(id, false);
  const auto rows = crossed(kv::CrossKind::kRows, 10), copies = crossed(kv::CrossKind::kRegroup, 64);

  book.planned(prefill, Time{150});
  book.crossed(prefill.spans[0], copies);  // before the prompt is done: no switch
  book.crossed(prefill.spans[0], rows);
  book.step_done(prefill, Duration(20), Time{190});
  book.token({id, 0, 5}, Time{200});
  book.planned(decode, Time{210});
  book.crossed(decode.spans[0], copies);  // this is the switch's
  book.crossed(decode.spans[0], rows);
  book.step_done(decode, Duration(30), Time{240}, Duration(7));
  book.token({id, 1, 5}, Time{240});
  book.crossed(decode.spans[0], copies);  // a later change of mind
  book.step_done(decode, Duration(40), Time{280}, Duration(5));
  book.token({id, 2, 5}, Time{280});
  auto end = end_of(id, 3);
  end.stored[0][1] = 4096;
  book.finish(id, end, Time{500});

  const RequestRecord& finished = *book.find(id);
  EXPECT_EQ(finished.outcome, "length");
  EXPECT_EQ(computed_of_prompt(finished), 6);
  const wire::Trace trace = trace_of(finished);
  EXPECT_EQ(trace.switch_bytes(), 64u);
  EXPECT_EQ(trace.regroup_bytes(), 192u);
  EXPECT_EQ(trace.prefill_crossed().rows(), 10u);
  EXPECT_EQ(trace.decode_crossed().regroup(), 128u);
  EXPECT_EQ(trace.queued_ns(), 50u);
  EXPECT_EQ(trace.prefill_ns(), 50u);
  EXPECT_EQ(trace.decode_ns(), 300u);
  EXPECT_EQ(trace.prefill_steps(), 1u);
  EXPECT_EQ(trace.decode_steps(), 2u);
  ASSERT_EQ(trace.decodes_size(), 1);
  EXPECT_EQ(trace.decodes(0).decode(), "tp");
  EXPECT_EQ(trace.decodes(0).step_ns(), 40u);
  EXPECT_EQ(trace.decodes(0).gap_ns(), 12u);
  EXPECT_EQ(trace.switch_gap_ns(), 7u);
  EXPECT_EQ(trace.regroups(), 0u);
  EXPECT_FALSE(trace.change_waits());
  ASSERT_EQ(trace.stored_size(), 2);
  EXPECT_EQ(trace.stored(1).entries(), 4096u);
}

// Steps, tokens, time and bytes stay with the grouping that they ran under; together they are the whole.
TEST(RequestBook, EachGroupingKeepsItsOwnFigures) {
  RequestBook book;
  const RequestId id{1};
  RequestRecord record;
  record.id = id;
  record.wish.prefill = kv::Split::kInterleave;
  book.add(record);
  auto prefill = plan_of(id, true);
  book.planned(prefill, Time{0});
  book.step_done(prefill, Duration(10), Time{10});
  prefill.spans[0].split = kv::Split::kShared;  // the rest of the prompt was too short to be split
  book.step_done(prefill, Duration(10), Time{20});
  book.token({id, 0, 5}, Time{20});
  int64_t token = 0;
  const auto decode = [&](kv::Grouping grouping, int index_c, int64_t bytes, int64_t now) {
    auto plan = plan_of(id, false, grouping);
    plan.spans[0].index_c = index_c;
    plan.spans[0].index_copied = index_c == 1;
    book.crossed(plan.spans[0], crossed(kv::CrossKind::kPartials, bytes));
    book.step_done(plan, Duration(now - 3), Time{now});
    book.token({id, ++token, 5}, Time{now});
  };
  decode({0, 2, 1}, 1, 1, 30);
  decode({0, 2, 1}, 1, 2, 45);
  decode({0, 2, 2}, 2, 4, 60);
  decode({1, 1, 1}, 1, 8, 80);
  decode({0, 2, 1}, 1, 16, 100);
  book.finish(id, end_of(id, 6), Time{100});
  // In flight when it ended: its bytes are told, its time is none, and it gave out no token.
  book.crossed(plan_of(id, false, {0, 2, 2}).spans[0], crossed(kv::CrossKind::kPartials, 32));
  book.step_done(plan_of(id, false, {0, 2, 2}), Duration(1), Time{110});

  const wire::Trace trace = trace_of(*book.find(id));
  ASSERT_EQ(trace.decodes_size(), 5);
  const struct {
    const char *decode, *index;
    uint64_t steps, tokens, time, bytes;
  } expected[] = {{"tp", "copied", 2, 2, 25, 3},
                  {"dcp(2)", "split", 1, 1, 15, 4},
                  {"dp", "copied", 1, 1, 20, 8},
                  {"tp", "copied", 1, 1, 20, 16},
                  {"dcp(2)", "copied", 1, 0, 0, 32}};
  for (int i = 0; i < 5; ++i) {
    const wire::DecodeTrace& line = trace.decodes(i);
    EXPECT_EQ(line.decode(), expected[i].decode) << i;
    EXPECT_EQ(line.index(), expected[i].index) << i;
    EXPECT_EQ(line.steps(), expected[i].steps) << i;
    EXPECT_EQ(line.tokens(), expected[i].tokens) << i;
    EXPECT_EQ(line.time_ns(), expected[i].time) << i;
    EXPECT_EQ(line.crossed().partials(), expected[i].bytes) << i;
  }
  EXPECT_EQ(trace.decode_steps(), 6u);
  EXPECT_EQ(trace.decode_ns(), 80u);
  EXPECT_EQ(trace.decode_crossed().partials(), 63u);
  EXPECT_EQ(trace.regroups(), 4u);
  EXPECT_EQ(trace.prefill(), "interleave");
  ASSERT_EQ(trace.prefill_ran_size(), 2);
  EXPECT_EQ(trace.prefill_ran(0), "zigzag");
  EXPECT_EQ(trace.prefill_ran(1), "none");
}

TEST(RequestBook, KeepsTheLastFinishedOnly) {
  RequestBook book;
  for (uint64_t i = 1; i <= RequestBook::kFinishedKept + 10; ++i) {
    RequestRecord record;
    record.id = RequestId{i};
    book.add(record);
    book.finish(RequestId{i}, {}, Time{1});
  }
  EXPECT_EQ(book.finished().size(), RequestBook::kFinishedKept);
  EXPECT_EQ(book.find(RequestId{1}), nullptr);
  EXPECT_NE(book.find(RequestId{RequestBook::kFinishedKept + 10}), nullptr);
  EXPECT_TRUE(book.running().empty());
}

}  // namespace
}  // namespace weft::daemon
