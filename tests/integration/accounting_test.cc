// What a daemon keeps: cache bytes per rank by grouping, and no descriptor more than before.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>

#include "tests/integration/harness.h"

namespace weft::integration {
namespace {

const std::vector<std::string> kFour = {"--workers", "4", "--max-step-rows", "256", "--pool-tokens", "32768"};

Answer run_decode(client::Client& client, const char* decode, const char* index) {
  auto request = text_request(prompt_with_fact(3000, "Vega-7c41", "20586"), 8);
  request.set_decode(decode);
  request.set_index(index);
  request.set_no_prefix_cache(true);
  return run_request(client, request);
}

TEST(Accounting, DcpOfFourStoresAQuarterPerRank) {
  Daemon daemon(kFour);
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  client::Client client = daemon.client();
  const Answer whole = run_decode(client, "tp", "copied");
  const Answer quarter = run_decode(client, "dcp(4)", "copied");
  const Answer split = run_decode(client, "dcp(4)", "split");
  ASSERT_EQ(whole.finished.trace().stored_size(), 4);
  ASSERT_EQ(quarter.finished.trace().stored_size(), 4);
  ASSERT_EQ(split.finished.trace().stored_size(), 4);
  const auto pool = daemon.status().pools(0);
  const auto entry_page = static_cast<double>(pool.entries().page_bytes());
  const auto index_page = static_cast<double>(pool.index_keys().page_bytes());
  for (int rank = 0; rank < 4; ++rank) {
    const auto& all = whole.finished.trace().stored(rank);
    EXPECT_GT(all.entries(), 40 * pool.entries().page_bytes());
    const double entries = static_cast<double>(all.entries()) / 4,
                 keys = static_cast<double>(all.index_keys()) / 4;
    EXPECT_NEAR(static_cast<double>(quarter.finished.trace().stored(rank).entries()), entries, entry_page);
    EXPECT_EQ(quarter.finished.trace().stored(rank).index_keys(), all.index_keys());  // copied
    EXPECT_NEAR(static_cast<double>(split.finished.trace().stored(rank).entries()), entries, entry_page);
    EXPECT_NEAR(static_cast<double>(split.finished.trace().stored(rank).index_keys()), keys, index_page);
  }
  EXPECT_EQ(quarter.tokens, whole.tokens);
  EXPECT_EQ(split.tokens, whole.tokens);
}

size_t descriptors_of(pid_t pid) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd")) {
    ++count;
  }
  return count;
}

TEST(Accounting, NoDescriptorIsLeftByClientsOrWorkersThatWentAway) {
  Daemon daemon(kFour);
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  {
    client::Client client = daemon.client();  // whatever opens once is open now
    (void)run_decode(client, "tp", "copied");
  }
  const pid_t pid = daemon.pid();
  size_t before = 0;
  ASSERT_TRUE(wait_until([&] {
    const size_t now = descriptors_of(pid);
    const bool settled = now == before;
    before = now;
    return settled;
  }));
  for (int i = 0; i < 8; ++i) {
    client::Client client = daemon.client();
    if (i % 2 == 0) {
      EXPECT_FALSE(run_decode(client, "dcp(4)", "split").failure.has_value());
    } else {  // gone in mid-stream
      auto request = text_request(prompt_with_fact(3000, "Vega-7c41", "20586"), 200);
      (void)client.start(request).value();
    }
    if (i == 4) {
      const auto workers = daemon.workers();
      ASSERT_EQ(::kill(static_cast<pid_t>(workers[1].pid()), SIGKILL), 0);
    }
  }
  EXPECT_TRUE(wait_until([&] { return daemon.status().running() == 0 && descriptors_of(pid) <= before; }))
      << descriptors_of(pid) << " descriptors, " << before << " before";
  daemon.signal(SIGTERM);
  EXPECT_EQ(daemon.wait_exit(), 0);
  EXPECT_EQ(daemon.leftovers(), "");
}

}  // namespace
}  // namespace weft::integration
