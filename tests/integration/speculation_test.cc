// Drafts in real processes: by look-up in a text that is quoted, and by a draft layer whose guesses mostly
// hold. The answers are those without drafts, in fewer steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "tests/integration/harness.h"

namespace weft::integration {
namespace {

using testing::HasSubstr;

const std::string kSure = std::string(WEFT_GOLDEN_FOLDER) + "/glm_moe_dsa_sure_draft";
const std::string kSureTwice = std::string(WEFT_GOLDEN_FOLDER) + "/deepseek_v3_sure_drafts";  // two layers

std::vector<std::string> arguments(std::vector<std::string> more) {
  std::vector<std::string> out = {"--workers", "4", "--max-step-rows", "256", "--pool-tokens", "16384"};
  out.insert(out.end(), more.begin(), more.end());
  return out;
}

// The text answers with what it has said before, so look-up finds it.
TEST(Speculation, LookUpQuotesThePrompt) {
  Daemon daemon(arguments({}));
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  for (const char* decode : {"tp", "dcp(4)", "dp"}) {
    auto request = text_request(prompt_with_fact(3000, "Vega-7c41", "20586"), 80);
    request.set_decode(decode);
    request.set_no_prefix_cache(true);
    const Answer plain = run_request(client, request);
    request.set_speculative("lookup");
    request.set_draft_tokens(6);
    const Answer drafted = run_request(client, request);
    ASSERT_FALSE(drafted.failure.has_value()) << drafted.failure->text();
    EXPECT_EQ(drafted.tokens, plain.tokens) << decode;
    const auto& trace = drafted.finished.trace();
    EXPECT_EQ(trace.speculative(), "lookup");
    EXPECT_GT(trace.accepted_tokens(), 0u);
    EXPECT_EQ(trace.decode_steps() + trace.accepted_tokens(), plain.finished.trace().decode_steps())
        << decode;
    std::printf("%s: %llu of %llu drafts held, %llu steps instead of %llu\n", decode,
                static_cast<unsigned long long>(trace.accepted_tokens()),
                static_cast<unsigned long long>(trace.drafted_tokens()),
                static_cast<unsigned long long>(trace.decode_steps()),
                static_cast<unsigned long long>(plain.finished.trace().decode_steps()));
  }
}

wire::GenerateRequest numbers(uint32_t seed, const char* decode, const char* index) {
  wire::GenerateRequest request;
  for (uint32_t i = 0; i < 205; ++i) request.mutable_tokens()->add_ids((seed * 31 + i * i * 7) % 127);
  request.set_max_tokens(50);
  request.set_ignore_eos(true);
  request.set_decode(decode);
  request.set_index(index);
  request.set_digest(true);
  return request;
}

struct Told {
  Answer answer;
  std::map<uint64_t, std::string> digests;
};

Told run(client::Client& client, const wire::GenerateRequest& request,
         const std::function<void(uint64_t index)>& at_token = {}) {
  Told out;
  client::StreamHandlers handlers;
  handlers.digest = [&](const wire::PositionDigest& d) { out.digests[d.position()] = d.sha256(); };
  handlers.token = [&](const wire::TokenEvent& event) {
    if (at_token) at_token(event.index());
  };
  out.answer = run_request(client, request, handlers);
  return out;
}

void expect_guesses_hold(const std::string& model) {
  Daemon daemon(arguments({"--speculative", "mtp", "--draft-tokens", "3"}), model);
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  auto client = daemon.client();
  for (const float temperature : {0.0f, 0.7f}) {
    auto request = numbers(1, "tp", "copied");
    request.set_temperature(temperature);
    request.set_no_prefix_cache(true);
    request.set_speculative("off");
    const Told plain = run(client, request);
    EXPECT_EQ(plain.answer.finished.trace().drafted_tokens(), 0u);
    for (const char* decode : {"tp", "dcp(2)", "dcp(4)", "dp"}) {
      for (const char* index : {"copied", "split"}) {
        request.set_decode(decode);
        request.set_index(index);
        request.set_speculative("");
        const Told drafted = run(client, request);
        EXPECT_EQ(drafted.answer.tokens, plain.answer.tokens) << decode << " " << index;
        EXPECT_EQ(drafted.digests, plain.digests) << decode << " " << index;
        const auto& trace = drafted.answer.finished.trace();
        EXPECT_EQ(trace.speculative(), "mtp");
        EXPECT_GT(trace.accepted_tokens(), 10u);
        EXPECT_LT(trace.decode_steps(), 40u);
      }
    }
  }
  EXPECT_GT(daemon.status().accepted_tokens(), 160u);
}

TEST(Speculation, TheDraftLayersGuessesHold) { expect_guesses_hold(kSure); }
TEST(Speculation, TheGuessesOfTwoDraftLayersHold) { expect_guesses_hold(kSureTwice); }

// A step that drafts is repeated as a whole, so nothing is lost with a worker.
TEST(Speculation, AWorkerIsKilledWhileTheDraftLayerGuesses) {
  Daemon daemon(arguments({"--speculative", "mtp"}), kSure);
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  auto client = daemon.client();
  auto request = numbers(2, "dcp(4)", "split");
  request.set_no_prefix_cache(true);
  const Told undisturbed = run(client, request);
  size_t victim = 0;
  uint64_t next = 5;
  const Told killed = run(client, request, [&](uint64_t index) {
    if (index < next) return;
    next += 15;
    ::kill(static_cast<pid_t>(daemon.workers()[victim++ % 4].pid()), SIGKILL);
  });
  EXPECT_EQ(killed.answer.tokens, undisturbed.answer.tokens);
  EXPECT_EQ(killed.digests, undisturbed.digests);
  EXPECT_EQ(killed.answer.finished.trace().accepted_tokens(),
            undisturbed.answer.finished.trace().accepted_tokens());
  EXPECT_GE(daemon.status().worker_restarts(), 1u);
}

TEST(Speculation, AModelWithoutADraftLayerIsRefused) {
  Daemon daemon(arguments({"--speculative", "mtp"}));
  EXPECT_FALSE(daemon.wait_ready());
  EXPECT_EQ(daemon.wait_exit(), 1);
  EXPECT_THAT(daemon.log(), HasSubstr("the model has no draft layer"));
}

}  // namespace
}  // namespace weft::integration
