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

// Pages under so many rows, and under two more that plans in flight may have added.
void expect_whole_copies(const wire::Trace& trace, uint64_t rows, const wire::PoolStatus& pool) {
  const auto pages = [](uint64_t count) { return (count + 63) / 64; };
  ASSERT_EQ(trace.stored_size(), 4);
  for (const wire::RankStored& rank : trace.stored()) {
    EXPECT_GE(rank.entries(), pages(rows) * pool.entries().page_bytes());
    EXPECT_LE(rank.entries(), pages(rows + 2) * pool.entries().page_bytes());
    EXPECT_GE(rank.index_keys(), pages(rows) * pool.index_keys().page_bytes());
    EXPECT_LE(rank.index_keys(), pages(rows + 2) * pool.index_keys().page_bytes());
  }
}

TEST(Accounting, EveryEndingSaysWhatWasStored) {
  Daemon daemon(kFour);
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  const auto pool = daemon.status().pools(0);
  auto request = text_request(prompt_with_fact(3000, "Vega-7c41", "20586"), 4000);
  request.set_ignore_eos(true);
  uint64_t id = 0;
  const auto rows_of = [](const wire::Usage& usage) {
    return usage.prompt_tokens() + usage.completion_tokens() - 1;
  };
  client::StreamHandlers handlers;
  handlers.accepted = [&](const wire::Accepted& accepted) { id = accepted.request(); };
  {
    client::Client client = daemon.client();
    std::optional<uint32_t> stop;
    handlers.token = [&](const wire::TokenEvent& event) {
      if (event.index() == 20) {
        stop = event.token();
        EXPECT_TRUE(client.send_cancel(id));
      }
    };
    const Answer cancelled = run_request(client, request, handlers);
    EXPECT_EQ(cancelled.finished.reason(), "cancelled");
    expect_whole_copies(cancelled.finished.trace(), rows_of(cancelled.finished.usage()), pool);

    handlers.token = {};
    request.add_stop_tokens(stop.value());
    const Answer stopped = run_request(client, request, handlers);
    EXPECT_EQ(stopped.finished.reason(), "stop");
    expect_whole_copies(stopped.finished.trace(), rows_of(stopped.finished.usage()), pool);
    request.clear_stop_tokens();

    const uint64_t tag = client.start(request).value();
    for (bool begun = false; !begun;) {
      auto reply = client.next(tag, kPatience);
      ASSERT_TRUE(reply.has_value()) << reply.error().text();
      if (reply->has_accepted()) id = reply->accepted().request();
      begun = reply->has_token();
    }
  }  // gone in mid-stream
  ASSERT_TRUE(wait_until([&] { return daemon.status().running() == 0; }));
  wire::ControlRequest list;
  list.mutable_requests()->set_all(true);
  const wire::RequestsReply all = daemon.control(list).requests();
  ASSERT_EQ(all.requests_size(), 3);
  for (const wire::RequestStatus& ended : all.requests()) {
    EXPECT_GE(ended.computed_tokens(), ended.prompt_tokens() + ended.completion_tokens() - 1);
    EXPECT_EQ(ended.cached_tokens() > 0, ended.request() != all.requests(0).request());
  }
  wire::ControlRequest explain;
  explain.mutable_explain()->set_request(id);
  const wire::ExplainReply left = daemon.control(explain).explain();
  EXPECT_EQ(left.status().state(), "cancelled");
  expect_whole_copies(left.trace(), left.status().prompt_tokens() + left.status().completion_tokens() - 1,
                      pool);
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
