// Workers that are killed or stopped, clients that leave or do not read: every other stream goes on, with the
// tokens of the undisturbed run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>

#include "proto/vocab/random.h"
#include "tests/integration/harness.h"

namespace weft::integration {
namespace {

const std::vector<std::string> kArguments = {"--workers",     "4",    "--max-step-rows", "128",
                                             "--pool-tokens", "16384"};

void kill_worker(Daemon& daemon, SplitMix64& random, int number = SIGKILL) {
  const auto workers = daemon.workers();
  const auto& victim = workers[random.below(workers.size())];
  if (victim.pid() != 0) ::kill(static_cast<pid_t>(victim.pid()), number);
}

wire::GenerateRequest long_request(const char* decode) {
  auto request = text_request(prompt_with_fact(3000, "Vega-7c41", "20586"), 60);
  request.set_decode(decode);
  request.set_no_prefix_cache(true);
  return request;
}

// Rows of the only running request that are computed; empty when none runs.
std::optional<uint64_t> computed_rows(Daemon& daemon) {
  wire::ControlRequest list;
  list.mutable_requests();
  const auto reply = daemon.control(list);
  if (reply.requests().requests_size() != 1) return std::nullopt;
  return reply.requests().requests(0).computed_tokens();
}

struct KilledRun {
  std::vector<uint32_t> tokens;
  std::string reason;
  bool killed_in_prefill = false;
  bool killed_in_decode = false;
};

// Runs a request and kills a worker once so many rows are computed (asked for every few milliseconds), or so
// many tokens have come.
KilledRun run_and_kill(Daemon& daemon, client::Client& client, SplitMix64& random,
                       const wire::GenerateRequest& request, std::optional<uint64_t> at_row,
                       uint64_t at_token) {
  KilledRun run;
  const uint64_t tag = client.start(request).value();
  bool killed = false;
  while (run.reason.empty()) {
    if (at_row && !killed) {
      const auto rows = computed_rows(daemon);
      if (rows && *rows >= *at_row) {
        killed = true;
        run.killed_in_prefill = run.tokens.empty();
        kill_worker(daemon, random);
      }
    }
    auto reply = client.next(tag, std::chrono::milliseconds(at_row && !killed ? 2 : 120'000));
    if (!reply && reply.error().code == ErrorCode::kDeadlineExceeded && at_row && !killed) continue;
    if (!reply) {
      ADD_FAILURE() << reply.error().text();
      return run;
    }
    if (reply->has_token()) run.tokens.push_back(reply->token().token());
    if (reply->has_finished()) run.reason = reply->finished().reason();
    if (!at_row && !killed && run.tokens.size() > at_token) {
      killed = run.killed_in_decode = true;
      kill_worker(daemon, random);
    }
  }
  return run;
}

TEST(Failure, KilledWorkersCostNoToken) {
  const uint64_t seed = 4711;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  SplitMix64 random(seed);
  Daemon daemon(kArguments);
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  const char* decodes[] = {"tp", "dcp(2)", "dcp(4)", "dp"};
  std::vector<std::vector<uint32_t>> undisturbed;
  for (const char* decode : decodes) undisturbed.push_back(run_request(client, long_request(decode)).tokens);
  ASSERT_EQ(undisturbed[0].size(), 60u);

  int prefill_kills = 0, decode_kills = 0;
  for (int trial = 0; trial < 80 && (prefill_kills < 20 || decode_kills < 20); ++trial) {
    const size_t which = static_cast<size_t>(trial) % 4;
    std::optional<uint64_t> at_row;
    if (decode_kills >= 20 || (prefill_kills < 20 && trial / 4 % 2 == 0)) at_row = random.below(2600);
    const KilledRun run =
        run_and_kill(daemon, client, random, long_request(decodes[which]), at_row, random.below(58));
    ASSERT_EQ(run.reason, "length") << "trial " << trial;
    ASSERT_EQ(run.tokens, undisturbed[which]) << "trial " << trial;
    prefill_kills += run.killed_in_prefill ? 1 : 0;
    decode_kills += run.killed_in_decode ? 1 : 0;
  }
  EXPECT_EQ(prefill_kills, 20);
  EXPECT_EQ(decode_kills, 20);
  EXPECT_GE(daemon.status().worker_restarts(), 40u);
  EXPECT_EQ(daemon.log().find("repeat_differs"), std::string::npos);
  daemon.signal(SIGTERM);
  EXPECT_EQ(daemon.wait_exit(), 0);
  EXPECT_EQ(daemon.leftovers(), "");
}

TEST(Failure, TwoWorkersAtOnceAndManyStreams) {
  SplitMix64 random(99);
  Daemon daemon(kArguments);
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  const char* decodes[] = {"tp", "dcp(2)", "dcp(4)", "dp"};
  std::vector<std::vector<uint32_t>> alone;
  for (const char* decode : decodes) alone.push_back(run_request(client, long_request(decode)).tokens);
  std::vector<uint64_t> tags;
  for (const char* decode : decodes) tags.push_back(client.start(long_request(decode)).value());
  std::vector<std::vector<uint32_t>> tokens(4);
  int events = 0;
  for (size_t i = 0; i < tags.size(); ++i) {
    for (;;) {
      auto reply = client.next(tags[i], kPatience);
      ASSERT_TRUE(reply.has_value()) << reply.error().text();
      if (reply->has_token()) tokens[i].push_back(reply->token().token());
      if (++events % 40 == 0) {
        kill_worker(daemon, random);
        kill_worker(daemon, random);
      }
      if (reply->has_finished()) break;
    }
  }
  for (size_t i = 0; i < tags.size(); ++i) EXPECT_EQ(tokens[i], alone[i]) << decodes[i];
}

TEST(Failure, AStoppedWorkerIsFoundAndReplaced) {
  SplitMix64 random(5);
  auto arguments = kArguments;
  arguments.insert(arguments.end(), {"--heartbeat-deadline", "2"});
  Daemon daemon(arguments);
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  const Answer undisturbed = run_request(client, long_request("dcp(4)"));
  client::StreamHandlers handlers;
  handlers.token = [&](const wire::TokenEvent& event) {
    if (event.index() == 30) kill_worker(daemon, random, SIGSTOP);
  };
  const Answer answer = run_request(client, long_request("dcp(4)"), handlers);
  EXPECT_EQ(answer.tokens, undisturbed.tokens);
  EXPECT_NE(daemon.log().find("worker_hung"), std::string::npos);
}

TEST(Failure, AClientThatLeavesGivesItsBlocksBackWithinTwoSteps) {
  Daemon daemon(kArguments);
  ASSERT_TRUE(daemon.wait_ready());
  {
    auto client = daemon.client();
    auto request = long_request("tp");
    request.set_max_tokens(8000);
    const auto tag = client.start(request);
    ASSERT_TRUE(tag.has_value());
    for (int tokens = 0; tokens < 5;) {
      auto reply = client.next(*tag, kPatience);
      ASSERT_TRUE(reply.has_value()) << reply.error().text();
      tokens += reply->has_token() ? 1 : 0;
    }
  }
  EXPECT_TRUE(wait_until([&] { return daemon.status().running() == 0; }));
  const uint64_t steps = daemon.status().steps();
  const auto all_back = [&] {
    const auto status = daemon.status();
    return std::all_of(status.pools().begin(), status.pools().end(), [](const wire::PoolStatus& pool) {
      return pool.entries().used() + pool.entries().in_flight() + pool.index_keys().used() +
                 pool.index_keys().in_flight() ==
             0;
    });
  };
  EXPECT_TRUE(wait_until(all_back));
  EXPECT_LE(daemon.status().steps(), steps + 2);
}

TEST(Failure, AClientThatDoesNotReadPausesItselfAlone) {
  auto arguments = kArguments;
  arguments.insert(arguments.end(), {"--stall-limit", "100"});
  Daemon daemon(arguments);
  ASSERT_TRUE(daemon.wait_ready());
  auto other = daemon.client();
  const Answer undisturbed = run_request(other, long_request("dcp(2)"));

  auto client = daemon.client();
  auto request = long_request("dcp(2)");
  request.set_credit(7);
  const uint64_t tag = client.start(request).value();
  std::vector<uint32_t> tokens;
  uint64_t id = 0;
  while (tokens.size() < 7) {
    auto reply = client.next(tag, kPatience);
    ASSERT_TRUE(reply.has_value()) << reply.error().text();
    if (reply->has_accepted()) id = reply->accepted().request();
    if (reply->has_token()) tokens.push_back(reply->token().token());
  }
  wire::ControlRequest list;
  list.mutable_requests();
  EXPECT_TRUE(wait_until([&] {
    const auto reply = daemon.control(list);
    return reply.requests().requests_size() == 1 && reply.requests().requests(0).state() == "paused";
  }));
  EXPECT_EQ(run_request(other, long_request("dcp(2)")).tokens, undisturbed.tokens);
  ASSERT_TRUE(client.grant(id, 1000).has_value());
  for (;;) {
    auto reply = client.next(tag, kPatience);
    ASSERT_TRUE(reply.has_value()) << reply.error().text();
    if (reply->has_token()) tokens.push_back(reply->token().token());
    if (reply->has_finished()) break;
  }
  EXPECT_EQ(tokens, undisturbed.tokens);
}

TEST(Failure, AClientThatNeverReadsIsCancelledAfterTheLimit) {
  auto arguments = kArguments;
  arguments.insert(arguments.end(), {"--stall-limit", "0.3"});
  Daemon daemon(arguments);
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  auto request = long_request("tp");
  request.set_credit(2);
  const uint64_t tag = client.start(request).value();
  EXPECT_TRUE(wait_until([&] { return daemon.log().find("client_stalled") != std::string::npos; }));
  EXPECT_TRUE(wait_until([&] { return daemon.status().running() == 0; }));
  EXPECT_EQ(daemon.status().state(), "ready");
  // One that reads but grants nothing is told so: the end needs no credit.
  wire::ClientReply last;
  while (!last.has_finished()) {
    auto reply = client.next(tag, kPatience);
    ASSERT_TRUE(reply.has_value()) << reply.error().text();
    last = *reply;
  }
  EXPECT_EQ(last.finished().reason(), "cancelled");
  EXPECT_EQ(last.finished().error().code(), wire::ERROR_DEADLINE_EXCEEDED);
}

// More requests end behind it than the daemon remembers; then the daemon is stopped.
TEST(Failure, AnUnreadEndOutlivesTheRecordOfItsRequest) {
  Daemon daemon(kArguments);
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  auto request = text_request("Say this again and again. Say this", 4);
  request.set_credit(2);
  const uint64_t tag = client.start(request).value();
  EXPECT_TRUE(wait_until([&] { return daemon.log().find("request_finished") != std::string::npos; }));
  {
    auto other = daemon.client();
    std::vector<uint64_t> tags;
    for (int i = 0; i < 300; ++i) tags.push_back(other.start(text_request("abc", 1)).value());
    for (const uint64_t one : tags) {
      for (bool ended = false; !ended;) {
        auto reply = other.next(one, kPatience);
        ASSERT_TRUE(reply.has_value()) << reply.error().text();
        ended = reply->has_finished();
      }
    }
  }
  daemon.signal(SIGTERM);
  uint64_t tokens = 0;
  for (;;) {
    auto reply = client.next(tag, kPatience);
    ASSERT_TRUE(reply.has_value()) << reply.error().text();
    tokens += reply->has_token() ? 1 : 0;
    if (!reply->has_finished()) continue;
    EXPECT_EQ(reply->finished().reason(), "length");
    break;
  }
  EXPECT_EQ(tokens, 4u);
  EXPECT_EQ(daemon.wait_exit(), 0);
}

// The checkpoint goes while the daemon serves, and a worker dies: the daemon says why it waits, tries again
// and again, and serves on once the files are back.
TEST(Failure, ABrokenCheckpointIsToldUntilItIsMended) {
  namespace fs = std::filesystem;
  const std::string model = recall_model() + "-vanishing", hidden = model + "/config.json.away";
  fs::remove_all(model);
  fs::copy(recall_model(), model);
  Daemon daemon(kArguments, model);
  ASSERT_TRUE(daemon.wait_ready());
  EXPECT_EQ(daemon.status().trouble(), "");
  auto client = daemon.client();
  const Answer undisturbed = run_request(client, long_request("dcp(2)"));

  fs::rename(model + "/config.json", hidden);
  const uint64_t tag = client.start(long_request("dcp(2)")).value();
  std::vector<uint32_t> tokens;
  while (tokens.size() < 5) {
    auto reply = client.next(tag, kPatience);
    ASSERT_TRUE(reply.has_value()) << reply.error().text();
    if (reply->has_token()) tokens.push_back(reply->token().token());
  }
  SplitMix64 random(1);
  kill_worker(daemon, random);
  EXPECT_TRUE(wait_until([&] { return daemon.status().worker_restarts() >= 3; }));
  EXPECT_TRUE(wait_until([&] {
    return daemon.status().trouble().find("not_found: config.json: there is no file") != std::string::npos;
  })) << daemon.status().trouble();
  EXPECT_EQ(daemon.status().state(), "recovering");
  int told = 0;
  for (const auto& worker : daemon.workers()) {
    told += worker.last_exit().find("not_found: config.json") != std::string::npos ? 1 : 0;
  }
  EXPECT_EQ(told, 1);
  EXPECT_NE(daemon.log().find("\"event\":\"worker_failure\""), std::string::npos);
  EXPECT_NE(daemon.log().find("\"event\":\"worker_restarts\""), std::string::npos);

  fs::rename(hidden, model + "/config.json");
  for (;;) {
    auto reply = client.next(tag, kPatience);
    ASSERT_TRUE(reply.has_value()) << reply.error().text();
    if (reply->has_token()) tokens.push_back(reply->token().token());
    if (reply->has_finished()) break;
  }
  EXPECT_EQ(tokens, undisturbed.tokens);
  EXPECT_EQ(daemon.status().trouble(), "");
  fs::remove_all(model);
}

// Runs a request with a credit of one token until it is paused, has it cut off, and returns its end.
wire::Finished cut_off_while_paused(Daemon& daemon, wire::GenerateRequest request,
                                    const std::function<void(client::Client&, uint64_t id)>& cut_off) {
  auto client = daemon.client();
  request.set_credit(1);
  const uint64_t tag = client.start(request).value();
  uint64_t id = 0;
  for (bool begun = false; !begun;) {
    auto reply = client.next(tag, kPatience);
    if (!reply) ADD_FAILURE() << reply.error().text();
    if (!reply) return {};
    if (reply->has_accepted()) id = reply->accepted().request();
    begun = reply->has_token();
  }
  wire::ControlRequest list;
  list.mutable_requests()->set_all(true);
  EXPECT_TRUE(wait_until([&] {
    const auto reply = daemon.control(list);
    return std::ranges::any_of(reply.requests().requests(), [&](const auto& request) {
      return request.request() == id && (request.state() == "paused" || request.state() == "error");
    });
  }));
  cut_off(client, id);
  for (;;) {
    auto reply = client.next(tag, std::chrono::seconds(30));  // the stall limit is longer
    if (!reply) ADD_FAILURE() << reply.error().text();
    if (!reply || reply->has_finished()) return reply ? reply->finished() : wire::Finished{};
  }
}

TEST(Failure, ACutOffEndNeedsNoCredit) {
  Daemon daemon(kArguments);
  ASSERT_TRUE(daemon.wait_ready());
  const auto by_client = cut_off_while_paused(daemon, long_request("tp"), [](auto& client, uint64_t id) {
    ASSERT_TRUE(client.send_cancel(id).has_value());
  });
  EXPECT_EQ(by_client.reason(), "cancelled");
  const auto by_operator = cut_off_while_paused(daemon, long_request("tp"), [&](auto&, uint64_t id) {
    wire::ControlRequest cancel;
    cancel.mutable_cancel()->set_request(id);
    daemon.control(cancel);
  });
  EXPECT_EQ(by_operator.reason(), "cancelled");
  auto short_lived = long_request("tp");
  short_lived.set_deadline_ms(2000);
  const auto by_deadline = cut_off_while_paused(daemon, short_lived, [](auto&, uint64_t) {});
  EXPECT_EQ(by_deadline.reason(), "error");
  EXPECT_EQ(by_deadline.error().field(), "deadline_ms");
}

// What was made for a client that granted too little comes before the end, whoever ends the request.
TEST(Failure, AStopTellsWhatWaitedForCredit) {
  Daemon daemon(kArguments);
  ASSERT_TRUE(daemon.wait_ready());
  uint64_t tokens = 0;
  auto client = daemon.client();
  auto request = long_request("tp");
  request.set_credit(1);
  const uint64_t tag = client.start(request).value();
  wire::ControlRequest list;
  list.mutable_requests();
  ASSERT_TRUE(wait_until([&] {
    const auto reply = daemon.control(list);
    return reply.requests().requests_size() == 1 && reply.requests().requests(0).state() == "paused";
  }));
  daemon.signal(SIGTERM);
  for (;;) {
    auto reply = client.next(tag, kPatience);
    ASSERT_TRUE(reply.has_value()) << reply.error().text();
    tokens += reply->has_token() ? 1 : 0;
    if (!reply->has_finished()) continue;
    EXPECT_EQ(reply->finished().reason(), "cancelled");
    EXPECT_GE(tokens, 2u);  // one without credit at least: that is why it was paused
    EXPECT_EQ(reply->finished().usage().completion_tokens(), tokens);
    break;
  }
  EXPECT_EQ(daemon.wait_exit(), 0);
}

// An answer that is done, but longer than the credit that was ever granted.
TEST(Failure, AnUngrantedEndIsToldAtTheStallLimit) {
  auto arguments = kArguments;
  arguments.insert(arguments.end(), {"--stall-limit", "0.3"});
  Daemon daemon(arguments);
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  auto request = text_request("Say this again and again. Say this", 4);
  request.set_ignore_eos(true);
  request.set_credit(3);
  const uint64_t tag = client.start(request).value();
  uint64_t tokens = 0;
  for (;;) {
    auto reply = client.next(tag, std::chrono::seconds(30));
    ASSERT_TRUE(reply.has_value()) << reply.error().text();
    tokens += reply->has_token() ? 1 : 0;
    if (!reply->has_finished()) continue;
    EXPECT_EQ(reply->finished().reason(), "length");
    break;
  }
  EXPECT_EQ(tokens, 4u);
}

}  // namespace
}  // namespace weft::integration
