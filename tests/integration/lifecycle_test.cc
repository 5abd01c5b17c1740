// Start, generate under every grouping, stop; and every way to end that is not a plain stop.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>
#include <fstream>

#include "tests/integration/harness.h"

namespace weft::integration {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

const std::vector<std::string> kFour = {"--workers", "4", "--max-step-rows", "256", "--pool-tokens", "32768"};

std::vector<std::string> with(std::vector<std::string> arguments, std::vector<std::string> more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

TEST(Lifecycle, StartGenerateUnderEveryGroupingStop) {
  Daemon daemon(kFour);
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  std::vector<uint32_t> first;
  for (const char* prefill : {"zigzag", "interleave", "none"}) {
    for (const char* decode : {"tp", "dcp(2)", "dcp(4)", "dp"}) {
      auto request = text_request(prompt_with_fact(3000, "Vega-7c41", "20586"), 8);
      request.set_prefill(prefill);
      request.set_decode(decode);
      request.set_no_prefix_cache(true);
      const Answer answer = run_request(client, request);
      ASSERT_FALSE(answer.failure.has_value()) << answer.failure->text();
      EXPECT_THAT(answer.text, StartsWith(" 20586.")) << prefill << " " << decode;
      EXPECT_EQ(answer.finished.reason(), "length");
      EXPECT_EQ(answer.finished.trace().switch_bytes(), 0u) << prefill << " " << decode;
      if (first.empty()) first = answer.tokens;
      EXPECT_EQ(answer.tokens, first);
    }
  }
  const auto status = daemon.status();
  EXPECT_EQ(status.state(), "ready");
  EXPECT_EQ(status.finished(), 12u);
  EXPECT_EQ(status.running(), 0u);
  daemon.signal(SIGTERM);
  EXPECT_EQ(daemon.wait_exit(), 0);
  EXPECT_EQ(daemon.leftovers(), "");
}

TEST(Lifecycle, PrefixHitsSpareThePrompt) {
  Daemon daemon(kFour);
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  const auto request = text_request(prompt_with_fact(2000, "Mira-19aa", "77120"), 8);
  const Answer cold = run_request(client, request), warm = run_request(client, request);
  EXPECT_EQ(cold.finished.usage().cached_tokens(), 0u);
  EXPECT_GE(warm.finished.usage().cached_tokens(), 1900u);
  EXPECT_EQ(warm.tokens, cold.tokens);
}

TEST(Lifecycle, ATurnThatNamesItsParentIsTheWholePrompt) {
  Daemon daemon({"--workers", "2", "--max-step-rows", "256"});
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  client::Client client = daemon.client();
  auto first = text_request(prompt_with_fact(3000, "Vega-7c41", "20586"), 8);
  first.set_cache_salt("one");
  const Answer begun = run_request(client, first);
  ASSERT_FALSE(begun.failure) << begun.failure->text();
  const uint64_t id = begun.finished.request(),
                 tokens = begun.finished.usage().prompt_tokens() + begun.tokens.size();

  wire::GenerateRequest turn;
  turn.set_parent(id);
  turn.set_cache_salt("one");
  turn.set_max_tokens(8);
  turn.set_decode("dcp(2)");
  for (const uint32_t token : {5u, 6u, 7u, 8u, 9u}) turn.mutable_tokens()->add_ids(token);
  const Answer went_on = run_request(client, turn);
  ASSERT_FALSE(went_on.failure) << went_on.failure->text();
  EXPECT_EQ(went_on.finished.usage().prompt_tokens(), tokens + 5);
  // The answer's last token was never an input.
  EXPECT_EQ(went_on.finished.usage().cached_tokens(), (tokens - 1) / 64 * 64);

  const auto ids = client.tokenize("", first.text(), kPatience);
  ASSERT_TRUE(ids) << ids.error().text();
  wire::GenerateRequest whole;
  whole.set_cache_salt("two");
  whole.set_max_tokens(8);
  for (const uint32_t token : *ids) whole.mutable_tokens()->add_ids(token);
  for (const uint32_t token : begun.tokens) whole.mutable_tokens()->add_ids(token);
  for (const uint32_t token : turn.tokens().ids()) whole.mutable_tokens()->add_ids(token);
  const Answer plain = run_request(client, whole);
  EXPECT_EQ(plain.finished.usage().cached_tokens(), 0u);
  EXPECT_EQ(went_on.tokens, plain.tokens);

  const auto refused = [&](uint64_t parent, const char* salt, ErrorCode code) {
    turn.set_parent(parent);
    turn.set_cache_salt(salt);
    const Answer answer = run_request(client, turn);
    ASSERT_TRUE(answer.failure);
    EXPECT_EQ(answer.failure->code, code) << answer.failure->text();
    EXPECT_EQ(answer.failure->field, "parent");
  };
  refused(id, "two", ErrorCode::kNotFound);
  refused(12345, "one", ErrorCode::kNotFound);
}

TEST(Lifecycle, PinsAreCommands) {
  Daemon daemon({"--workers", "1", "--max-step-rows", "256"});
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  client::Client client = daemon.client();
  const Answer answer = run_request(client, text_request(prompt_with_fact(2000, "Vega-7c41", "20586"), 2));
  const auto run = [&](std::vector<std::string> command) {
    command.insert(command.begin(), {WEFT_WEFTCTL, "--state-dir", daemon.folder()});
    return run_program(command);
  };
  const std::string id = std::to_string(answer.finished.request());
  const Finished pinned = run({"pin", id});
  EXPECT_EQ(pinned.exit_code, 0) << pinned.errors;
  const uint64_t blocks = daemon.status().pinned_blocks();
  EXPECT_EQ(blocks, (answer.finished.usage().prompt_tokens() + 1) / 64);
  EXPECT_NE(run({"pins", "-o", "json"}).output.find("\"tokens\":" + std::to_string(blocks * 64)),
            std::string::npos);
  EXPECT_NE(run({"pin", "12345"}).exit_code, 0);
  EXPECT_EQ(run({"unpin", "1"}).exit_code, 0);
  EXPECT_EQ(daemon.status().pinned_blocks(), 0u);
  EXPECT_NE(run({"unpin", "1"}).exit_code, 0);
}

TEST(Lifecycle, RegroupWhileDecodingChangesNoToken) {
  Daemon daemon(kFour);
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  auto request = text_request(prompt_with_fact(2000, "Vega-7c41", "20586"), 150);
  request.set_no_prefix_cache(true);
  const Answer undisturbed = run_request(client, request);
  client::StreamHandlers handlers;
  uint64_t id = 0;
  handlers.accepted = [&](const wire::Accepted& accepted) { id = accepted.request(); };
  const char* route[] = {"dcp(2)", "dcp(4)", "tp", "dp", "dcp(4)"};
  int applied = 0;
  handlers.token = [&](const wire::TokenEvent& event) {
    if (event.index() % 20 != 10 || event.index() > 100) return;
    wire::ControlRequest regroup;
    regroup.mutable_regroup()->add_requests(id);
    regroup.mutable_regroup()->set_decode(route[event.index() / 20 % 5]);
    const auto reply = daemon.control(regroup);
    ASSERT_EQ(reply.regroup().outcomes_size(), 1) << reply.ShortDebugString();
    if (!reply.regroup().outcomes(0).has_error()) ++applied;
  };
  const Answer moved = run_request(client, request, handlers);
  EXPECT_EQ(moved.tokens, undisturbed.tokens);
  EXPECT_GE(applied, 4);
  EXPECT_GE(moved.finished.trace().regroups(), 4u);
}

TEST(Lifecycle, SigtermEndsStreamsWithATypedReply) {
  Daemon daemon(kFour);
  ASSERT_TRUE(daemon.wait_ready());
  auto client = daemon.client();
  client::StreamHandlers handlers;
  handlers.token = [&](const wire::TokenEvent& event) {
    if (event.index() == 3) daemon.signal(SIGTERM);
  };
  const Answer answer =
      run_request(client, text_request("Say this again and again. Say this", 20000), handlers);
  ASSERT_FALSE(answer.failure.has_value()) << answer.failure->text();
  EXPECT_EQ(answer.finished.reason(), "cancelled");
  EXPECT_EQ(answer.finished.error().code(), wire::ERROR_UNAVAILABLE);
  EXPECT_EQ(daemon.wait_exit(), 0);
  EXPECT_EQ(daemon.leftovers(), "");
}

TEST(Lifecycle, ShutdownOverTheControlSocket) {
  Daemon daemon(kFour);
  ASSERT_TRUE(daemon.wait_ready());
  EXPECT_THAT(daemon.leftovers(), HasSubstr("process"));  // that there are none later says something
  wire::ControlRequest request;
  request.mutable_shutdown();
  EXPECT_TRUE(daemon.control(request).has_shutdown());
  EXPECT_EQ(daemon.wait_exit(), 0);
  EXPECT_EQ(daemon.leftovers(), "");
}

TEST(Lifecycle, TheDaemonsDeathEndsTheWorkersAndASuccessorTakesItsFolder) {
  std::string folder;
  {
    Daemon daemon(with(kFour, {"--decode", "dcp(4)"}));
    daemon.keep_folder();
    folder = daemon.folder();
    ASSERT_TRUE(daemon.wait_ready());
    auto client = daemon.client();
    client::StreamHandlers handlers;
    handlers.token = [&](const wire::TokenEvent& event) {
      if (event.index() == 3) daemon.signal(SIGKILL);
    };
    const Answer answer =
        run_request(client, text_request("Say this again and again. Say this", 20000), handlers);
    ASSERT_TRUE(answer.failure.has_value());
    EXPECT_EQ(answer.failure->code, ErrorCode::kUnavailable);
    EXPECT_EQ(daemon.wait_exit(), -1);
    const Time died = monotonic_now();
    EXPECT_TRUE(daemon.wait_workers_gone());
    // What users are promised: the daemon's death ends the workers within 2 s.
    EXPECT_LT(seconds(monotonic_now() - died), 2.0);
  }
  // The sockets of the dead daemon lie there still; the successor takes them over, and remembers the
  // defaults.
  Daemon successor(kFour, recall_model(), folder);
  ASSERT_TRUE(successor.wait_ready());
  EXPECT_EQ(successor.status().decode(), "dcp(4)");
  auto client = successor.client();
  EXPECT_EQ(run_request(client, text_request("abc abc abc", 4)).tokens.size(), 4u);
  successor.signal(SIGINT);
  EXPECT_EQ(successor.wait_exit(), 0);
  EXPECT_EQ(successor.leftovers(), "");
}

TEST(Lifecycle, TheCommandLineAndTheStateFolderAreChecked) {
  const Finished usage =
      run_program({WEFT_WEFTD, "--model", recall_model(), "--workers", "4", "--decode", "dcp(3)"});
  EXPECT_EQ(usage.exit_code, 2);
  EXPECT_THAT(usage.errors, HasSubstr("--decode"));
  const Finished unwritable = run_program({WEFT_WEFTD, "--model", recall_model(), "--state-dir", "/proc/weft",
                                           "--client-endpoint", "tcp://127.0.0.1:*"});
  EXPECT_EQ(unwritable.exit_code, 1);
  EXPECT_THAT(unwritable.errors, HasSubstr("cannot write to state folder /proc/weft"));

  Daemon daemon(with(kFour, {"--client-endpoint", "tcp://127.0.0.1:*"}));
  ASSERT_TRUE(daemon.wait_ready());
  const Finished second =
      run_program({WEFT_WEFTD, "--model", recall_model(), "--state-dir", daemon.folder()});
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_THAT(second.errors, HasSubstr("in use by another weftd"));
  const std::string other = daemon.folder() + "/other";
  const Finished port = run_program({WEFT_WEFTD, "--model", recall_model(), "--state-dir", other,
                                     "--client-endpoint", daemon.status().client_endpoint()});
  EXPECT_EQ(port.exit_code, 1);
  EXPECT_THAT(port.errors, HasSubstr("cannot listen at tcp://127.0.0.1:"));
  const Finished socket = run_program({WEFT_WEFTD, "--model", recall_model(), "--state-dir", other,
                                       "--control-socket", daemon.control_socket()});
  EXPECT_EQ(socket.exit_code, 1);
  EXPECT_THAT(socket.errors, HasSubstr("is in use"));
  EXPECT_EQ(daemon.status().state(), "ready");
}

TEST(Lifecycle, ARecordingIsShownByWeftctl) {
  Daemon daemon(kFour);
  ASSERT_TRUE(daemon.wait_ready());
  wire::ControlRequest record;
  record.mutable_record()->set_on(true);
  const std::string path = daemon.control(record).record().path();
  auto client = daemon.client();
  const Answer answer = run_request(client, text_request(prompt_with_fact(1000, "Vega-7c41", "20586"), 5));
  record.mutable_record()->set_on(false);
  EXPECT_EQ(daemon.control(record).record().path(), path);
  EXPECT_EQ(daemon.control(record).record().path(), "") << "there is none to end";
  (void)run_request(client, text_request("abc", 5));  // not recorded
  const Finished shown = run_program({WEFT_WEFTCTL, "plans", path, "--all"});
  EXPECT_EQ(shown.exit_code, 0) << shown.errors;
  const auto& trace = answer.finished.trace();
  const auto lines = std::count(shown.output.begin(), shown.output.end(), '\n') - 1;
  EXPECT_EQ(static_cast<uint64_t>(lines), trace.prefill_steps() + trace.decode_steps());
  EXPECT_THAT(shown.output, HasSubstr("prefill 1: 256 rows from 0, zigzag, tp"));
}

// A folder that was made for the sockets goes with them, and no other.
TEST(Lifecycle, TheSocketsFolderGoesIfItWasMadeAndIsEmpty) {
  namespace fs = std::filesystem;
  for (const bool used : {false, true}) {
    const std::string state = recall_model() + "-state", run = state + "/run";
    fs::remove_all(state);
    fs::create_directory(state);
    Daemon daemon(
        with(kFour, {"--control-socket", run + "/c.sock", "--client-endpoint", "ipc://" + run + "/z.sock"}));
    ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
    EXPECT_TRUE(fs::exists(run + "/c.sock"));
    if (used) std::ofstream(run + "/note") << "somebody's";
    daemon.signal(SIGTERM);
    EXPECT_EQ(daemon.wait_exit(), 0);
    EXPECT_EQ(fs::exists(run), used);
    EXPECT_FALSE(fs::exists(run + "/c.sock"));
    EXPECT_TRUE(fs::exists(state));
    fs::remove_all(state);
  }
}

TEST(Lifecycle, ABrokenCheckpointEndsTheDaemonWithItsReason) {
  namespace fs = std::filesystem;
  const std::string folder = recall_model() + "-broken";
  fs::remove_all(folder);
  fs::copy(recall_model(), folder);
  fs::resize_file(folder + "/model.safetensors", 100'000);
  Daemon daemon(kFour, folder);
  EXPECT_FALSE(daemon.wait_ready());
  EXPECT_EQ(daemon.wait_exit(), 1);
  EXPECT_THAT(daemon.log(), HasSubstr("weftd: bad_checkpoint"));
  EXPECT_EQ(daemon.leftovers(), "");
}

// The worker's reason quotes the file; a message that carried its bytes as they are would not parse.
TEST(Lifecycle, AReasonThatQuotesGarbageArrives) {
  namespace fs = std::filesystem;
  const std::string folder = recall_model() + "-garbled";
  fs::remove_all(folder);
  fs::copy(recall_model(), folder);
  std::ofstream(folder + "/config.json") << R"({"model_type": ")"
                                         << "\xff\xfe"
                                         << R"("})";
  Daemon daemon(kFour, folder);
  EXPECT_FALSE(daemon.wait_ready());
  EXPECT_EQ(daemon.wait_exit(), 1);
  EXPECT_THAT(daemon.log(), HasSubstr("weftd: bad_checkpoint"));
  EXPECT_EQ(daemon.leftovers(), "");
  fs::remove_all(folder);
}

}  // namespace
}  // namespace weft::integration
