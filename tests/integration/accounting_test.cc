// What a daemon keeps: cache bytes per rank by grouping, and no descriptor more than before.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
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
  const wire::StatusReply status = daemon.status();
  EXPECT_EQ(status.finished(), 1u);
  EXPECT_EQ(status.cancelled(), 2u);
  EXPECT_EQ(status.failed(), 0u);
  EXPECT_EQ(status.computed_prompt_tokens() + status.cached_tokens(), status.prompt_tokens());
}

// A prompt that is cancelled half way counts with what was computed.
TEST(Accounting, ACancelledPromptCountsAsFarAsItWasComputed) {
  Daemon daemon({"--workers", "4", "--max-step-rows", "64", "--pool-tokens", "32768"});
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  client::Client client = daemon.client();
  uint64_t id = 0;
  client::StreamHandlers handlers;
  handlers.accepted = [&](const wire::Accepted& accepted) { id = accepted.request(); };
  handlers.progress = [&](const wire::PrefillProgress&) { EXPECT_TRUE(client.send_cancel(id)); };
  const Answer cancelled =
      run_request(client, text_request(prompt_with_fact(28000, "Vega-7c41", "20586"), 4), handlers);
  EXPECT_EQ(cancelled.finished.reason(), "cancelled");
  const wire::Usage& usage = cancelled.finished.usage();
  EXPECT_GT(usage.computed_tokens(), 0u);
  EXPECT_LT(usage.computed_tokens(), usage.prompt_tokens());
  EXPECT_EQ(daemon.status().computed_prompt_tokens(), usage.computed_tokens());
  EXPECT_EQ(daemon.status().cancelled(), 1u);
}

// What explain says of each way to exchange is what the trace of a request that had it counts.
TEST(Accounting, ExplainKnowsWhatEachMechanismMoves) {
  Daemon daemon(kFour);
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  client::Client client = daemon.client();
  const auto run_with = [&](const char* mechanisms, wire::ExplainReply& explained) {
    uint64_t id = 0;
    client::StreamHandlers handlers;
    handlers.accepted = [&](const wire::Accepted& accepted) { id = accepted.request(); };
    auto request = text_request(prompt_with_fact(1000, "Vega-7c41", "20586"), 30);
    request.set_ignore_eos(true);
    request.set_decode("dcp(4)");
    request.set_mechanisms(mechanisms);
    const Answer answer = run_request(client, request, handlers);
    EXPECT_FALSE(answer.failure.has_value());
    wire::ControlRequest explain;
    explain.mutable_explain()->set_request(id);
    explained = daemon.control(explain).explain();
    return answer.finished.trace();
  };
  wire::ExplainReply plain, other;
  const wire::Trace gathered = run_with("", plain),
                    replicated = run_with("query=replicated,partials=tree", other);
  ASSERT_EQ(gathered.decodes_size(), 1);
  ASSERT_EQ(replicated.decodes_size(), 1);
  EXPECT_EQ(gathered.decodes(0).mechanisms(), "");
  EXPECT_EQ(replicated.decodes(0).mechanisms(), "query=replicated,partials=tree");
  EXPECT_EQ(replicated.mechanisms(), "query=replicated,partials=tree");
  EXPECT_GT(gathered.decode_crossed().queries(), 0u);
  EXPECT_EQ(replicated.decode_crossed().queries(), 0u);
  const auto line = [](const wire::ExplainReply& reply, const std::string& name) {
    for (const wire::MechanismCost& cost : reply.mechanisms()) {
      if (cost.mechanism() == name) return cost;
    }
    ADD_FAILURE() << name << " is not told\n" << reply.ShortDebugString();
    return wire::MechanismCost{};
  };
  // Asked and not asked for; per step as counted.
  EXPECT_TRUE(line(plain, "query=gathered").present());
  EXPECT_FALSE(line(plain, "query=replicated").present());
  EXPECT_TRUE(line(other, "query=replicated").present());
  EXPECT_EQ(line(plain, "query=gathered").per_step().queries() * gathered.decode_steps(),
            gathered.decode_crossed().queries());
  EXPECT_EQ(line(other, "partials=tree").per_step().partials() * replicated.decode_steps(),
            replicated.decode_crossed().partials());
  EXPECT_EQ(line(plain, "query=replicated").per_step().queries(), 0u);
  EXPECT_LT(line(plain, "query=replicated").exchanges(), line(plain, "query=gathered").exchanges());
  EXPECT_GT(line(plain, "partials=tree").exchanges(), line(plain, "partials=all-to-all").exchanges());
  for (const char* name : {"prefill=zigzag", "prefill=contiguous", "context=pass-kv", "fetch=copies"}) {
    EXPECT_EQ(line(plain, name).phase(), "prefill");
  }
}

// A request that changes its grouping five times: each keeps what it cost, together they are the whole, and
// what was announced is what moved.
TEST(Accounting, EveryGroupingOfARequestKeepsItsFigures) {
  Daemon daemon(kFour);
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  client::Client client = daemon.client();
  const std::pair<const char*, const char*> route[] = {
      {"dcp(4)", "split"}, {"tp", "copied"}, {"dp", "copied"}, {"dcp(2)", "copied"}, {"tp", "copied"}};
  uint64_t id = 0, announced = 0, largest = 0;
  client::StreamHandlers handlers;
  handlers.accepted = [&](const wire::Accepted& accepted) { id = accepted.request(); };
  handlers.token = [&](const wire::TokenEvent& event) {
    if (event.index() % 20 != 10 || event.index() > 90) return;
    wire::ControlRequest regroup;
    regroup.mutable_regroup()->add_requests(id);
    regroup.mutable_regroup()->set_decode(route[event.index() / 20].first);
    regroup.mutable_regroup()->set_index(route[event.index() / 20].second);
    const auto reply = daemon.control(regroup);
    ASSERT_EQ(reply.regroup().outcomes_size(), 1) << reply.ShortDebugString();
    ASSERT_FALSE(reply.regroup().outcomes(0).has_error()) << reply.ShortDebugString();
    announced += reply.regroup().outcomes(0).bytes_moved();
    largest = std::max(largest, reply.regroup().outcomes(0).bytes_moved());
  };
  auto request = text_request(prompt_with_fact(2000, "Vega-7c41", "20586"), 200);
  request.set_ignore_eos(true);
  request.set_credit(4);  // never far ahead of the changes
  const Answer answer = run_request(client, request, handlers);
  ASSERT_FALSE(answer.failure.has_value()) << answer.failure->text();
  const wire::Trace& trace = answer.finished.trace();
  EXPECT_EQ(trace.regroups(), 5u);
  EXPECT_EQ(trace.regroup_bytes(), announced);
  EXPECT_GT(announced, largest) << "more than one of them moved something";
  EXPECT_FALSE(trace.change_waits());
  ASSERT_EQ(trace.prefill_ran_size(), 1);
  EXPECT_EQ(trace.prefill_ran(0), "zigzag");
  ASSERT_EQ(trace.decodes_size(), 6);
  uint64_t steps = 0, tokens = 0, time = 0, regrouped = 0, rows = 0;
  for (int i = 0; i < 6; ++i) {
    const wire::DecodeTrace& line = trace.decodes(i);
    EXPECT_EQ(line.decode(), i == 0 ? "tp" : route[i - 1].first);
    EXPECT_EQ(line.index(), i == 0 ? "copied" : route[i - 1].second);
    EXPECT_GT(line.tokens(), 0u) << i;
    EXPECT_GT(line.time_ns(), 0u) << i;
    EXPECT_EQ(line.crossed().partials() > 0, line.decode().starts_with("dcp")) << i;
    steps += line.steps();
    tokens += line.tokens();
    time += line.time_ns();
    regrouped += line.crossed().regroup();
    rows += line.crossed().rows();
  }
  EXPECT_EQ(steps, trace.decode_steps());
  EXPECT_EQ(tokens, answer.finished.usage().completion_tokens() - 1);
  EXPECT_EQ(time, trace.decode_ns());
  EXPECT_EQ(regrouped, announced);
  EXPECT_EQ(rows, trace.decode_crossed().rows());

  wire::ControlRequest explain;
  explain.mutable_explain()->set_request(id);
  const wire::ExplainReply explained = daemon.control(explain).explain();
  for (const wire::GroupingCost& cost : explained.costs()) {
    const auto ran = [&](const auto& line) {
      return line.decode() == cost.decode() && line.index() == cost.index();
    };
    EXPECT_EQ(cost.step_ns() > 0, std::any_of(trace.decodes().begin(), trace.decodes().end(), ran))
        << cost.ShortDebugString();
    EXPECT_FALSE(cost.present());
  }
  // Too short to be split, whatever was asked.
  const Answer brief = run_request(client, text_request("abc", 1));
  EXPECT_EQ(brief.finished.trace().prefill(), "zigzag");
  ASSERT_EQ(brief.finished.trace().prefill_ran_size(), 1);
  EXPECT_EQ(brief.finished.trace().prefill_ran(0), "none");
  EXPECT_EQ(brief.finished.trace().decodes_size(), 0);
}

TEST(Accounting, ADryRunOfDefaultsSaysWhatTheyWouldBe) {
  Daemon daemon(kFour);
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  wire::ControlRequest regroup;
  regroup.mutable_regroup()->set_defaults(true);
  regroup.mutable_regroup()->set_dry_run(true);
  regroup.mutable_regroup()->set_decode("dcp(2)");
  EXPECT_EQ(daemon.control(regroup).regroup().decode(), "dcp(2)");
  EXPECT_EQ(daemon.status().decode(), "tp");
  regroup.mutable_regroup()->set_dry_run(false);
  EXPECT_EQ(daemon.control(regroup).regroup().decode(), "dcp(2)");
  EXPECT_EQ(daemon.status().decode(), "dcp(2)");
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
