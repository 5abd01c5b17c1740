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

controlplane::Plan plan_of(RequestId id, bool prefill) {
  controlplane::Plan plan;
  controlplane::Span span;
  span.request = id;
  span.prefill = prefill;
  span.rows = 1;
  plan.spans.push_back(span);
  return plan;
}

TEST(RequestBook, TraceOfARequestFromQueueToEnd) {
  RequestBook book;
  const RequestId id{7};
  RequestRecord record;
  record.id = id;
  record.arrived = Time{100};
  book.add(record);
  const auto prefill = plan_of(id, true), decode = plan_of(id, false);
  kv::CrossedBytes rows, copies;
  rows[kv::CrossKind::kRows] = 10;
  copies[kv::CrossKind::kRegroup] = 64;

  book.planned(prefill, Time{150});
  book.crossed(id, nullptr, copies);  // before the prompt is done: no switch
  book.crossed(id, &prefill.spans[0], rows);
  book.step_done(prefill, Duration(20));
  book.find(id)->first_token = Time{200};
  book.planned(decode, Time{210});
  book.crossed(id, nullptr, copies);  // this is the switch's
  book.crossed(id, &decode.spans[0], rows);
  book.step_done(decode, Duration(30));
  book.crossed(id, nullptr, copies);  // a later change of mind
  book.step_done(decode, Duration(40));
  controlplane::FinishedNotice end;
  end.request = id;
  end.reason = controlplane::FinishReason::kLength;
  end.completion_tokens = 3;
  book.finish(id, end, Time{500});

  const RequestRecord& finished = *book.find(id);
  EXPECT_EQ(finished.outcome, "length");
  EXPECT_EQ(finished.switch_bytes, 64);
  EXPECT_EQ(finished.regroup_bytes, 192);
  EXPECT_EQ(finished.prefill_crossed[kv::CrossKind::kRows], 10);
  EXPECT_EQ(finished.decode_crossed[kv::CrossKind::kRegroup], 128);
  EXPECT_EQ(finished.last_step_ns, 40);
  wire::Trace trace;
  StoredBytes stored{};
  stored[0][1] = 4096;
  fill_trace(finished, stored, 2, Time{9999}, &trace);
  EXPECT_EQ(trace.queued_ns(), 50u);
  EXPECT_EQ(trace.prefill_ns(), 50u);
  EXPECT_EQ(trace.decode_ns(), 300u);
  EXPECT_EQ(trace.prefill_steps(), 1u);
  EXPECT_EQ(trace.decode_steps(), 2u);
  ASSERT_EQ(trace.stored_size(), 2);
  EXPECT_EQ(trace.stored(1).entries(), 4096u);
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
