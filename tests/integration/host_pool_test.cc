// Goal: a conversation whose blocks went to the host pool goes on under any grouping with the bits it would
// have had, and nothing of it is computed again; also when a worker dies on the way. A host pool that does
// not fit is refused. Method: real processes and small pools. Turns of one conversation, each under another
// grouping, with requests between them that take all the room; digests of all rows are compared with those of
// a run without cache.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <map>

#include "proto/vocab/random.h"
#include "tests/integration/harness.h"

namespace weft::integration {
namespace {

constexpr int64_t kBlock = 8, kPrompt = 205, kTurn = 21, kAnswer = 6;

struct Turn {
  std::vector<uint32_t> tokens;
  std::map<uint64_t, std::string> digests;
  wire::Usage usage;
};

std::vector<uint32_t> noise(uint64_t seed, int64_t count) {
  SplitMix64 random(seed);
  std::vector<uint32_t> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(static_cast<uint32_t>(random.below(160)));
  return out;
}

wire::GenerateRequest request_of(const std::vector<uint32_t>& prompt, const std::string& decode) {
  wire::GenerateRequest request;
  request.mutable_tokens()->mutable_ids()->Add(prompt.begin(), prompt.end());
  request.set_max_tokens(kAnswer);
  request.set_ignore_eos(true);
  request.set_prefill("zigzag");
  request.set_decode(decode);
  request.set_index("split");
  request.set_digest(true);
  return request;
}

Turn run(Daemon& daemon, const wire::GenerateRequest& request, const std::function<void()>& started = {}) {
  Turn out;
  client::Client client = daemon.client();
  const uint64_t tag = client.start(request).value();
  for (;;) {
    const wire::ClientReply reply = client.next(tag, kPatience).value();
    if (reply.has_accepted() && started) started();
    if (reply.has_digest()) out.digests[reply.digest().position()] = reply.digest().sha256();
    if (reply.has_token()) out.tokens.push_back(reply.token().token());
    if (!reply.has_finished()) continue;
    EXPECT_EQ(reply.finished().reason(), "length") << reply.finished().error().message();
    out.usage = reply.finished().usage();
    return out;
  }
}

class HostPool : public testing::TestWithParam<const char*> {
 protected:
  static std::string model() { return std::string(WEFT_GOLDEN_FOLDER) + "/" + GetParam(); }
  // Two conversations hardly fit the page pools.
  static std::vector<std::string> arguments(int workers, const char* write) {
    return {"--workers",       std::to_string(workers),
            "--block-tokens",  std::to_string(kBlock),
            "--pool-tokens",   "512",
            "--max-context",   "512",
            "--max-step-rows", "128",
            "--cache-dtype",   "bf16",
            "--host-pool",     "64MiB",
            "--host-write",    write};
  }
  static void displace(Daemon& daemon, uint64_t seed) {
    for (uint64_t i = 0; i < 10; ++i) {
      wire::GenerateRequest request = request_of(noise(1000 + seed * 100 + i, 440), "tp");
      request.set_index("copied");
      request.set_digest(false);
      (void)run(daemon, request);
    }
  }
  // Each turn under another grouping; with `kill` a worker dies while it runs.
  static void converse(const char* write, bool kill) {
    Daemon daemon(arguments(4, write), model());
    ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
    std::vector<uint32_t> text = noise(7, kPrompt);
    uint64_t seed = 0, hits = 0, known = 0;
    for (const char* decode : {"tp", "dcp(4)", "dp", "dcp(2)", "dp(2)xdcp(2)", "tp"}) {
      SCOPED_TRACE(decode);
      wire::GenerateRequest plain = request_of(text, "dp");
      plain.set_no_prefix_cache(true);
      const Turn expected = run(daemon, plain);
      displace(daemon, ++seed);
      const wire::StatusReply before = daemon.status();
      const Turn got = run(daemon, request_of(text, decode), [&] {
        if (kill) ::kill(static_cast<pid_t>(daemon.workers().at(seed % 4).pid()), SIGKILL);
      });
      EXPECT_EQ(got.tokens, expected.tokens);
      for (const auto& [position, digest] : expected.digests) {
        if (position < got.usage.cached_tokens()) continue;
        const auto found = got.digests.find(position);
        ASSERT_NE(found, got.digests.end()) << position;
        EXPECT_EQ(found->second, digest) << "position " << position;
      }
      // Every full block of the turn before.
      EXPECT_EQ(got.usage.cached_tokens(), known / kBlock * kBlock);
      EXPECT_EQ(got.usage.computed_tokens(), text.size() - got.usage.cached_tokens());
      const wire::StatusReply after = daemon.status();
      EXPECT_EQ(after.host_pool().hit_tokens() - before.host_pool().hit_tokens(), got.usage.cached_tokens());
      hits = after.host_pool().hit_tokens();
      known = text.size() + kAnswer - 1;
      text.insert(text.end(), got.tokens.begin(), got.tokens.end());
      const std::vector<uint32_t> more = noise(50 + seed, kTurn);
      text.insert(text.end(), more.begin(), more.end());
    }
    const wire::StatusReply status = daemon.status();
    EXPECT_GT(hits, 1000u);
    EXPECT_EQ(status.host_pool().write(), write);
    EXPECT_GT(status.host_pool().spilled_bytes(), 0u);
    EXPECT_GT(status.host_pool().loaded_bytes(), 0u);
    EXPECT_GT(status.crossed().host(), status.host_pool().loaded_bytes());
    EXPECT_EQ(status.host_pool().entries().used(), 0u);
    EXPECT_EQ(status.worker_restarts() > 0, kill);
    daemon.signal(SIGTERM);
    EXPECT_EQ(daemon.wait_exit(), 0);
    EXPECT_EQ(daemon.leftovers(), "");
  }
};

TEST_P(HostPool, WrittenBackAConversationGoesOnUnderEveryGrouping) { converse("back", false); }
TEST_P(HostPool, WrittenThroughItDoesToo) { converse("through", false); }
TEST_P(HostPool, AndWhenWorkersDie) { converse("back", true); }

INSTANTIATE_TEST_SUITE_P(Models, HostPool, testing::Values("deepseek_v32", "qwen3_moe"),
                         [](const auto& info) { return std::string(info.param); });

TEST(HostPoolOptions, OneLargerThanMemoryIsRefusedByName) {
  const auto refused = [](const char* size) {
    Daemon daemon({"--host-pool", size}, std::string(WEFT_GOLDEN_FOLDER) + "/qwen3_moe");
    EXPECT_FALSE(daemon.wait_ready());
    EXPECT_EQ(daemon.wait_exit(), 1);
    EXPECT_EQ(daemon.leftovers(), "");
    return daemon.log();
  };
  EXPECT_THAT(refused("60TiB"),
              testing::AllOf(testing::HasSubstr("--host-pool"), testing::HasSubstr("60.0 TiB"),
                             testing::HasSubstr("available")));
  EXPECT_THAT(refused("100"),
              testing::AllOf(testing::HasSubstr("--host-pool"), testing::HasSubstr("one block")));
}

}  // namespace
}  // namespace weft::integration
