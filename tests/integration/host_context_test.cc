// Goal: a context larger than all device pools together decodes with the tokens and the bits of one that lies
// on the devices, also when a worker dies on the way; what was read from the host is shown, and what cannot
// be is refused by name. Method: real processes; a daemon with small pools beside one with large ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <map>

#include "proto/vocab/random.h"
#include "tests/integration/harness.h"

namespace weft::integration {
namespace {

constexpr int64_t kPrompt = 405, kAnswer = 30;

struct Answer {
  std::vector<uint32_t> tokens;
  std::map<uint64_t, std::string> digests;
  wire::Finished end;
};

wire::GenerateRequest request_of(const std::string& decode, const std::string& context,
                                 int64_t prompt = kPrompt) {
  wire::GenerateRequest request;
  SplitMix64 random(7);
  for (int64_t i = 0; i < prompt; ++i)
    request.mutable_tokens()->add_ids(static_cast<uint32_t>(random.below(160)));
  request.set_max_tokens(kAnswer);
  request.set_ignore_eos(true);
  request.set_prefill("zigzag");
  request.set_decode(decode);
  request.set_context(context);
  request.set_digest(true);
  return request;
}

Answer run(Daemon& daemon, const wire::GenerateRequest& request, const std::function<void()>& answered = {}) {
  Answer out;
  client::Client client = daemon.client();
  const uint64_t tag = client.start(request).value();
  for (;;) {
    const wire::ClientReply reply = client.next(tag, kPatience).value();
    if (reply.has_digest()) out.digests[reply.digest().position()] = reply.digest().sha256();
    if (reply.has_token()) out.tokens.push_back(reply.token().token());
    if (reply.has_token() && out.tokens.size() == 5 && answered) answered();
    if (!reply.has_finished()) continue;
    out.end = reply.finished();
    return out;
  }
}

std::vector<std::string> with_pools(std::vector<std::string> more) {
  std::vector<std::string> all = {"--workers",       "4",  "--block-tokens", "8",   "--max-context", "512",
                                  "--max-step-rows", "64", "--cache-dtype",  "bf16"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

class HostContext : public testing::TestWithParam<const char*> {
 protected:
  static std::string model() { return std::string(WEFT_GOLDEN_FOLDER) + "/" + GetParam(); }
};

TEST_P(HostContext, LargerThanAllDevicePoolsItHasTheSameBits) {
  Daemon large(with_pools({"--pool-tokens", "512"}), model());
  ASSERT_TRUE(large.wait_ready()) << large.log();
  const Answer expected = run(large, request_of("tp", "device"));
  ASSERT_EQ(expected.end.reason(), "length") << expected.end.error().message();
  EXPECT_EQ(expected.end.trace().context(), "device");
  large.signal(SIGTERM);
  EXPECT_EQ(large.wait_exit(), 0);

  // All pools together hold entries of 384 tokens.
  Daemon daemon(with_pools({"--pool-tokens", "96", "--index-pool-tokens", "1024", "--host-pool", "64MiB",
                            "--hot-tokens", "32"}),
                model());
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  uint64_t hits = 0;
  bool first = true;
  for (const char* decode : {"tp", "dcp(4)", "dp", "dcp(2)", "dp(2)xdcp(2)"}) {
    for (const bool kill : {false, true}) {
      SCOPED_TRACE(std::string(decode) + (kill ? ", with a kill" : ""));
      wire::GenerateRequest request = request_of(decode, "auto");
      request.set_index(kill ? "split" : "copied");
      const Answer got = run(daemon, request, [&] {
        if (kill) ::kill(static_cast<pid_t>(daemon.workers().at(1).pid()), SIGKILL);
      });
      ASSERT_EQ(got.end.reason(), "length") << got.end.error().message();
      EXPECT_EQ(got.tokens, expected.tokens);
      const uint64_t cached = got.end.usage().cached_tokens();
      EXPECT_EQ(cached, first ? 0u : 400u) << "copies are kept, and index keys come back from them";
      first = false;
      for (const auto& [position, digest] : expected.digests) {
        if (position < cached) continue;
        const auto found = got.digests.find(position);
        ASSERT_NE(found, got.digests.end()) << position;
        EXPECT_EQ(found->second, digest) << "position " << position;
      }
      EXPECT_EQ(got.end.trace().context(), "host");
      EXPECT_GT(got.end.trace().hot_misses(), 0u);
      EXPECT_GT(got.end.trace().decode_crossed().host(), 0u);
      hits += got.end.trace().hot_hits();
    }
  }
  EXPECT_GT(hits, 0u);
  const wire::HostPoolStatus pool = daemon.status().host_pool();
  EXPECT_EQ(pool.hot_hits(), hits);
  EXPECT_EQ(pool.context_requests(), 0u);
  EXPECT_EQ(pool.entries().used(), 0u);
  EXPECT_EQ(daemon.log().find("repeat_differs"), std::string::npos);
  daemon.signal(SIGTERM);
  EXPECT_EQ(daemon.wait_exit(), 0);
  EXPECT_EQ(daemon.leftovers(), "");
}

INSTANTIATE_TEST_SUITE_P(Models, HostContext, testing::Values("deepseek_v32", "glm_moe_dsa"),
                         [](const auto& info) { return std::string(info.param); });

TEST(HostContextRefusals, NameTheLimit) {
  const std::string sparse = std::string(WEFT_GOLDEN_FOLDER) + "/deepseek_v32";
  Daemon daemon(with_pools({"--pool-tokens", "96", "--index-pool-tokens", "1024", "--host-pool", "100KiB"}),
                sparse);
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  const auto failure = [](Daemon& of, const wire::GenerateRequest& request) {
    return run(of, request).end.error();
  };
  wire::WireError error = failure(daemon, request_of("tp", "auto"));
  EXPECT_EQ(error.code(), wire::ERROR_TOO_LARGE);
  EXPECT_THAT(error.message(), testing::HasSubstr("blocks of the host pool, which has"));
  error = failure(daemon, request_of("tp", "device"));
  EXPECT_EQ(error.code(), wire::ERROR_TOO_LARGE);
  EXPECT_THAT(error.message(), testing::Not(testing::HasSubstr("host pool")));
  wire::GenerateRequest uncached = request_of("tp", "host", 20);
  uncached.set_no_prefix_cache(true);
  error = failure(daemon, uncached);
  EXPECT_EQ(error.code(), wire::ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(error.field(), "context");

  Daemon dense(with_pools({"--pool-tokens", "96", "--host-pool", "1MiB"}),
               std::string(WEFT_GOLDEN_FOLDER) + "/qwen3_moe");
  ASSERT_TRUE(dense.wait_ready()) << dense.log();
  error = failure(dense, request_of("tp", "host", 20));
  EXPECT_EQ(error.code(), wire::ERROR_UNSUPPORTED);
  EXPECT_EQ(error.field(), "context");
}

TEST(HostContextOptions, ThatMeanNothingAreRefused) {
  const auto refused = [](std::vector<std::string> arguments, const char* model) {
    Daemon daemon(with_pools(std::move(arguments)), std::string(WEFT_GOLDEN_FOLDER) + "/" + model);
    EXPECT_FALSE(daemon.wait_ready());
    EXPECT_NE(daemon.wait_exit(), 0);
    return daemon.log();
  };
  EXPECT_THAT(refused({"--hot-tokens", "8"}, "deepseek_v32"), testing::HasSubstr("--host-pool"));
  EXPECT_THAT(refused({"--hot-tokens", "8", "--host-pool", "1MiB"}, "qwen3_moe"),
              testing::HasSubstr("indexer"));
  EXPECT_THAT(refused({"--index-pool-tokens", "64"}, "qwen3_moe"), testing::HasSubstr("indexer"));
}

}  // namespace
}  // namespace weft::integration
