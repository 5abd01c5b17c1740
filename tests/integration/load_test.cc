// Fifty requests at once under mixed groupings: each gets the tokens it gets alone, and the recorded plans
// show that prefill rows under PCP ran beside decode rows of every grouping.
#include <gmock/gmock.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl.h>
#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <set>

#include "proto/worker.pb.h"
#include "tests/integration/harness.h"

namespace weft::integration {
namespace {

const char* kDecodes[] = {"tp", "dcp(2)", "dcp(4)", "dp"};
const char* kPrefills[] = {"zigzag", "interleave", "zigzag", "none"};

wire::GenerateRequest request_number(int i) {
  const std::string station = "Unit-" + std::to_string(1000 + i * 37);
  auto request = text_request(
      prompt_with_fact(static_cast<size_t>(700 + i * 61), station, std::to_string(20000 + i * 71)),
      static_cast<uint32_t>(24 + i % 5 * 9));
  request.set_decode(kDecodes[i % 4]);
  request.set_prefill(kPrefills[i / 4 % 4]);
  request.set_index(i % 3 == 0 ? "split" : "copied");
  request.set_no_prefix_cache(i % 2 == 0);
  if (i % 5 == 4) {
    request.set_temperature(0.8f);
    request.set_top_k(20);
    request.set_seed(static_cast<uint64_t>(i));
  }
  return request;
}

std::vector<wire::StepPlan> read_plans(const std::string& path) {
  std::vector<wire::StepPlan> plans;
  std::ifstream file(path, std::ios::binary);
  google::protobuf::io::IstreamInputStream stream(&file);
  for (;;) {
    google::protobuf::io::CodedInputStream coded(&stream);
    uint32_t length = 0;
    if (!coded.ReadVarint32(&length)) return plans;
    const auto limit = coded.PushLimit(static_cast<int>(length));
    EXPECT_TRUE(plans.emplace_back().ParseFromCodedStream(&coded));
    coded.PopLimit(limit);
  }
}

std::string grouping_of(const wire::Span& span) {
  if (span.group_width() == 1) return "dp";
  return span.group_c() == 1 ? "tp" : "dcp(" + std::to_string(span.group_c()) + ")";
}

TEST(Load, FiftyMixedRequestsEqualThemselvesAlone) {
  constexpr int kRequests = 50;
  Daemon daemon({"--workers", "4", "--max-step-rows", "128", "--pool-tokens", "65536"});
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  std::vector<std::vector<uint32_t>> alone;
  for (int i = 0; i < kRequests; ++i) {
    const Answer answer = run_request(client, request_number(i));
    ASSERT_FALSE(answer.failure.has_value()) << answer.failure->text();
    ASSERT_EQ(answer.finished.reason(), "length");
    alone.push_back(answer.tokens);
  }
  wire::ControlRequest record;
  record.mutable_record()->set_on(true);
  const std::string path = daemon.control(record).record().path();
  ASSERT_FALSE(path.empty());

  std::vector<uint64_t> tags;
  for (int i = 0; i < kRequests; ++i) tags.push_back(client.start(request_number(i)).value());
  for (int i = 0; i < kRequests; ++i) {
    std::vector<uint32_t> tokens;
    for (bool finished = false; !finished;) {
      auto reply = client.next(tags[static_cast<size_t>(i)], kPatience);
      ASSERT_TRUE(reply.has_value()) << reply.error().text();
      if (reply->has_token()) tokens.push_back(reply->token().token());
      finished = reply->has_finished();
    }
    EXPECT_EQ(tokens, alone[static_cast<size_t>(i)]) << "request " << i;
  }
  record.mutable_record()->set_on(false);
  daemon.control(record);

  int full_mixes = 0;
  const auto plans = read_plans(path);
  for (const wire::StepPlan& plan : plans) {
    std::set<std::string> kinds;
    for (const wire::Span& span : plan.spans()) {
      if (span.prefill() && span.split() != 0) kinds.insert("pcp");
      if (!span.prefill()) kinds.insert(grouping_of(span));
    }
    full_mixes += kinds.size() == 5 ? 1 : 0;
  }
  EXPECT_GT(full_mixes, 0) << plans.size() << " plans";
  RecordProperty("plans", static_cast<int>(plans.size()));
  RecordProperty("plans_with_every_grouping", full_mixes);
}

TEST(Load, MoreThanThePoolHoldsWaitsAndIsServed) {
  Daemon daemon({"--workers", "2", "--max-step-rows", "128", "--pool-tokens", "2048", "--max-waiting", "10"});
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  std::vector<uint64_t> tags;
  const auto request = [](int i) {
    auto made = text_request(prompt_with_fact(1000, "Vega-" + std::to_string(i), "20586"), 400);
    made.set_no_prefix_cache(true);
    return made;
  };
  for (int i = 0; i < 30; ++i) tags.push_back(client.start(request(i)).value());
  int served = 0, refused = 0;
  for (const uint64_t tag : tags) {
    for (;;) {
      auto reply = client.next(tag, kPatience);
      ASSERT_TRUE(reply.has_value()) << reply.error().text();
      if (!reply->has_finished()) continue;
      const wire::Finished& finished = reply->finished();
      served += finished.reason() == "length" ? 1 : 0;
      if (finished.reason() == "error") {
        EXPECT_EQ(finished.error().code(), wire::ERROR_RESOURCE_EXHAUSTED);
        ++refused;
      }
      break;
    }
  }
  EXPECT_EQ(served + refused, 30);
  EXPECT_GE(served, 11);
  EXPECT_GT(refused, 0);
}

wire::RequestStatus status_of(Daemon& daemon, uint64_t id) {
  wire::ControlRequest list;
  list.mutable_requests();
  const auto reply = daemon.control(list);
  for (const auto& status : reply.requests().requests()) {
    if (status.request() == id) return status;
  }
  return {};
}

// The next reply to `tag` that is wanted.
wire::ClientReply await(client::Client& client, uint64_t tag,
                        const std::function<bool(const wire::ClientReply&)>& wanted) {
  for (;;) {
    auto reply = client.next(tag, kPatience);
    if (!reply) ADD_FAILURE() << reply.error().text();
    if (!reply || wanted(*reply)) return reply ? *reply : wire::ClientReply{};
  }
}

// Short requests are read, answered and done while a prompt of 60,000 tokens before them is still being read.
TEST(Load, ShortRequestsPassALongPrompt) {
  Daemon daemon(
      {"--workers", "2", "--max-step-rows", "64", "--pool-tokens", "131072", "--max-context", "100000"});
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  wire::GenerateRequest big;
  for (uint32_t i = 0; i < 60000; ++i) big.mutable_tokens()->add_ids(i * 7 % 250);
  big.set_max_tokens(1);
  const uint64_t tag = client.start(big).value();
  const uint64_t id =
      await(client, tag, [](const auto& reply) { return reply.has_accepted(); }).accepted().request();
  await(client, tag, [](const auto& reply) { return reply.has_progress(); });
  for (int i = 0; i < 5; ++i) {
    const Answer answer =
        run_request(client, text_request(prompt_with_fact(300, "Vega-" + std::to_string(i), "20586"), 4));
    ASSERT_FALSE(answer.failure.has_value()) << answer.failure->text();
    EXPECT_EQ(answer.finished.reason(), "length");
  }
  EXPECT_EQ(status_of(daemon, id).state(), "prefill");
  ASSERT_TRUE(client.send_cancel(id).has_value());
  await(client, tag, [](const auto& reply) { return reply.has_finished(); });
}

TEST(Load, WhatIsLateEndsWithATypedErrorAndGivesEverythingBack) {
  Daemon daemon({"--workers", "2", "--pool-tokens", "65536"});
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  auto request = text_request(prompt_with_fact(700, "Vega-9", "20586"), 60000);
  request.set_deadline_ms(200);
  request.set_priority(3);
  const uint64_t tag = client.start(request).value();
  const uint64_t id =
      await(client, tag, [](const auto& reply) { return reply.has_accepted(); }).accepted().request();
  EXPECT_EQ(status_of(daemon, id).priority(), 3);
  const auto end = await(client, tag, [](const auto& reply) { return reply.has_finished(); }).finished();
  EXPECT_EQ(end.reason(), "error");
  EXPECT_EQ(end.error().code(), wire::ERROR_DEADLINE_EXCEEDED);
  EXPECT_EQ(end.error().field(), "deadline_ms");
  EXPECT_TRUE(wait_until([&] {
    const auto status = daemon.status();
    return status.pools(0).entries().used() == 0 && status.pools(0).entries().in_flight() == 0;
  }));
}

}  // namespace
}  // namespace weft::integration
