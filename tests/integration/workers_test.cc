// Goal: workers come and go under load, by command and by kill -9 in the middle of it, and every stream gives
// the tokens and the logits that it gives alone on workers that stay. Method: one daemon; each request alone
// first; then all at once, with the changes between their tokens.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <functional>
#include <set>
#include <thread>

#include "tests/integration/harness.h"

namespace weft::integration {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> arguments(const char* workers, const char* most) {
  return {"--workers",       workers, "--max-workers", most,   "--threads-per-worker", "1",
          "--max-step-rows", "512",   "--pool-tokens", "40960"};
}

std::vector<wire::GenerateRequest> requests(uint32_t max_tokens) {
  std::vector<wire::GenerateRequest> all;
  for (const char* decode : {"tp", "dcp(4)", "dcp(2)", "dp", "dp(2)xdcp(2)"}) {
    auto request = text_request(prompt_with_fact(2000 + 900 * all.size(), "Vega-7c41", "20586"), max_tokens);
    request.set_decode(decode);
    request.set_index(all.size() % 2 == 0 ? "copied" : "split");
    request.set_no_prefix_cache(true);
    request.set_ignore_eos(true);
    request.set_digest(true);
    all.push_back(request);
  }
  return all;
}

struct Stream {
  uint64_t tag = 0, id = 0;
  std::vector<uint32_t> tokens;
  std::map<uint64_t, std::string> digests;
  std::string reason;
};

// Reads one stream until it has so many tokens, or has ended.
void read(client::Client& client, Stream& stream, size_t tokens) {
  while (stream.reason.empty() && stream.tokens.size() < tokens) {
    auto reply = client.next(stream.tag, kPatience);
    ASSERT_TRUE(reply.has_value()) << reply.error().text();
    if (reply->has_accepted()) stream.id = reply->accepted().request();
    if (reply->has_digest()) stream.digests[reply->digest().position()] = reply->digest().sha256();
    if (reply->has_finished()) stream.reason = reply->finished().reason();
    if (!reply->has_token()) continue;
    EXPECT_EQ(reply->token().index(), stream.tokens.size());
    stream.tokens.push_back(reply->token().token());
  }
}

std::vector<Stream> run_alone(client::Client& client, const std::vector<wire::GenerateRequest>& all) {
  std::vector<Stream> streams;
  for (const auto& request : all) {
    Stream& stream = streams.emplace_back();
    stream.tag = client.start(request).value();
    read(client, stream, SIZE_MAX);
    EXPECT_EQ(stream.reason, "length");
  }
  return streams;
}

std::vector<Stream> start_all(client::Client& client, const std::vector<wire::GenerateRequest>& all,
                              uint32_t credit) {
  std::vector<Stream> streams;
  for (auto request : all) {
    request.set_credit(credit);
    streams.emplace_back().tag = client.start(request).value();
  }
  return streams;
}

void expect_equal(const std::vector<Stream>& streams, const std::vector<Stream>& alone) {
  for (size_t i = 0; i < streams.size(); ++i) {
    EXPECT_EQ(streams[i].reason, "length") << i;
    EXPECT_EQ(streams[i].tokens, alone[i].tokens) << i;
    EXPECT_EQ(streams[i].digests, alone[i].digests) << i;
  }
}

wire::ControlRequest drain(uint32_t rank) {
  wire::ControlRequest request;
  request.mutable_drain()->set_rank(rank);
  return request;
}
wire::ControlRequest remove_worker(uint32_t rank) {
  wire::ControlRequest request;
  request.mutable_remove_worker()->set_rank(rank);
  return request;
}
wire::ControlRequest add_rank(uint32_t rank) {
  wire::ControlRequest request;
  request.mutable_add_worker()->set_rank(rank);
  return request;
}
wire::ControlRequest add_device(const char* device) {
  wire::ControlRequest request;
  request.mutable_add_worker()->set_device(device);
  return request;
}

std::vector<uint32_t> active(const wire::ControlReply& reply) {
  EXPECT_TRUE(reply.has_topology()) << reply.DebugString();
  return {reply.topology().active().begin(), reply.topology().active().end()};
}

uint64_t pages_used(Daemon& daemon, uint32_t rank) {
  const wire::StatusReply status = daemon.status();
  for (const auto& pool : status.pools()) {
    if (pool.rank() == rank) return pool.entries().pages() - pool.entries().free();
  }
  return 0;
}

std::vector<std::string> history(Daemon& daemon) {
  wire::ControlRequest request;
  request.mutable_history();
  const wire::ControlReply reply = daemon.control(request);
  std::vector<std::string> lines;
  for (const auto& line : reply.history().lines()) {
    lines.push_back(line.what() + ": " + line.outcome());
  }
  return lines;
}

void stop_well(Daemon& daemon) {
  EXPECT_EQ(daemon.log().find("repeat_differs"), std::string::npos);
  daemon.signal(SIGTERM);
  EXPECT_EQ(daemon.wait_exit(), 0);
  EXPECT_EQ(daemon.leftovers(), "");
}

// Streams stand still, by their credit, while the ranks change: every one has moved when it goes on.
TEST(Workers, DrainedAndBroughtBackBetweenTokens) {
  Daemon daemon(arguments("4", "4"));
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  const auto all = requests(60);
  const auto alone = run_alone(client, all);
  constexpr uint32_t kCredit = 8;
  auto streams = start_all(client, all, kCredit);
  struct Turn {
    wire::ControlRequest request;
    std::vector<uint32_t> active;
  };
  const std::vector<Turn> turns = {
      {drain(3), {0, 1, 2}}, {drain(1), {0, 2}},    {add_rank(3), {0, 2, 3}}, {drain(0), {2, 3}},
      {drain(2), {3}},       {add_rank(0), {0, 3}}, {add_rank(1), {0, 1, 3}}, {add_rank(2), {0, 1, 2, 3}}};
  uint32_t epoch = daemon.status().epoch();
  size_t tokens = 0;
  for (const Turn& turn : turns) {
    tokens += kCredit - 1;
    for (Stream& stream : streams) read(client, stream, tokens);
    const wire::ControlReply reply = daemon.control(turn.request);
    EXPECT_THAT(active(reply), turn.active);
    EXPECT_EQ(reply.topology().sequences_moved() > 0, reply.topology().bytes_moved() > 0);
    EXPECT_EQ(reply.topology().epoch(), ++epoch);
    if (turn.request.has_drain()) {
      EXPECT_GT(reply.topology().bytes_moved(), 0u);
      EXPECT_EQ(pages_used(daemon, turn.request.drain().rank()), 0u);
    }
    for (Stream& stream : streams) EXPECT_TRUE(client.grant(stream.id, kCredit - 1));
  }
  for (Stream& stream : streams) EXPECT_TRUE(client.grant(stream.id, 60));
  for (Stream& stream : streams) read(client, stream, SIZE_MAX);
  expect_equal(streams, alone);
  EXPECT_EQ(daemon.status().worker_restarts(), 0u);
  const auto lines = history(daemon);
  ASSERT_EQ(lines.size(), turns.size());
  EXPECT_THAT(lines[0], HasSubstr("drain 3: ok: ranks 0, 1, 2, moved "));
  EXPECT_THAT(lines[7], HasSubstr("workers add --rank 2: ok: ranks 0, 1, 2, 3, moved "));
  stop_well(daemon);
}

// Nobody waits for anybody: prompts are read and tokens drawn while the ranks change.
TEST(Workers, ChangesWhileEverybodyRuns) {
  Daemon daemon(arguments("4", "4"));
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  const auto all = requests(300);
  const auto alone = run_alone(client, all);
  auto streams = start_all(client, all, 0);
  // All have come in: what asks for a grouping that fewer workers cannot have is refused while there are
  // fewer.
  for (Stream& stream : streams) read(client, stream, 1);
  uint64_t moved = 0;
  for (const auto& request : {drain(2), add_rank(2), drain(0), drain(1), add_rank(0), add_rank(1)}) {
    const wire::ControlReply reply = daemon.control(request);
    ASSERT_TRUE(reply.has_topology()) << reply.DebugString();
    moved += reply.topology().sequences_moved();
    read(client, streams[0], streams[0].tokens.size() + 5);
  }
  EXPECT_GT(moved, 0u);
  for (Stream& stream : streams) read(client, stream, SIZE_MAX);
  expect_equal(streams, alone);
  stop_well(daemon);
}

TEST(Workers, NewOnesComeInAndOldOnesGo) {
  Daemon daemon(arguments("2", "3"));
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  auto all = requests(60);
  for (auto& request : all) request.set_decode(&request == &all[0] ? "dcp(2)" : "tp");
  const auto alone = run_alone(client, all);
  constexpr uint32_t kCredit = 10;
  auto streams = start_all(client, all, kCredit);
  const auto go_on = [&](size_t tokens) {
    for (Stream& stream : streams) read(client, stream, tokens);
    for (Stream& stream : streams) EXPECT_TRUE(client.grant(stream.id, kCredit));
  };
  go_on(kCredit);
  EXPECT_THAT(active(daemon.control(add_device("cpu"))), ElementsAre(0, 1, 2));
  EXPECT_EQ(daemon.control(add_device("cpu")).error().code(),
            static_cast<wire::WireErrorCode>(ErrorCode::kResourceExhausted));
  go_on(2 * kCredit);
  const auto before = daemon.workers();
  EXPECT_THAT(active(daemon.control(remove_worker(0))), ElementsAre(1, 2));
  EXPECT_EQ(start_of_process(static_cast<pid_t>(before[0].pid())), 0u);
  EXPECT_EQ(daemon.workers()[0].state(), "down");
  go_on(3 * kCredit);
  EXPECT_THAT(active(daemon.control(drain(1))), ElementsAre(2));
  EXPECT_EQ(daemon.workers()[1].state(), "drained");
  EXPECT_THAT(active(daemon.control(remove_worker(1))), ElementsAre(2));  // already drained: its process ends
  go_on(4 * kCredit);
  EXPECT_THAT(active(daemon.control(add_rank(1))), ElementsAre(1, 2));
  EXPECT_THAT(active(daemon.control(add_device("cpu"))), ElementsAre(0, 1, 2));
  for (Stream& stream : streams) EXPECT_TRUE(client.grant(stream.id, 60));
  for (Stream& stream : streams) read(client, stream, SIZE_MAX);
  expect_equal(streams, alone);
  EXPECT_EQ(daemon.workers().size(), 3u);
  stop_well(daemon);
}

// Any worker, the leaving one too, is killed while the change is under way: it completes, and nothing is
// lost.
TEST(Workers, KilledInTheMiddleOfADrain) {
  Daemon daemon(arguments("4", "4"));
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  const auto all = requests(200);
  const auto alone = run_alone(client, all);
  auto streams = start_all(client, all, 0);
  for (Stream& stream : streams) read(client, stream, 3);
  size_t victim = 0;
  for (const uint32_t rank : {3u, 1u}) {
    for (const auto& request : {drain(rank), add_rank(rank)}) {
      const auto workers = daemon.workers();
      wire::ControlReply reply;
      std::thread changes([&] { reply = daemon.control(request); });
      const auto& killed = workers[victim++ % 2 == 0 ? rank : 0];
      if (killed.pid() != 0) ::kill(static_cast<pid_t>(killed.pid()), SIGKILL);
      changes.join();
      EXPECT_TRUE(reply.has_topology()) << reply.DebugString();
    }
  }
  for (Stream& stream : streams) read(client, stream, SIZE_MAX);
  expect_equal(streams, alone);
  EXPECT_GT(daemon.status().worker_restarts(), 0u);
  EXPECT_EQ(daemon.status().workers(), 4u);
  EXPECT_THAT(history(daemon), testing::Contains(HasSubstr("recovery rank ")));
  stop_well(daemon);
}

// A worker that is not there when it is drained is not waited for.
TEST(Workers, DrainedWhenItIsGone) {
  Daemon daemon(arguments("4", "4"));
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  const auto all = requests(150);
  const auto alone = run_alone(client, all);
  auto streams = start_all(client, all, 0);
  for (const uint32_t rank : {2u, 0u, 3u}) {
    for (Stream& stream : streams) read(client, stream, stream.tokens.size() + 10);
    const auto before = daemon.workers();
    ::kill(static_cast<pid_t>(before[rank].pid()), SIGKILL);
    EXPECT_TRUE(wait_until([&] { return daemon.workers()[rank].pid() != before[rank].pid(); }));
    const wire::ControlReply reply = daemon.control(drain(rank));
    EXPECT_TRUE(reply.has_topology()) << reply.DebugString();
    EXPECT_EQ(daemon.status().workers(), 3u);
    EXPECT_TRUE(wait_until([&] { return daemon.workers()[rank].state() == "drained"; }));
    EXPECT_TRUE(daemon.control(add_rank(rank)).has_topology());
  }
  for (Stream& stream : streams) read(client, stream, SIZE_MAX);
  expect_equal(streams, alone);
  stop_well(daemon);
}

// What lay on one rank is gone with its process: streams go on with the same bits, each token told once.
TEST(Workers, LosesWhatOneRankHeld) {
  ASSERT_EQ(::setenv("WEFT_INJECT_MEMORY_LOSS", "1", 1), 0);
  Daemon daemon(arguments("4", "4"));
  ::unsetenv("WEFT_INJECT_MEMORY_LOSS");
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  auto all = requests(120);
  for (auto& request : all) {
    request.set_no_prefix_cache(false);
    request.set_cache_salt("of its own " + std::to_string(&request - all.data()));
  }
  std::vector<Stream> alone;
  {
    auto undisturbed = all;
    for (auto& request : undisturbed) request.set_no_prefix_cache(true);
    alone = run_alone(client, undisturbed);
  }
  auto streams = start_all(client, all, 0);
  size_t tokens = 10;
  for (const size_t rank : {1u, 3u, 0u}) {
    for (Stream& stream : streams) read(client, stream, tokens);
    tokens += 20;
    ::kill(static_cast<pid_t>(daemon.workers()[rank].pid()), SIGUSR2);
    EXPECT_TRUE(wait_until([&] { return daemon.workers()[rank].restarts() == 1; }));
  }
  for (Stream& stream : streams) read(client, stream, SIZE_MAX);
  expect_equal(streams, alone);
  EXPECT_THAT(daemon.log(), HasSubstr("what it held is lost"));
  stop_well(daemon);
}

TEST(Workers, BadCommandsAreRefusedByName) {
  Daemon daemon(arguments("2", "2"));
  ASSERT_TRUE(daemon.wait_ready());
  const auto refusal = [&](std::vector<std::string> words) {
    words.insert(words.begin(), WEFT_WEFTCTL);
    words.insert(words.end(), {"--state-dir", daemon.folder()});
    const Finished finished = run_program(words);
    EXPECT_NE(finished.exit_code, 0) << words[1];
    return std::to_string(finished.exit_code) + " " + finished.errors;
  };
  EXPECT_THAT(refusal({"drain", "5"}), HasSubstr("4 error: not_found: "));
  EXPECT_THAT(refusal({"workers", "remove", "2"}), HasSubstr("there are 0, 1"));
  EXPECT_THAT(refusal({"workers", "add", "gpu"}),
              HasSubstr("2 error: invalid_argument: device: 'gpu' is not a device"));
  EXPECT_THAT(refusal({"workers", "add", "cpu"}),
              HasSubstr("2 workers are all there may be (weftd --max-workers)"));
  EXPECT_THAT(refusal({"workers", "add", "--rank", "1"}), HasSubstr("worker 1 takes part already"));
  EXPECT_THAT(refusal({"workers", "add", "--rank", "7"}), HasSubstr("4 error: not_found: "));
  EXPECT_THAT(active(daemon.control(drain(1))), ElementsAre(0));
  EXPECT_THAT(refusal({"drain", "1"}), HasSubstr("worker 1 is drained already"));
  EXPECT_THAT(refusal({"drain", "0"}), HasSubstr("worker 0 is the last one that computes"));
  EXPECT_THAT(refusal({"workers", "remove", "0"}), HasSubstr("worker 0 is the last one that computes"));
  // Too large for one worker's pool: what runs decides.
  EXPECT_THAT(active(daemon.control(add_rank(1))), ElementsAre(0, 1));
  auto client = daemon.client();
  auto request = text_request(prompt_with_fact(3000, "Vega-7c41", "20586"), 200);
  request.set_decode("dcp(2)");
  request.set_index("split");
  request.set_ignore_eos(true);
  request.set_credit(2);
  request.set_max_tokens(40000);
  const uint64_t tag = client.start(request).value();
  Stream stream{tag, 0, {}, {}, {}};
  read(client, stream, 2);
  EXPECT_THAT(refusal({"drain", "1"}),
              HasSubstr("5 error: resource_exhausted: rank: request 1 cannot move: "));
  EXPECT_EQ(daemon.status().workers(), 2u);
  EXPECT_TRUE(client.send_cancel(stream.id));
  read(client, stream, SIZE_MAX);
  EXPECT_EQ(stream.reason, "cancelled");
  stop_well(daemon);
}

}  // namespace
}  // namespace weft::integration
