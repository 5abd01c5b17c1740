// weftctl from words to exit code: parsing, what it sends, what it prints, how it fails.
#include <gmock/gmock.h>
#include <google/protobuf/util/delimited_message_util.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "proto/worker.pb.h"
#include "tests/tools/fake_daemon.h"
#include "tools/client/client.h"
#include "tools/ctl/command.h"
#include "tools/ctl/exit_code.h"
#include "tools/ctl/help.h"
#include "tools/ctl/json.h"
#include "tools/ctl/main_run.h"
#include "tools/ctl/parse.h"
#include "tools/ctl/position_digest.h"

namespace weft::ctl {
namespace {

using test::FakeDaemon;
using ::testing::HasSubstr;
using ::testing::Not;

using Words = std::vector<std::string>;

struct Outcome {
  int code;
  std::string out;
  std::string err;
};

Outcome run(const Words& words, const std::string& input = {}) {
  std::istringstream in(input);
  std::ostringstream out, err;
  Context context{{}, in, out, err, {}};
  const int code = run_words(words, context);
  return {code, out.str(), err.str()};
}

// ---- parsing

TEST(Parse, GlobalOptionsMayStandAnywhere) {
  for (const Words& words : {Words{"-o", "json", "--state-dir", "/s", "explain", "7"},
                             Words{"explain", "7", "-o", "json", "--state-dir=/s"},
                             Words{"explain", "--output=json", "7", "--state-dir", "/s"}}) {
    const auto parsed = parse(words);
    ASSERT_TRUE(parsed) << parsed.error().text();
    EXPECT_EQ(parsed->command->name, "explain");
    EXPECT_EQ(parsed->arguments.request, 7u);
    EXPECT_TRUE(parsed->arguments.json());
    EXPECT_EQ(parsed->arguments.state_dir, "/s");
  }
}

TEST(Parse, ListsAreOneWordOrSeveralPositions) {
  const auto generate = parse({"generate", "--tokens", "1,2,3", "--stop-tokens", "7", "-n", "5"});
  ASSERT_TRUE(generate) << generate.error().text();
  EXPECT_EQ(generate->arguments.tokens, (std::vector<uint32_t>{1, 2, 3}));
  EXPECT_EQ(generate->arguments.stop_tokens, (std::vector<uint32_t>{7}));
  EXPECT_EQ(generate->arguments.max_tokens, 5u);
  const auto cancel = parse({"cancel", "1,2", "3"});
  ASSERT_TRUE(cancel) << cancel.error().text();
  EXPECT_EQ(cancel->arguments.requests, (std::vector<uint64_t>{1, 2, 3}));
}

TEST(Parse, GroupingsAreNormal) {
  for (const char* text : {"dcp(4)", "dcp4", "dcp:4"}) {
    const auto parsed = parse({"regroup", "--all", "--decode", text});
    ASSERT_TRUE(parsed) << text;
    EXPECT_EQ(parsed->arguments.decode, "dcp(4)") << text;
  }
  for (const char* text :
       {"dcp", "dcp(", "dcp()", "dcp(4", "dcp0", "dcp-1", "dcp(04)", "dcpx", "tp4", "", "dcp(1000)"}) {
    EXPECT_FALSE(normal_grouping(text)) << text;
  }
  for (const char* text : {"dp(4)xdcp(2)", "dp4xdcp2", "dp:4xdcp:2"}) {
    EXPECT_EQ(normal_grouping(text).value(), "dp(4)xdcp(2)") << text;
  }
  EXPECT_EQ(normal_grouping("dp2xtp").value(), "dp(2)xtp");
  for (const char* text : {"dp4", "dp4x", "dp4xdp", "dpxtp", "dp4xdcp", "4xtp"}) {
    EXPECT_FALSE(normal_grouping(text)) << text;
  }
  EXPECT_EQ(normal_index("split:4").value(), "split(4)");
  EXPECT_EQ(normal_index("copied8").value(), "copied(8)");
  EXPECT_EQ(normal_index("split").value(), "split");
  for (const char* text : {"", "both", "split0", "copied()", "splitx"})
    EXPECT_FALSE(normal_index(text)) << text;
}

TEST(Parse, FaultsAreUsageErrorsThatPointToHelp) {
  const Words faults[] = {{"no-such-command"},
                          {"status", "--no-such-option"},
                          {"status", "surplus"},
                          {"explain"},
                          {"explain", "x"},
                          {"explain", "-1"},
                          {"explain", "18446744073709551616"},
                          {"cancel"},
                          {"generate", "a", "-n", "-3"},
                          {"generate", "a", "-n", "1", "-n", "2"},
                          {"generate", "a", "--tokens", "1,x"},
                          {"generate", "a", "--prefill", "sideways"},
                          {"generate", "a", "--decode", "dcp"},
                          {"generate", "a", "--temperature", "warm"},
                          {"record", "maybe"},
                          {"status", "-o", "xml"},
                          {"status", "--timeout", "-1"},
                          {"status", "--timeout", "nan"},
                          {"status", "-w", "--interval", "0"},
                          {"status", "workers"},
                          {"drain"},
                          {"drain", "one"},
                          {"workers", "increase"},
                          {"workers", "add"},
                          {"workers", "add", "cpu", "--rank", "1"},
                          {"workers", "remove"},
                          {"workers", "remove", "x"},
                          {"workers", "remove", "--rank", "1"},
                          {"workers", "--rank", "1"},
                          {"history", "--limit", "-1"}};
  for (const Words& words : faults) {
    const Outcome outcome = run(words);
    std::string line;
    for (const auto& word : words) line += word + " ";
    EXPECT_EQ(outcome.code, kExitUsage) << line;
    EXPECT_THAT(outcome.err, HasSubstr("error: invalid_argument: ")) << line;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << line;
    EXPECT_EQ(outcome.out, "") << line;
  }
}

TEST(Parse, MisspeltWordsGetAHint) {
  const std::pair<Words, const char*> cases[] = {
      {{"statsu"}, "unknown command \"statsu\"; did you mean status? (see weftctl --help)"},
      {{"status", "--wathc"}, "unknown option --wathc; did you mean --watch? (see weftctl status --help)"},
      {{"status", "--tmeout=3"},
       "unknown option --tmeout; did you mean --timeout? (see weftctl status --help)"},
      {{"help", "regruop"}, "no command \"regruop\"; did you mean regroup?"},
      {{"kill"}, "unknown command \"kill\" (see weftctl --help)"},
      {{"status", "--timeout"}, "--timeout: needs a value (see weftctl status --help)"},
      {{"status", "more"}, "\"more\" is one word too many (see weftctl status --help)"}};
  for (const auto& [words, text] : cases) {
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.code, kExitUsage);
    EXPECT_EQ(outcome.err, "error: invalid_argument: " + std::string(text) + "\n");
  }
}

TEST(Parse, NoCommandShowsTheCommands) {
  const Outcome outcome = run({});
  EXPECT_EQ(outcome.code, kExitUsage);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(outcome.err, short_help());
  for (const Command& command : commands()) EXPECT_THAT(outcome.err, HasSubstr("\n  " + command.name + " "));
  const Json version = Json::parse(run({"--version", "-o", "json"}).out, nullptr, false);
  EXPECT_TRUE(version["version"]["weftctl"]["version"].is_string());
  const Json document = Json::parse(run({"-o", "json"}).err, nullptr, false);
  ASSERT_TRUE(document.is_object());
  EXPECT_EQ(document["error"]["exit"], 2);
}

// ---- help

TEST(Help, NamesEveryCommandAndOption) {
  const Outcome program = run({"--help"});
  EXPECT_EQ(program.code, kExitOk);
  const std::string reference = markdown_reference();
  for (const Command& command : commands()) {
    EXPECT_THAT(program.out, HasSubstr("\n  " + command.name + " "));
    EXPECT_FALSE(command.examples.empty()) << command.name;
    const Outcome help = run({command.name, "--help"});
    EXPECT_EQ(help.code, kExitOk);
    EXPECT_EQ(run({"help", command.name}).out, help.out);
    for (const Option& option : command.options) {
      EXPECT_THAT(help.out, HasSubstr(option.names.substr(0, option.names.find(',')))) << command.name;
      EXPECT_THAT(reference, HasSubstr(option.help)) << command.name;
    }
  }
  EXPECT_EQ(run({"help", "no-such-command"}).code, kExitUsage);
}

TEST(Help, IsADocumentWhereJsonWasAskedFor) {
  for (const Words& words : {Words{"help"}, Words{"help", "explain"}, Words{"explain", "--help"},
                             Words{"--help"}, Words{"help", "--markdown"}}) {
    Words json = words;
    json.insert(json.end(), {"-o", "json"});
    const Json document = Json::parse(run(json).out, nullptr, false);
    ASSERT_TRUE(document.is_object()) << words.front();
    EXPECT_EQ(document["help"]["text"], run(words).out);
  }
}

// Every example in the help must parse.
TEST(Help, ExamplesAreRight) {
  for (const Command& command : commands()) {
    for (const std::string& example : command.examples) {
      Words words;
      std::istringstream in(example);
      std::string word;
      while (in >> word) {
        if (word.front() == '\'') {
          std::string rest;
          std::getline(in, rest, '\'');
          word = word.substr(1) + rest;
        }
        words.push_back(word);
      }
      ASSERT_EQ(words.front(), "weftctl");
      words.erase(words.begin());
      const auto parsed = parse(words);
      ASSERT_TRUE(parsed) << example << ": " << parsed.error().text();
      EXPECT_EQ(parsed->command, &command) << example;
    }
  }
}

TEST(Help, TheReferencePageIsTheOutput) {
  std::ifstream file(WEFT_SOURCE_DIR "/docs/weftctl.md");
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  EXPECT_EQ(page, run({"help", "--markdown"}).out)
      << "write it again: weftctl help --markdown > docs/weftctl.md";
}

// ---- exit codes

TEST(ExitCodes, AreStable) {
  const std::pair<ErrorCode, int> expected[] = {
      {ErrorCode::kInvalidArgument, 2},  {ErrorCode::kNotFound, 4},
      {ErrorCode::kTooLarge, 2},         {ErrorCode::kResourceExhausted, 5},
      {ErrorCode::kUnavailable, 69},     {ErrorCode::kFailedPrecondition, 5},
      {ErrorCode::kDeadlineExceeded, 6}, {ErrorCode::kCancelled, 1},
      {ErrorCode::kBadCheckpoint, 1},    {ErrorCode::kIo, 1},
      {ErrorCode::kBadMessage, 1},       {ErrorCode::kUnsupported, 1},
      {ErrorCode::kNumerical, 1},        {ErrorCode::kNotPermitted, 77},
      {ErrorCode::kInternal, 1}};
  for (const auto& [code, exit] : expected)
    EXPECT_EQ(exit_code_of(error(code, "")), exit) << error_code_name(code);
  EXPECT_EQ(exit_code_of(client::interrupt_error()), 130);
}

TEST(ExitCodes, NoDaemonIs69ForEveryCommandThatNeedsOne) {
  const Words lines[] = {{"status"},       {"requests"},
                         {"explain", "1"}, {"regroup", "1", "--decode", "tp"},
                         {"cancel", "1"},  {"generate", "hello"},
                         {"workers"},      {"version"},
                         {"record", "on"}, {"stop"},
                         {"drain", "1"},   {"workers", "remove", "1"},
                         {"history"},      {"workers", "add", "cpu"}};
  for (Words words : lines) {
    words.insert(words.end(), {"--state-dir", "/tmp/weft-no-such-folder"});
    const Outcome text = run(words);
    EXPECT_EQ(text.code, kExitUnreachable) << words.front();
    EXPECT_THAT(text.err, HasSubstr("error: unavailable: ")) << words.front();
    words.insert(words.end(), {"-o", "json"});
    const Outcome json = run(words);
    EXPECT_EQ(json.code, kExitUnreachable) << words.front();
    const Json document = Json::parse(json.err, nullptr, false);
    ASSERT_TRUE(document.is_object()) << json.err;
    EXPECT_EQ(document["schema"], kJsonSchema);
    EXPECT_EQ(document["error"]["code"], "unavailable");
    EXPECT_EQ(document["error"]["exit"], 69);
    EXPECT_THAT(document["error"]["hint"].get<std::string>(), HasSubstr("start weftd"));
    EXPECT_EQ(json.out, "") << "one document";
  }
}

// With the option or argument that it is about, be it the command's own or one of every command.
TEST(ExitCodes, AUsageErrorIsJsonWhereJsonWasAskedFor) {
  const std::pair<Words, const char*> cases[] = {{{"explain"}, "ID"},
                                                 {{"explain", "x"}, "ID"},
                                                 {{"generate", "a", "-n", "-3"}, "--max-tokens"},
                                                 {{"generate", "a", "--prefill", "sideways"}, "--prefill"},
                                                 {{"generate", "a", "--decode", "dcp"}, "--decode"},
                                                 {{"status", "--timeout"}, "--timeout"},
                                                 {{"status", "--timeout", "soon"}, "--timeout"},
                                                 {{"record", "maybe"}, "ON_OR_OFF"}};
  for (auto [words, field] : cases) {
    words.insert(words.begin(), {"-o", "json"});
    const Outcome outcome = run(words);
    const Json document = Json::parse(outcome.err, nullptr, false);
    ASSERT_TRUE(document.is_object()) << outcome.err;
    EXPECT_EQ(document["error"]["exit"], 2);
    EXPECT_EQ(document["error"]["field"], field) << outcome.err;
  }
}

// ---- commands over the control socket

wire::StatusReply some_status() {
  wire::StatusReply status;
  status.set_state("ready");
  status.set_model("recall");
  status.set_model_type("glm_moe_dsa");
  status.set_workers(4);
  status.set_epoch(2);
  status.set_uptime_ns(uint64_t{1} << 62);
  status.set_prefill("zigzag");
  status.set_decode("dcp(4)");
  status.set_index("copied");
  status.set_block_tokens(64);
  status.set_pool_tokens(64000);
  status.mutable_host_pool()->set_write("back");
  status.mutable_host_pool()->set_hit_tokens(640);
  status.mutable_host_pool()->mutable_entries()->set_pages(7);
  auto& pool = *status.add_pools();
  pool.set_rank(3);
  pool.mutable_entries()->set_pages(1000);
  pool.mutable_entries()->set_free(990);
  pool.mutable_entries()->set_page_bytes(65536);
  status.mutable_crossed()->set_rows(3 << 20);
  status.set_finished(5);
  status.set_cancelled(2);
  status.set_prompt_tokens(9000);
  status.set_computed_prompt_tokens(5120);
  status.set_cached_tokens(3000);
  return status;
}

FakeDaemon::OnClient no_client() {
  return [](const wire::ClientRequest&, const FakeDaemon::Send&) {};
}

Words at(const FakeDaemon& daemon, Words words) {
  words.insert(words.end(), {"--state-dir", daemon.folder()});
  return words;
}

TEST(Status, TableAndJsonShowTheSameReply) {
  FakeDaemon daemon(no_client(), [](const wire::ControlRequest& request) {
    wire::ControlReply reply;
    if (request.has_status()) *reply.mutable_status() = some_status();
    return test::framed(reply);
  });
  const Outcome table = run(at(daemon, {"status"}));
  EXPECT_EQ(table.code, kExitOk) << table.err;
  for (const char* text :
       {"ready", "recall (glm_moe_dsa)", "prefill zigzag, decode dcp(4), index copied", "1,000",
        "64,000 tokens per rank", "64.0 KiB", "rows", "3.0 MiB", "5 finished, 2 cancelled, 0 failed",
        "5,120 of prompts computed, 3,000 from the prefix cache",
        "written back, 0 B spilled, 0 B loaded, 640 tokens of prompts"}) {
    EXPECT_THAT(table.out, HasSubstr(text));
  }
  EXPECT_THAT(table.out, Not(HasSubstr("\033"))) << "not a terminal";
  const Outcome json = run(at(daemon, {"status", "-o", "json"}));
  const Json document = Json::parse(json.out, nullptr, false);
  ASSERT_TRUE(document.is_object()) << json.out;
  EXPECT_EQ(document["schema"], 1);
  const Json& status = document["status"];
  EXPECT_EQ(status["state"], "ready");
  EXPECT_EQ(status["uptime_ns"].get<uint64_t>(), uint64_t{1} << 62);
  EXPECT_EQ(status["pools"][0]["entries"]["free"], 990);
  EXPECT_EQ(status["host_pool"]["hit_tokens"], 640);
  EXPECT_EQ(status["host_pool"]["entries"]["pages"], 7);
  EXPECT_TRUE(status["pools"][0]["index_keys"].is_null());
  EXPECT_EQ(status["failed"], 0) << "fields at their default are there";
}

TEST(Status, WaitsUntilReady) {
  int looks = 0;
  FakeDaemon daemon(no_client(), [&](const wire::ControlRequest&) {
    wire::ControlReply reply;
    *reply.mutable_status() = some_status();
    if (++looks < 3) {
      reply.mutable_status()->set_state("loading");
      reply.mutable_status()->set_load_done(static_cast<uint64_t>(looks));
      reply.mutable_status()->set_load_total(4);
    }
    return test::framed(reply);
  });
  const Outcome outcome = run(at(daemon, {"status", "--wait", "--timeout", "30"}));
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_EQ(looks, 3);
  EXPECT_EQ(outcome.err, "weftd: loading 25 %\nweftd: loading 50 %\nweftd: ready\n");
}

// ---- recordings

class Plans : public ::testing::Test {
 protected:
  // Appends a plan as the daemon does.
  void add(const wire::StepPlan& plan) {
    std::ofstream file(path_, std::ios::binary | std::ios::app);
    ASSERT_TRUE(google::protobuf::util::SerializeDelimitedToOstream(plan, &file));
  }
  static wire::Span& add_span(wire::StepPlan& plan, uint64_t request, uint32_t rows, uint32_t c) {
    wire::Span& span = *plan.add_spans();
    span.set_request(request);
    span.set_rows(rows);
    span.set_group_width(4);
    span.set_group_c(c);
    span.set_index_c(1);
    return span;
  }
  void record_two() {
    wire::StepPlan first, second;
    first.set_step(1);
    wire::Span& prefill = add_span(first, 7, 2048, 4);
    prefill.set_start(4096);
    prefill.set_prefill(true);
    prefill.set_split(1);
    add_span(first, 1, 1, 1);
    add_span(first, 2, 1, 4).set_index_c(4);
    add_span(first, 3, 1, 1);
    wire::Span& parts = add_span(first, 4, 1, 2);
    parts.set_index_c(4);
    parts.set_index_copied(true);
    first.add_copies();
    add(first);
    second.set_step(2);
    wire::Span& alone = add_span(second, 1, 1, 1);
    alone.set_group_width(1);
    alone.set_group_base(3);
    add(second);
  }
  test::TempFolder folder_;
  const std::string path_ = folder_.path() + "/plans-1.bin";
};

TEST_F(Plans, OneLinePerStep) {
  record_two();
  const Outcome table = run({"plans", path_});
  EXPECT_EQ(table.code, kExitOk) << table.err;
  EXPECT_THAT(table.out, HasSubstr("prefill 7: 2048 rows from 4096, zigzag, dcp(4); tp: 1 3; dcp(4), index "
                                   "split: 2; dcp(2), index copied(4): 4"));
  EXPECT_THAT(table.out, HasSubstr("rank 3: 1"));
  EXPECT_EQ(std::count(table.out.begin(), table.out.end(), '\n'), 3) << table.out;
  const Json document = Json::parse(run({"plans", path_, "-o", "json"}).out, nullptr, false);
  ASSERT_TRUE(document.is_object());
  EXPECT_EQ(document["plans"]["steps"].size(), 2u);
  EXPECT_EQ(document["plans"]["steps"][0]["spans"][0]["start"], 4096);
}

// Equal decode steps are one line, as long as nothing else happens and no step is missing.
TEST_F(Plans, RunsOfEqualDecodeStepsAreFolded) {
  const auto decode = [&](uint64_t step, uint32_t c, int copies = 0) {
    wire::StepPlan plan;
    plan.set_step(step);
    add_span(plan, 5, 1, c).set_start(static_cast<uint32_t>(step));
    for (int i = 0; i < copies; ++i) plan.add_copies();
    add(plan);
  };
  for (uint64_t step = 12; step <= 611; ++step) decode(step, 4);
  decode(612, 1, 3);
  decode(613, 1);
  decode(614, 1);
  decode(620, 1);
  const Outcome folded = run({"plans", path_});
  EXPECT_EQ(folded.out,
            "   step  prefill  decode  copies  spans\n"
            " 12\u2013611        0       1       0  dcp(4): 5\n"
            "    612        0       1       3  tp: 5\n"
            "613\u2013614        0       1       0  tp: 5\n"
            "    620        0       1       0  tp: 5\n");
  const Outcome all = run({"plans", path_, "--all"});
  EXPECT_EQ(std::count(all.out.begin(), all.out.end(), '\n'), 1 + 600 + 4);
  EXPECT_EQ(Json::parse(run({"plans", path_, "-o", "json"}).out)["plans"]["steps"].size(), 604u);
}

TEST_F(Plans, ABreakIsToldAfterWhatCameBeforeIt) {
  record_two();
  std::filesystem::resize_file(path_, std::filesystem::file_size(path_) - 3);
  const Outcome outcome = run({"plans", path_});
  EXPECT_EQ(outcome.code, kExitFailed);
  EXPECT_THAT(outcome.out, HasSubstr("prefill 7"));
  EXPECT_THAT(outcome.err, HasSubstr("breaks off within plan 2"));
  const Outcome json = run({"plans", path_, "-o", "json"});
  EXPECT_EQ(json.out, "");
  const Json document = Json::parse(json.err, nullptr, false);
  EXPECT_EQ(document["error"]["code"], "bad_message");
  EXPECT_EQ(document["plans"]["steps"].size(), 1u);
}

TEST_F(Plans, OtherFilesAreRefused) {
  EXPECT_EQ(run({"plans", path_}).code, kExitNotFound);
  EXPECT_EQ(run({"plans", folder_.path()}).code, kExitFailed);
  for (const std::string& content :
       {std::string("not a recording at all\n"), std::string(3, '\0'), std::string("\x02\x08\x01", 3)}) {
    std::ofstream(path_, std::ios::binary) << content;
    const Outcome outcome = run({"plans", path_});
    EXPECT_EQ(outcome.code, kExitFailed);
    EXPECT_THAT(outcome.err, HasSubstr("is no recording of plans"));
    EXPECT_EQ(outcome.out, "");
  }
  std::ofstream(path_, std::ios::binary).close();
  EXPECT_EQ(run({"plans", path_}).out, "no plans\n");
}

TEST(Status, SaysWhyItIsNotReady) {
  FakeDaemon daemon(no_client(), [&](const wire::ControlRequest&) {
    wire::ControlReply reply;
    *reply.mutable_status() = some_status();
    reply.mutable_status()->set_state("recovering");
    reply.mutable_status()->set_trouble("worker 1: exit 1, not_found: config.json");
    return test::framed(reply);
  });
  EXPECT_THAT(run(at(daemon, {"status"})).out, HasSubstr("worker 1: exit 1, not_found: config.json"));
  const Outcome waited = run(at(daemon, {"status", "--wait", "--timeout", "0.3"}));
  EXPECT_EQ(waited.code, kExitTimeout);
  EXPECT_THAT(waited.err, HasSubstr("recovering (worker 1: exit 1, not_found: config.json)"));
}

TEST(Status, NeverReadyIsATimeout) {
  FakeDaemon daemon(no_client(), [&](const wire::ControlRequest&) {
    wire::ControlReply reply;
    reply.mutable_status()->set_state("loading");
    return test::framed(reply);
  });
  EXPECT_EQ(run(at(daemon, {"status", "--wait", "--timeout", "0.3"})).code, kExitTimeout);
}

TEST(Timeout, SilenceIs6) {
  FakeDaemon daemon(no_client(), [](const wire::ControlRequest&) { return std::string(); });
  EXPECT_EQ(run(at(daemon, {"workers", "--timeout", "0.1"})).code, kExitTimeout);
}

TEST(Regroup, SendsWhatWasSaid) {
  wire::RegroupRequest seen;
  FakeDaemon daemon(no_client(), [&](const wire::ControlRequest& request) {
    seen = request.regroup();
    wire::ControlReply reply;
    auto& good = *reply.mutable_regroup()->add_outcomes();
    good.set_request(7);
    good.set_before("tp");
    good.set_after("dcp(4)");
    good.set_pages_dropped(12);
    auto& bad = *reply.mutable_regroup()->add_outcomes();
    bad.set_request(8);
    bad.mutable_error()->set_code(wire::ERROR_RESOURCE_EXHAUSTED);
    bad.mutable_error()->set_field("decode");
    bad.mutable_error()->set_message("no room");
    auto& unknown = *reply.mutable_regroup()->add_outcomes();
    unknown.set_request(9);
    unknown.mutable_error()->set_code(wire::ERROR_NOT_FOUND);
    unknown.mutable_error()->set_field("request");
    unknown.mutable_error()->set_message("no request 9");
    return test::framed(reply);
  });
  const Outcome outcome = run(at(
      daemon, {"regroup", "7", "8", "9", "--decode", "dcp4", "--index", "split", "--defaults", "--dry-run"}));
  EXPECT_EQ(outcome.code, kExitRefused);
  EXPECT_THAT(outcome.out, HasSubstr("would drop"));
  EXPECT_THAT(outcome.out, HasSubstr("12 pages"));
  EXPECT_EQ(outcome.err,
            "error: resource_exhausted: decode: request 8: no room\n"
            "error: not_found: request: no request 9\n");
  EXPECT_THAT(outcome.out, Not(HasSubstr("no room"))) << "told once";
  EXPECT_THAT(seen.requests(), ::testing::ElementsAre(7, 8, 9));
  EXPECT_EQ(seen.decode(), "dcp(4)");
  EXPECT_EQ(seen.index(), "split");
  EXPECT_EQ(seen.prefill(), "");
  EXPECT_TRUE(seen.defaults());
  EXPECT_TRUE(seen.dry_run());
  EXPECT_FALSE(seen.all_running());
  EXPECT_THAT(outcome.out, HasSubstr("defaults would be: "));
  const Outcome taken = run(at(daemon, {"regroup", "7", "8", "--decode", "dcp4", "--defaults"}));
  EXPECT_THAT(taken.out, HasSubstr("will drop"));
  EXPECT_THAT(taken.out, HasSubstr("Each changes with its next step"));
  EXPECT_THAT(taken.out, HasSubstr("defaults: "));
  const Outcome json = run(at(daemon, {"regroup", "7", "8", "--decode", "dcp4", "-o", "json"}));
  EXPECT_EQ(json.code, kExitRefused);
  EXPECT_EQ(json.out, "") << "one document";
  const Json document = Json::parse(json.err, nullptr, false);
  EXPECT_EQ(document["error"]["code"], "resource_exhausted");
  EXPECT_EQ(document["error"]["hint"], "");
  EXPECT_EQ(document["regroup"]["outcomes"][0]["pages_dropped"], 12);
  EXPECT_EQ(document["regroup"]["outcomes"][1]["error"]["code"], "resource_exhausted");
}

TEST(Regroup, NeedsATargetAndAChange) {
  for (const Words& words : {Words{"regroup", "--decode", "tp"}, Words{"regroup", "7"},
                             Words{"regroup", "--all"}, Words{"regroup", "7", "--all", "--decode", "tp"}}) {
    EXPECT_EQ(run(words).code, kExitUsage);
  }
}

TEST(Workers, ChangesSendWhatWasSaidAndShowTheTopology) {
  wire::ControlRequest got;
  FakeDaemon daemon(no_client(), [&](const wire::ControlRequest& request) {
    got = request;
    wire::ControlReply reply;
    wire::TopologyReply* topology = reply.mutable_topology();
    topology->set_epoch(7);
    for (const uint32_t rank : {0u, 1u, 3u}) topology->add_active(rank);
    topology->set_bytes_moved(3 << 20);
    topology->set_sequences_moved(2);
    return test::framed(reply);
  });
  EXPECT_EQ(run(at(daemon, {"drain", "2"})).out,
            "epoch 7: ranks 0, 1, 3 compute; moved 3.0 MiB of 2 requests\n");
  EXPECT_EQ(got.drain().rank(), 2u);
  EXPECT_EQ(run(at(daemon, {"workers", "remove", "2"})).code, kExitOk);
  EXPECT_EQ(got.remove_worker().rank(), 2u);
  EXPECT_EQ(run(at(daemon, {"workers", "add", "--rank", "2"})).code, kExitOk);
  EXPECT_EQ(got.add_worker().rank(), 2u);
  EXPECT_EQ(got.add_worker().device(), "");
  const Outcome added = run(at(daemon, {"workers", "add", "cpu:4-7", "-o", "json"}));
  EXPECT_FALSE(got.add_worker().has_rank());
  EXPECT_EQ(got.add_worker().device(), "cpu:4-7");
  const Json document = Json::parse(added.out, nullptr, false);
  ASSERT_TRUE(document.is_object()) << added.out;
  EXPECT_EQ(document["workers"]["active"], Json({0, 1, 3}));
}

TEST(History, ShowsLinesNewestLast) {
  FakeDaemon daemon(no_client(), [&](const wire::ControlRequest& request) {
    EXPECT_EQ(request.history().limit(), 5u);
    wire::ControlReply reply;
    for (const char* what : {"drain 2", "recovery"}) {
      wire::HistoryLine* line = reply.mutable_history()->add_lines();
      line->set_time("2000-01-01T00:00:00Z");
      line->set_epoch(what[0] == 'd' ? 3 : 0);
      line->set_what(what);
      line->set_outcome("ok");
    }
    return test::framed(reply);
  });
  const Outcome outcome = run(at(daemon, {"history", "--limit", "5"}));
  EXPECT_EQ(outcome.code, kExitOk);
  EXPECT_THAT(outcome.out, HasSubstr("2000-01-01T00:00:00Z      3  drain 2   ok\n"));
  EXPECT_THAT(outcome.out, HasSubstr("2000-01-01T00:00:00Z      -  recovery  ok\n"));
}

TEST(Cancel, TriesAllAndReportsTheFirstFailure) {
  std::vector<uint64_t> seen;
  FakeDaemon daemon(no_client(), [&](const wire::ControlRequest& request) {
    const uint64_t id = request.cancel().request();
    seen.push_back(id);
    wire::ControlReply reply;
    if (id % 2 == 0) {
      reply.mutable_error()->set_code(id == 2 ? wire::ERROR_NOT_FOUND : wire::ERROR_FAILED_PRECONDITION);
    } else {
      reply.mutable_cancel()->set_request(id);
    }
    return test::framed(reply);
  });
  const Outcome outcome = run(at(daemon, {"cancel", "1", "2", "3", "-o", "json"}));
  EXPECT_EQ(outcome.code, kExitNotFound);
  EXPECT_EQ(seen, (std::vector<uint64_t>{1, 2, 3}));
  EXPECT_EQ(outcome.out, "") << "one document";
  const Json document = Json::parse(outcome.err);
  EXPECT_EQ(document["error"]["exit"], kExitNotFound);
  EXPECT_EQ(document["cancel"]["requests"], (std::vector<uint64_t>{1, 3}));
  EXPECT_EQ(document["cancel"]["failed"][0]["request"], 2);
  EXPECT_EQ(document["cancel"]["failed"][0]["error"]["code"], "not_found");
  EXPECT_EQ(run(at(daemon, {"cancel", "1", "-o", "json"})).out,
            "{\"schema\":1,\"cancel\":{\"requests\":[1],\"failed\":[]}}\n");
  const Outcome text = run(at(daemon, {"cancel", "4", "2"}));
  EXPECT_EQ(text.code, kExitRefused) << "of the first";
  EXPECT_EQ(text.err, "error: failed_precondition\nerror: not_found\n");
}

// A child process plays the daemon: stop must return only when that process is gone.
TEST(Stop, WaitsForTheProcess) {
  int ready[2], hold[2];
  ASSERT_EQ(::pipe(ready), 0);
  ASSERT_EQ(::pipe(hold), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    FakeDaemon daemon(no_client(), [&](const wire::ControlRequest& request) {
      if (!request.has_shutdown()) return std::string();
      if (::write(hold[1], "x", 1) != 1) ::_exit(3);
      wire::ControlReply reply;
      reply.mutable_shutdown();
      return test::framed(reply);
    });
    const std::string folder = daemon.folder();
    if (::write(ready[1], folder.data(), folder.size()) < 0) ::_exit(2);
    char byte;
    if (::read(hold[0], &byte, 1) != 1) ::_exit(4);  // the shutdown request has come
    daemon.stop();
    std::filesystem::remove_all(folder);
    ::_exit(0);
  }
  char folder[64] = {};
  ASSERT_GT(::read(ready[0], folder, sizeof folder - 1), 0);
  const Outcome outcome = run({"stop", "--state-dir", folder});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, WNOHANG), child) << "stop returned before the daemon was gone";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  for (const int descriptor : {ready[0], ready[1], hold[0], hold[1]}) ::close(descriptor);
}

// ---- generate

// Answers "ab", with digests in descending order, and keeps what it was asked.
struct Answering {
  wire::GenerateRequest seen;  // of the fake's thread: read it through asked()
  std::string reason = "length";
  uint64_t tokens = 2;
  FakeDaemon daemon{
      [this](const wire::ClientRequest& request, const FakeDaemon::Send& send) {
        seen = request.generate();
        wire::ClientReply reply;
        reply.mutable_accepted()->set_request(3);
        send(reply);
        for (uint64_t position = 2; position-- > 0 && seen.digest();) {
          reply.mutable_digest()->set_position(position);
          reply.mutable_digest()->set_sha256(std::string(32, static_cast<char>('0' + position)));
          send(reply);
        }
        for (uint64_t i = 0; i < tokens; ++i) {
          reply.mutable_token()->set_index(i);
          reply.mutable_token()->set_token(static_cast<uint32_t>(97 + i));
          reply.mutable_token()->set_text(i == 0 ? "a" : "b");
          send(reply);
        }
        auto& finished = *reply.mutable_finished();
        finished.set_request(3);
        finished.set_reason(reason);
        finished.mutable_usage()->set_prompt_tokens(5);
        if (reason == "error") finished.mutable_error()->set_code(wire::ERROR_NUMERICAL);
        send(reply);
      },
      [](const wire::ControlRequest&) {
        wire::ControlReply reply;
        reply.mutable_status();
        return test::framed(reply);
      }};
  const wire::GenerateRequest& asked() {
    daemon.stop();
    return seen;
  }
};

TEST(Generate, TakesThePromptFromEverywhere) {
  const std::string path = "/tmp/weft-prompt-" + std::to_string(::getpid());
  std::ofstream(path) << "from a file";
  const std::pair<Words, std::string> cases[] = {{{"generate", "from words"}, "from words"},
                                                 {{"generate", "--file", path}, "from a file"},
                                                 {{"generate", "--file", "-"}, "from the input"},
                                                 {{"generate"}, "from the input"}};
  for (const auto& [words, expected] : cases) {
    Answering answering;
    const Outcome outcome = run(at(answering.daemon, words), "from the input");
    EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
    EXPECT_EQ(outcome.out, "ab\n");
    EXPECT_EQ(answering.asked().text(), expected);
  }
  std::filesystem::remove(path);
  Answering answering;
  EXPECT_EQ(run(at(answering.daemon, {"generate", "--tokens", "4,5"})).code, kExitOk);
  EXPECT_THAT(answering.asked().tokens().ids(), ::testing::ElementsAre(4, 5));
  EXPECT_EQ(run({"generate", "a", "--file", path}).code, kExitUsage);
  EXPECT_EQ(run({"generate", "--file", path}).code, kExitNotFound);
  const Outcome folder = run({"generate", "--file", std::filesystem::temp_directory_path().string()});
  EXPECT_EQ(folder.code, kExitUsage);
  EXPECT_THAT(folder.err, ::testing::HasSubstr("is a folder"));
}

TEST(Generate, PassesEveryField) {
  Answering answering;
  run(at(answering.daemon, {"generate",
                            "p",
                            "--model",
                            "m",
                            "-n",
                            "9",
                            "--temperature",
                            "0.5",
                            "--top-k",
                            "4",
                            "--top-p",
                            "0.25",
                            "--seed",
                            "18446744073709551615",
                            "--ignore-eos",
                            "--stop-tokens",
                            "7,8",
                            "--prefill",
                            "interleave",
                            "--decode",
                            "dcp2",
                            "--index",
                            "split",
                            "--no-prefix-cache",
                            "--cache-salt",
                            "s",
                            "--credit",
                            "6",
                            "--speculative",
                            "lookup",
                            "--draft-tokens",
                            "5"}));
  wire::GenerateRequest expected;
  expected.set_text("p");
  expected.set_model("m");
  expected.set_max_tokens(9);
  expected.set_temperature(0.5f);
  expected.set_top_k(4);
  expected.set_top_p(0.25f);
  expected.set_seed(~uint64_t{0});
  expected.set_ignore_eos(true);
  expected.add_stop_tokens(7);
  expected.add_stop_tokens(8);
  expected.set_prefill("interleave");
  expected.set_decode("dcp(2)");
  expected.set_index("split");
  expected.set_no_prefix_cache(true);
  expected.set_cache_salt("s");
  expected.set_credit(6);
  expected.set_speculative("lookup");
  expected.set_draft_tokens(5);
  EXPECT_EQ(answering.asked().DebugString(), expected.DebugString());
}

TEST(Generate, AnswersInJson) {
  Answering answering;
  const Outcome outcome = run(at(answering.daemon, {"generate", "p", "--digest", "-o", "json"}));
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  const Json document = Json::parse(outcome.out, nullptr, false);
  ASSERT_TRUE(document.is_object()) << outcome.out;
  EXPECT_EQ(document["schema"], 1);
  const Json& answer = document["generate"];
  EXPECT_EQ(answer["text"], "ab");
  EXPECT_EQ(answer["tokens"], (std::vector<int>{97, 98}));
  EXPECT_EQ(answer["reason"], "length");
  EXPECT_EQ(answer["usage"]["prompt_tokens"], 5);
  EXPECT_EQ(answer["digest"]["positions"], 2);
  EXPECT_EQ(answer["digest"]["first"], 0);
  EXPECT_EQ(answer["digest"]["last"], 1);
  // SHA-256 of 32 times '0' and 32 times '1', by coreutils.
  EXPECT_EQ(answer["digest"]["sha256"], "b11c187293f67c5a4fca84d509b3354537528291ae4d1f9315b9868b02f4305a");
}

TEST(Generate, AFailedStreamFails) {
  Answering failing;
  failing.reason = "error";
  const Outcome failed = run(at(failing.daemon, {"generate", "p"}));
  EXPECT_EQ(failed.code, kExitFailed);
  EXPECT_EQ(failed.out, "ab\n") << "what there was is shown";
  EXPECT_THAT(failed.err, HasSubstr("error: numerical"));
}

TEST(Generate, OfAStreamThatBreaksOffWhatCameIsShown) {
  FakeDaemon silent(
      [](const wire::ClientRequest& request, const FakeDaemon::Send& send) {
        if (!request.has_generate()) return;
        wire::ClientReply reply;
        reply.mutable_accepted()->set_request(3);
        send(reply);
        reply.mutable_token()->set_token(97);
        reply.mutable_token()->set_text("a");
        send(reply);
      },
      [](const wire::ControlRequest&) {
        wire::ControlReply reply;
        reply.mutable_status();
        return test::framed(reply);
      });
  const Outcome outcome = run(at(silent, {"generate", "p", "--timeout", "0.5", "-o", "json"}));
  EXPECT_EQ(outcome.code, kExitTimeout);
  EXPECT_EQ(outcome.out, "");
  const Json document = Json::parse(outcome.err, nullptr, false);
  ASSERT_TRUE(document.is_object()) << outcome.err;
  EXPECT_EQ(document["error"]["code"], "deadline_exceeded");
  EXPECT_EQ(document["generate"], (Json{{"request", 3}, {"text", "a"}, {"tokens", {97}}}));
}

TEST(Generate, ARefusedStreamWritesNothing) {
  Answering refusing;
  refusing.reason = "error";
  refusing.tokens = 0;
  const Outcome refused = run(at(refusing.daemon, {"generate", "p"}));
  EXPECT_EQ(refused.code, kExitFailed);
  EXPECT_EQ(refused.out, "");
  Answering failing;
  failing.reason = "error";
  const Outcome json = run(at(failing.daemon, {"generate", "p", "-o", "json"}));
  EXPECT_EQ(json.out, "");
  const Json document = Json::parse(json.err, nullptr, false);
  EXPECT_EQ(document["error"]["code"], "numerical");
  EXPECT_EQ(document["generate"]["text"], "ab");
}

// Cancelled by somebody else: a failure, but not an interrupt.
TEST(Generate, ACancelledStreamIsNotAnInterrupt) {
  Answering cancelled;
  cancelled.reason = "cancelled";
  const Outcome outcome = run(at(cancelled.daemon, {"generate", "p"}));
  EXPECT_EQ(outcome.code, kExitFailed);
  EXPECT_EQ(outcome.err, "error: cancelled: the request was cancelled\n");
}

TEST(PositionDigests, OrderAndRepetitionDoNotMatter) {
  PositionDigests up, down;
  for (uint64_t p = 0; p < 10; ++p) up.add(p, std::string(32, static_cast<char>(p)));
  for (uint64_t p = 10; p-- > 0;) {
    down.add(p, std::string(32, static_cast<char>(p)));
    down.add(p, std::string(32, static_cast<char>(p)));
  }
  EXPECT_EQ(*up.hex_digest(), *down.hex_digest());
  PositionDigests other;
  for (uint64_t p = 0; p < 10; ++p) other.add(p, std::string(32, static_cast<char>(p == 4 ? 99 : p)));
  EXPECT_NE(*up.hex_digest(), *other.hex_digest());
  down.add(4, std::string(32, 'x'));
  ASSERT_FALSE(down.hex_digest());
  EXPECT_EQ(down.hex_digest().error().code, ErrorCode::kInternal);
}

}  // namespace
}  // namespace weft::ctl
