// Losses that the usual ones hide: nobody moves, a survivor stays in its step, a step is lost twice. The
// requests go on with the tokens of the undisturbed run.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <set>

#include "tests/integration/harness.h"

namespace weft::integration {
namespace {

using testing::HasSubstr;

// Only the rules about steps act: no heartbeat is missed in so short a time.
std::vector<std::string> arguments(const std::string& hang_deadline) {
  return {"--workers",       "4",           "--max-step-rows",      "512", "--pool-tokens", "32768",
          "--hang-deadline", hang_deadline, "--heartbeat-deadline", "600"};
}

wire::GenerateRequest question(size_t bytes, uint32_t max_tokens, const char* decode) {
  auto request = text_request(prompt_with_fact(bytes, "Vega-7c41", "20586"), max_tokens);
  request.set_decode(decode);
  request.set_no_prefix_cache(true);
  return request;
}

void signal_workers(const std::vector<wire::WorkerStatus>& workers, int number) {
  for (const auto& worker : workers) {
    if (worker.pid() != 0) ::kill(static_cast<pid_t>(worker.pid()), number);
  }
}

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(Recovery, AllWorkersStopInTheMiddleOfARequest) {
  Daemon daemon(arguments("1"));
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  for (const char* decode : {"dcp(4)", "dp"}) {
    const Answer undisturbed = run_request(client, question(3000, 60, decode));
    client::StreamHandlers handlers;
    handlers.token = [&](const wire::TokenEvent& event) {
      if (event.index() == 30) signal_workers(daemon.workers(), SIGSTOP);
    };
    const Answer answer = run_request(client, question(3000, 60, decode), handlers);
    EXPECT_EQ(answer.tokens, undisturbed.tokens) << decode;
    EXPECT_EQ(answer.finished.reason(), "length");
  }
  EXPECT_THAT(daemon.log(), HasSubstr("shows no progress"));
  EXPECT_EQ(daemon.status().worker_restarts(), 8u);
}

// Drafts are being verified, some of which hold, while a worker is killed again and again.
TEST(Recovery, AWorkerIsKilledWhileDraftsAreVerified) {
  Daemon daemon(arguments("60"));
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  for (const char* decode : {"dcp(4)", "tp", "dp"}) {
    auto request = question(3000, 60, decode);
    const Answer undisturbed = run_request(client, request);
    request.set_speculative("forced");
    for (size_t i = 0; i < undisturbed.tokens.size(); ++i)
      request.add_forced_drafts(undisturbed.tokens[i] ^ (i % 5 == 4 ? 1u : 0u));
    client::StreamHandlers handlers;
    uint64_t next_kill = 10;
    handlers.token = [&](const wire::TokenEvent& event) {
      if (event.index() < next_kill) return;
      next_kill += 20;
      const auto workers = daemon.workers();
      ::kill(static_cast<pid_t>(workers[next_kill / 20 % 4].pid()), SIGKILL);
    };
    const Answer answer = run_request(client, request, handlers);
    EXPECT_EQ(answer.tokens, undisturbed.tokens) << decode;
    EXPECT_EQ(answer.finished.reason(), "length");
    EXPECT_GT(answer.finished.trace().accepted_tokens(), 0u);
    EXPECT_LT(answer.finished.trace().accepted_tokens(), answer.finished.trace().drafted_tokens());
  }
  EXPECT_GE(daemon.status().worker_restarts(), 3u);
  EXPECT_GT(daemon.status().accepted_tokens(), 0u);
}

// It gets the allowance of its step, which the hang deadline scales, and no fixed time.
TEST(Recovery, ASurvivorThatStaysInItsStepIsReplaced) {
  Daemon daemon(arguments("1.5"));
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  const Answer undisturbed = run_request(client, question(3000, 60, "dcp(4)"));
  client::StreamHandlers handlers;
  handlers.token = [&](const wire::TokenEvent& event) {
    if (event.index() != 30) return;
    const auto workers = daemon.workers();
    ::kill(static_cast<pid_t>(workers[2].pid()), SIGSTOP);
    ::kill(static_cast<pid_t>(workers[0].pid()), SIGKILL);
  };
  const Answer answer = run_request(client, question(3000, 60, "dcp(4)"), handlers);
  EXPECT_EQ(answer.tokens, undisturbed.tokens);
  EXPECT_THAT(daemon.log(), HasSubstr("did not leave its step within 1.5"));
  EXPECT_EQ(daemon.status().worker_restarts(), 2u);
}

// Two plans in flight, lost with two epochs: they are abandoned, and every sequence is tried alone.
TEST(Recovery, PlansLostTwiceAreAbandonedAndMadeAnew) {
  Daemon daemon(arguments("60"));
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  const std::vector<wire::GenerateRequest> requests = {
      question(3000, 400, "tp"), question(3100, 400, "dcp(2)"), question(20000, 20, "dcp(4)")};
  std::vector<std::vector<uint32_t>> alone;
  for (const auto& request : requests) alone.push_back(run_request(client, request).tokens);

  std::vector<uint64_t> tags;
  for (const auto& request : requests) tags.push_back(client.start(request).value());
  std::vector<std::vector<uint32_t>> tokens(requests.size());
  std::set<size_t> open = {0, 1, 2};
  const auto read = [&](size_t i, Duration patience) {
    auto reply = client.next(tags[i], patience);
    if (!reply) return reply.error().code == ErrorCode::kDeadlineExceeded;
    if (reply->has_token()) tokens[i].push_back(reply->token().token());
    if (reply->has_finished()) {
      EXPECT_EQ(reply->finished().reason(), "length") << i;
      open.erase(i);
    }
    return true;
  };
  // The third request's prompt makes the steps long. Each new epoch loses a worker as soon as it begins.
  while (tokens[0].empty() || tokens[1].empty()) ASSERT_TRUE(read(tokens[0].empty() ? 0 : 1, kPatience));
  size_t epochs = 0, victim = 0;
  ASSERT_TRUE(wait_until([&] {
    const std::string log = daemon.log();
    if (log.find("plans_abandoned") != std::string::npos) return true;
    if (count(log, "epoch_began") == epochs) return false;
    epochs = count(log, "epoch_began");
    const auto workers = daemon.workers();
    signal_workers({workers[victim++ % workers.size()]}, SIGKILL);
    return false;
  }));
  while (!open.empty()) ASSERT_TRUE(read(*open.begin(), kPatience));
  EXPECT_EQ(tokens, alone);
  EXPECT_THAT(daemon.log(), HasSubstr("\"plans\":2"));
  EXPECT_EQ(daemon.log().find("repeat_differs"), std::string::npos);
  daemon.signal(SIGTERM);
  EXPECT_EQ(daemon.wait_exit(), 0);
  EXPECT_EQ(daemon.leftovers(), "");
}

}  // namespace
}  // namespace weft::integration
