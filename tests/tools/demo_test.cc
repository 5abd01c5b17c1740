// The demo: what its prompt keeps, and that its report tells a good run from each kind of bad one.
//
// The fake daemon answers as the recall model should: for every byte it looks up what followed the last 16
// bytes earlier in the prompt. So the prompt, and not a script, decides the answers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "proto/utf8.h"
#include "proto/vocab/random.h"
#include "tests/tools/fake_daemon.h"
#include "tools/ctl/json.h"
#include "tools/demo/long_prompt.h"
#include "tools/demo/report.h"
#include "tools/demo/run.h"
#include "tools/demo/source_text.h"

namespace weft::demo {
namespace {

using test::FakeDaemon;
using ::testing::HasSubstr;

// Text with many near misses of the facts, and characters of one to four bytes.
std::string tricky_source(uint64_t seed, size_t bytes) {
  static constexpr const char* kPieces[] = {"The passkey of station Vega-7c41 was ",
                                            "station ",
                                            "is 20586.",
                                            "\n",
                                            " is ",
                                            "\u00e9",
                                            "\u20ac",
                                            "\U0001F600",
                                            "The passkey of ",
                                            "abc "};
  SplitMix64 random(seed);
  std::string out;
  while (out.size() < bytes) out += kPieces[random.below(std::size(kPieces))];
  return out;
}

void expect_kept(const LongPrompt& prompt, size_t tokens) {
  EXPECT_EQ(prompt.first().size(), tokens);
  EXPECT_TRUE(is_utf8(prompt.first()));
  ASSERT_EQ(prompt.facts.size(), 3u);
  const double places[] = {0.15, 0.50, 0.85};
  for (size_t i = 0; i < 3; ++i) {
    const Fact& fact = prompt.facts[i];
    const std::string line = fact.stem + fact.answer;
    EXPECT_EQ(occurrences(prompt.document, line), 1u) << line;
    EXPECT_EQ(prompt.document.find(line), fact.offset);
    EXPECT_EQ(prompt.document[fact.offset - 1], '\n');
    EXPECT_EQ(prompt.document[fact.offset + line.size()], '\n');
    EXPECT_NEAR(static_cast<double>(fact.offset) / static_cast<double>(tokens), places[i],
                0.03 + 400.0 / static_cast<double>(tokens));
    EXPECT_EQ(fact.question(), "\n\n" + fact.stem);
    EXPECT_EQ(fact.answer.size(), 7u);
    for (size_t end = fact.stem.size(); end < line.size(); ++end) {
      EXPECT_EQ(occurrences(prompt.document, line.substr(end - 16, 16)), 1u)
          << "byte " << end << " of " << line;
    }
  }
}

TEST(LongPrompt, KeepsItsPromisesForAnySourceAndSize) {
  const uint64_t seed = 20240;
  SplitMix64 random(seed);
  for (int round = 0; round < 60; ++round) {
    PromptOptions options;
    options.tokens = kLeastTokens + random.below(30000);
    options.seed = random.next();
    const size_t source = random.below(3) == 0 ? 0 : random.below(2 * options.tokens);
    options.source = tricky_source(options.seed, source);
    SCOPED_TRACE("seed " + std::to_string(seed) + " round " + std::to_string(round));
    const auto prompt = build_prompt(options);
    ASSERT_TRUE(prompt) << prompt.error().text();
    expect_kept(*prompt, options.tokens);
    const auto again = build_prompt(options);
    EXPECT_EQ(again->document, prompt->document);
    options.seed += 1;
    EXPECT_NE(build_prompt(options)->facts[0].stem, prompt->facts[0].stem);
  }
}

TEST(LongPrompt, TheLicencesMakeAPrompt) {
  const auto source = read_source(kDefaultFolder);
  if (!source) GTEST_SKIP() << "this system ships no licences";
  for (const size_t tokens : {size_t{32768}, size_t{131072}, size_t{1} << 20}) {
    const auto prompt = build_prompt({tokens, 7, source->text});
    ASSERT_TRUE(prompt);
    expect_kept(*prompt, tokens);
    EXPECT_EQ(prompt->made_bytes > 0, tokens > source->text.size());
  }
}

TEST(LongPrompt, RefusesATinyOrHugeContext) {
  for (const size_t tokens : {kLeastTokens - 1, kMostTokens + 1, ~size_t{0}}) {
    const auto prompt = build_prompt({tokens, 1, ""});
    ASSERT_FALSE(prompt);
    EXPECT_EQ(prompt.error().code, ErrorCode::kInvalidArgument);
  }
}

// A source that is nothing but one repeated fact leaves no unique suffix only if the draw hits it.
TEST(LongPrompt, DrawsAgainWhenAFactDoesNotStandOut) {
  PromptOptions options{8192, 99, ""};
  const auto first = build_prompt(options);
  ASSERT_TRUE(first);
  const std::string line = first->facts[1].stem + first->facts[1].answer + "\n";
  while (options.source.size() < 4000) options.source += line;
  const auto second = build_prompt(options);
  ASSERT_TRUE(second);
  for (const Fact& fact : second->facts) EXPECT_NE(fact.stem, first->facts[1].stem);
  expect_kept(*second, options.tokens);
}

TEST(SourceText, MadeTextRepeatsNoLine) {
  const std::string text = made_text(5, 300'000);
  EXPECT_GE(text.size(), 300'000u);
  EXPECT_EQ(text, made_text(5, 300'000));
  EXPECT_NE(text.substr(0, 1000), made_text(6, 1000).substr(0, 1000));
  std::istringstream lines(text);
  std::set<std::string> seen;
  std::string line;
  while (std::getline(lines, line)) EXPECT_TRUE(seen.insert(line).second) << line;
}

TEST(SourceText, AFolderCountsEachContentOnce) {
  namespace fs = std::filesystem;
  const fs::path folder = "/tmp/weft-source-" + std::to_string(::getpid());
  fs::create_directory(folder);
  std::ofstream(folder / "b") << "second";
  std::ofstream(folder / "a") << "first";
  std::ofstream(folder / "c") << "second";
  std::ofstream(folder / "y") << "caf\xe9 noir";
  std::ofstream(folder / "z") << "caf\u00e9" << '\0';
  fs::create_symlink("a", folder / "link");
  const auto text = read_source(folder);
  const auto file = read_source(folder / "b");
  const auto garbled = read_source(folder / "y");
  for (const char* name : {"a", "b", "c", "z", "link"}) fs::remove(folder / name);
  const auto nothing_else = read_source(folder);
  fs::remove_all(folder);
  ASSERT_TRUE(text && file);
  EXPECT_EQ(text->text, "first\n\nsecond\n\ncaf\u00e9\n\n");
  EXPECT_EQ(text->skipped_files, 1u);
  EXPECT_EQ(file->text, "second");
  EXPECT_EQ(file->skipped_files, 0u);
  ASSERT_FALSE(garbled);
  EXPECT_EQ(garbled.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(garbled.error().field, "--file");
  EXPECT_EQ(garbled.error().message, (folder / "y").string() + " is not UTF-8: byte 3 begins no character");
  ASSERT_FALSE(nothing_else);
  EXPECT_THAT(nothing_else.error().message, HasSubstr("(1 file skipped: it is not UTF-8)"));
  const auto missing = read_source(folder);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
}

// ---- the whole demo against a daemon that looks things up

// Of the 129 blocks of the first turn's 8,192 prompt tokens and 6 decoded ones.
constexpr uint64_t kPageBytes = 4096, kBlocks = 129;

struct Lookup {
  uint64_t max_context = 1 << 20;
  bool refuses = false;           // the first request
  uint64_t blocks_per_rank = 32;  // as dcp(4) has them, but for the last block
  uint64_t switch_bytes = 0;
  bool caches = true;
  bool forgets = false;       // answers nonsense to the second question
  uint64_t extra_tokens = 0;  // a tokenizer that is not one token per byte
  std::vector<std::string> prompts;
  FakeDaemon daemon{
      [this](const wire::ClientRequest& request, const FakeDaemon::Send& send) { answer(request, send); },
      [this](const wire::ControlRequest&) {
        wire::ControlReply reply;
        reply.mutable_status()->set_state("ready");
        reply.mutable_status()->set_workers(4);
        reply.mutable_status()->set_cache_dtype("fp8");
        reply.mutable_status()->set_block_tokens(64);
        reply.mutable_status()->set_max_context(max_context);
        for (uint32_t rank = 0; rank < 4; ++rank) {
          auto& pool = *reply.mutable_status()->add_pools();
          pool.set_rank(rank);
          pool.mutable_entries()->set_page_bytes(kPageBytes);
        }
        return test::framed(reply);
      }};

  void answer(const wire::ClientRequest& request, const FakeDaemon::Send& send) {
    std::string text = request.generate().text();
    EXPECT_EQ(request.generate().cache_salt(), "salt") << "turns share the cache";
    const uint64_t shared = prompts.empty() || !caches ? 0 : prompts.back().size() / 64 * 64;
    prompts.push_back(text);
    wire::ClientReply reply;
    if (refuses) {
      reply.mutable_error()->set_code(wire::ERROR_TOO_LARGE);
      send(reply);
      return;
    }
    reply.mutable_accepted()->set_request(prompts.size());
    reply.mutable_accepted()->set_prompt_tokens(text.size() + extra_tokens);
    send(reply);
    for (uint64_t i = 0; i < request.generate().max_tokens(); ++i) {
      const size_t found = text.find(text.substr(text.size() - 16));
      const char next = forgets && prompts.size() == 2 ? '?' : text[found + 16];
      text += next;
      reply.mutable_token()->set_index(i);
      reply.mutable_token()->set_text(std::string(1, next));
      send(reply);
    }
    auto& finished = *reply.mutable_finished();
    finished.set_reason("length");
    finished.mutable_usage()->set_prompt_tokens(prompts.back().size() + extra_tokens);
    finished.mutable_usage()->set_cached_tokens(shared);
    finished.mutable_usage()->set_computed_tokens(prompts.back().size() + extra_tokens - shared);
    finished.mutable_usage()->set_completion_tokens(request.generate().max_tokens());
    finished.mutable_trace()->set_prefill("zigzag");
    finished.mutable_trace()->set_decode("dcp(4)");
    for (const char* decode : {"tp", "dcp(4)"}) {  // regrouped on the way
      auto& line = *finished.mutable_trace()->add_decodes();
      line.set_decode(decode);
      line.set_index("split");
      line.set_tokens(3);
      line.set_steps(3);
      line.set_time_ns(100'000'000);
    }
    finished.mutable_trace()->set_prefill_ns(1'000'000'000);
    finished.mutable_trace()->set_switch_bytes(switch_bytes);
    finished.mutable_trace()->mutable_prefill_crossed()->set_rows(12345);
    for (uint32_t rank = 0; rank < 4; ++rank) {
      auto& stored = *finished.mutable_trace()->add_stored();
      stored.set_rank(rank);
      stored.set_entries(blocks_per_rank * kPageBytes);
    }
    send(reply);
  }
};

struct DemoOutcome {
  bool good = false;
  std::string out;
  ctl::Json json;
};

DemoOutcome demo(const Lookup& lookup, const std::string& output) {
  std::istringstream in;
  std::ostringstream out, err;
  ctl::Context context{{}, in, out, err, {}};
  context.arguments.state_dir = lookup.daemon.folder();
  context.arguments.output = output;
  context.arguments.timeout_s = 60;
  const auto outcome = run_demo({8192, "", 11, "salt"}, context);
  EXPECT_TRUE(outcome) << outcome.error().text();
  DemoOutcome result{outcome && *outcome, out.str(), {}};
  if (output == "json") result.json = ctl::Json::parse(result.out, nullptr, false);
  return result;
}

TEST(Demo, AGoodRunIsReportedAsGood) {
  Lookup lookup;
  const DemoOutcome outcome = demo(lookup, "table");
  EXPECT_TRUE(outcome.good) << outcome.out;
  for (const char* text :
       {"cache     fp8", "All 3 answers are right.", "Moved at the switch from prefill to decode: 0 B",
        "zigzag", "dcp(4)", "8,192", "25 %", "12.1 KiB", "The document was read once.",
        "decode   tp, index split", "decode   dcp(4), index split",
        "The first token of an answer comes from prefill"}) {
    EXPECT_THAT(outcome.out, HasSubstr(text));
  }
  lookup.daemon.stop();  // its thread wrote them
  ASSERT_EQ(lookup.prompts.size(), 3u);
  EXPECT_EQ(lookup.prompts[0].size(), 8192u);
  for (size_t i = 1; i < 3; ++i)
    EXPECT_EQ(lookup.prompts[i].rfind(lookup.prompts[i - 1], 0), 0u) << "a turn goes on";
}

// A rank's share is that of a whole copy, not of what all ranks store together.
TEST(Demo, SharesAreOfOneCopy) {
  Lookup split;
  const DemoOutcome quarter = demo(split, "table");
  EXPECT_THAT(quarter.out, HasSubstr("of one copy"));
  EXPECT_THAT(quarter.out, HasSubstr("128.0 KiB         25 %"));
  EXPECT_THAT(quarter.out, HasSubstr("One copy of all tokens' entries has 516.0 KiB."));
  Lookup whole;
  whole.blocks_per_rank = kBlocks;
  EXPECT_THAT(demo(whole, "table").out, HasSubstr("516.0 KiB        100 %"));
}

struct Refused {
  Error error;
  std::string out;
  size_t requests;
};

Refused refused(Lookup& lookup) {
  std::istringstream in;
  std::ostringstream out, err;
  ctl::Context context{{}, in, out, err, {}};
  context.arguments.state_dir = lookup.daemon.folder();
  context.arguments.timeout_s = 60;
  const auto outcome = run_demo({8192, "", 11, "salt"}, context);
  EXPECT_FALSE(outcome);
  return {outcome ? Error{} : outcome.error(), out.str(), lookup.prompts.size()};
}

TEST(Demo, ARefusalComesBeforeAnyWord) {
  Lookup small;  // room for the document, but not for all three turns
  small.max_context = 8192 + 64;
  const Refused room = refused(small);
  EXPECT_EQ(room.error.code, ErrorCode::kTooLarge);
  EXPECT_EQ(room.error.field, "--context");
  EXPECT_THAT(room.error.message, HasSubstr("the daemon takes up to 8,256"));
  EXPECT_EQ(room.out, "");
  EXPECT_EQ(room.requests, 0u);
  Lookup full;
  full.refuses = true;
  const Refused pool = refused(full);
  EXPECT_EQ(pool.error.code, ErrorCode::kTooLarge);
  EXPECT_EQ(pool.out, "");
  EXPECT_EQ(pool.requests, 1u);
}

TEST(Demo, JsonHasTheSameFacts) {
  Lookup lookup;
  const DemoOutcome outcome = demo(lookup, "json");
  ASSERT_TRUE(outcome.json.is_object()) << outcome.out;
  EXPECT_EQ(outcome.json["schema"], 1);
  const auto& json = outcome.json["demo"];
  EXPECT_EQ(json["ok"], true);
  EXPECT_EQ(json["context"], 8192);
  EXPECT_EQ(json["switch_bytes"], 0);
  EXPECT_EQ(json["turns"].size(), 3u);
  EXPECT_EQ(json["turns"][2]["right"], true);
  EXPECT_EQ(json["turns"][0]["expected"], json["turns"][0]["answered"]);
}

TEST(Demo, EachFaultFailsIt) {
  const auto faults_of = [](const std::function<void(Lookup&)>& break_it) {
    Lookup lookup;
    break_it(lookup);
    const DemoOutcome outcome = demo(lookup, "json");
    EXPECT_FALSE(outcome.good);
    const auto& faults = outcome.json["demo"]["faults"];
    EXPECT_EQ(faults.size(), 1u) << faults.dump();
    return faults.empty() ? std::string() : faults[0].get<std::string>();
  };
  EXPECT_THAT(faults_of([](Lookup& l) { l.switch_bytes = 1024; }), HasSubstr("moved at the switch"));
  EXPECT_THAT(faults_of([](Lookup& l) { l.forgets = true; }), HasSubstr("instead of"));
  EXPECT_THAT(faults_of([](Lookup& l) { l.caches = false; }), HasSubstr("prefix cache"));
  EXPECT_THAT(faults_of([](Lookup& l) { l.extra_tokens = 1; }), HasSubstr("8,193 tokens"));
}

}  // namespace
}  // namespace weft::demo
