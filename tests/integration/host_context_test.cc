// Goal: a context larger than all device pools together decodes with the tokens and the bits of one that lies
// on the devices, also when a worker dies on the way; what was read from the host is shown, and what cannot
// be is refused by name. Method: real processes; a daemon with small pools beside one with large ones.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "proto/vocab/random.h"
#include "tests/integration/harness.h"
#include "tests/support/temp_folder.h"

namespace weft::integration {
namespace {

constexpr int64_t kPrompt = 405, kAnswer = 30;

struct Answer {
  uint64_t request = 0;
  std::vector<uint32_t> tokens;
  std::map<uint64_t, std::string> digests;
  wire::Finished end;
};

wire::GenerateRequest request_of(const std::string& decode, const std::string& context,
                                 int64_t prompt = kPrompt) {
  wire::GenerateRequest request;
  SplitMix64 random(7);
  for (int64_t i = 0; i < prompt; ++i)
    request.mutable_tokens()->add_ids(static_cast<uint32_t>(random.below(128)));
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
    if (reply.has_accepted()) out.request = reply.accepted().request();
    if (reply.has_digest()) out.digests[reply.digest().position()] = reply.digest().sha256();
    if (reply.has_token()) out.tokens.push_back(reply.token().token());
    if (reply.has_token() && out.tokens.size() == 5 && answered) answered();
    if (!reply.has_finished()) continue;
    out.end = reply.finished();
    return out;
  }
}

// Under every grouping explain says no more of it than the pools have; of index keys as much as of any other
// context.
void expect_costs_to_fit(Daemon& daemon, uint64_t id) {
  wire::ControlRequest explain;
  explain.mutable_explain()->set_request(id);
  const wire::ExplainReply explained = daemon.control(explain).explain();
  const wire::StatusReply status = daemon.status();
  EXPECT_GT(explained.costs_size(), 5);
  for (const wire::GroupingCost& cost : explained.costs()) {
    uint64_t entries = 0, index_keys = 0;
    for (const wire::RankStored& stored : cost.stored()) {
      const wire::PoolStatus& pool = status.pools(static_cast<int>(stored.rank()));
      EXPECT_LE(stored.entries(), pool.entries().pages() * pool.entries().page_bytes()) << cost.decode();
      entries += stored.entries();
      index_keys += stored.index_keys();
    }
    EXPECT_GT(entries, 0u);
    EXPECT_GE(index_keys, (kPrompt + kAnswer) / 8 * status.pools(0).index_keys().page_bytes());
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
      expect_costs_to_fit(daemon, got.request);
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

// A copy of the model whose rows select so many entries: those before are dense.
std::string with_topk(const std::string& model, int64_t topk, const test::TempFolder& folder) {
  const std::filesystem::path copy = std::filesystem::path(folder.path()) / "model";
  std::filesystem::copy(model, copy);
  std::ifstream in(copy / "config.json");
  nlohmann::json config = nlohmann::json::parse(in);
  config["index_topk"] = topk;
  std::ofstream(copy / "config.json") << config;
  return copy;
}

// Chunks of 64 rows, of which the second one still reads all it sees. This form promises no bits, but the
// same chunks give the same.
TEST_P(HostContext, ChunksOverExpandedKeysReadThemFromTheHost) {
  const test::TempFolder folder;
  const std::string dense = with_topk(model(), 128, folder);
  wire::GenerateRequest request = request_of("dcp(4)", "device");
  request.set_mechanisms("context=pass-kv,form=expanded");
  Daemon large(with_pools({"--pool-tokens", "512"}), dense);
  ASSERT_TRUE(large.wait_ready()) << large.log();
  const Answer expected = run(large, request);
  ASSERT_EQ(expected.end.reason(), "length") << expected.end.error().message();
  request.set_mechanisms("context=pass-kv,form=absorbed");
  EXPECT_NE(run(large, request).digests, expected.digests);

  Daemon daemon(with_pools({"--pool-tokens", "128", "--index-pool-tokens", "1024", "--host-pool", "64MiB"}),
                dense);
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  request.set_mechanisms("context=pass-kv,form=expanded");
  request.set_context("host");
  const Answer got = run(daemon, request);
  ASSERT_EQ(got.end.reason(), "length") << got.end.error().message();
  EXPECT_EQ(got.tokens, expected.tokens);
  EXPECT_EQ(got.digests, expected.digests);
  EXPECT_GT(got.end.trace().prefill_crossed().host(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Models, HostContext, testing::Values("deepseek_v32", "glm_moe_dsa"),
                         [](const auto& info) { return std::string(info.param); });

// What further guesses find in a hot buffer counts for their own request, whoever else is in the step.
TEST(HostContextDrafts, AreCountedForTheirOwnRequest) {
  Daemon daemon(with_pools({"--pool-tokens", "400", "--index-pool-tokens", "1024", "--host-pool", "16MiB",
                            "--hot-tokens", "32", "--speculative", "mtp", "--draft-tokens", "3"}),
                std::string(WEFT_GOLDEN_FOLDER) + "/glm_moe_dsa_sure_draft");
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  wire::GenerateRequest first = request_of("dcp(4)", "device", 60);
  first.set_speculative("off");
  first.set_max_tokens(300);
  Answer drafting;
  const Answer beside = run(daemon, first, [&] {
    wire::GenerateRequest second = request_of("dcp(4)", "host", 100);
    second.set_max_tokens(20);
    drafting = run(daemon, second);
  });
  ASSERT_EQ(drafting.end.reason(), "length") << drafting.end.error().message();
  EXPECT_GT(drafting.end.trace().drafted_tokens(), 0u);
  EXPECT_GT(drafting.end.trace().hot_hits(), 0u);
  ASSERT_EQ(beside.end.reason(), "length") << beside.end.error().message();
  EXPECT_EQ(beside.end.trace().context(), "device");
  EXPECT_EQ(beside.end.trace().hot_hits() + beside.end.trace().hot_misses(), 0u);
}

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
