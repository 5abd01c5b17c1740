// Goal: a real language model answers as an independent engine does, on any number of workers, and its bits
// do not depend on that number. Method: SmolLM2 as tools/models/smollm2.sh writes it (float32), through real
// processes; smollm2.json holds what `transformers` and `tokenizers` gave for the same folder. Skipped where
// the model is not there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "daemon/text/tokenizer.h"
#include "tests/integration/harness.h"

namespace weft::integration {
namespace {

using nlohmann::json;
using Tokens = std::vector<uint32_t>;

constexpr double kTie = 1e-3;  // logits this close may change places by rounding
constexpr Duration kLongPrompt = std::chrono::minutes(10);

std::string model_folder() {
  if (const char* folder = std::getenv("WEFT_SMOLLM2")) return folder;
  const char *data = std::getenv("XDG_DATA_HOME"), *home = std::getenv("HOME");
  const std::string base = data != nullptr   ? data
                           : home != nullptr ? std::string(home) + "/.local/share"
                                             : std::string();
  return base + "/weft/models/smollm2-135m-f32";
}

json read_json(const std::string& path) {
  std::ifstream file(path);
  return json::parse(file);
}

const json& expected() {
  static const json all = read_json(std::string(WEFT_SOURCE_DIR) + "/tests/models/smollm2.json");
  return all;
}

std::string text_of(const json& prompt) {
  if (prompt.contains("text")) return prompt["text"];
  const size_t begin = prompt["slice"][0], end = prompt["slice"][1];
  return expected()["long_text"].get_ref<const std::string&>().substr(begin, end - begin);
}

class SmolLM2 : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = model_folder();
    if (!std::filesystem::exists(folder_ + "/config.json")) {
      GTEST_SKIP() << "there is no " << folder_ << ": run tools/models/smollm2.sh";
    }
    ASSERT_EQ(read_json(folder_ + "/config.json")["torch_dtype"], "float32") << folder_;
  }
  std::string folder_;
};

TEST_F(SmolLM2, TokenIdsEqualTheReferencePackage) {
  const auto tokenizer = daemon::Tokenizer::load(folder_);
  ASSERT_TRUE(tokenizer) << tokenizer.error().text();
  size_t compared = 0;
  const auto compare = [&](const json& text, const json& ids) {
    EXPECT_EQ(tokenizer->encode(text.get<std::string>()).value(), ids.get<Tokens>()) << text;
    ++compared;
  };
  const json cases = read_json(std::string(WEFT_SOURCE_DIR) + "/tests/daemon/data/tokenizer_cases.json");
  for (size_t i = 0; i < cases["texts"].size(); ++i) {
    compare(cases["texts"][i], expected()["tokenizer_case_ids"][i]);
  }
  for (const json& one : expected()["tokenizer"]) compare(one["text"], one["ids"]);
  compare(expected()["long_text"], expected()["long_text_ids"]);
  EXPECT_GE(compared, 300u);
}

struct Got {
  Tokens tokens;
  uint64_t prompt_tokens = 0;
  std::vector<std::string> digests;  // by position
};

Got run(client::Client& client, const json& prompt, const std::string& decode) {
  Got out;
  wire::GenerateRequest request =
      text_request(text_of(prompt), static_cast<uint32_t>(prompt["answer"].size()));
  request.set_ignore_eos(true);
  request.set_decode(decode);
  request.set_digest(true);
  request.set_no_prefix_cache(true);  // slices share prefixes; every position is compared
  client::StreamHandlers handlers;
  handlers.token = [&](const wire::TokenEvent& event) { out.tokens.push_back(event.token()); };
  handlers.digest = [&](const wire::PositionDigest& digest) {
    if (out.digests.size() <= digest.position()) out.digests.resize(digest.position() + 1);
    out.digests[digest.position()] = digest.sha256();
  };
  const auto finished = client.generate(request, handlers, kLongPrompt);
  EXPECT_TRUE(finished.has_value()) << finished.error().text();
  if (!finished) return out;
  EXPECT_EQ(finished->reason(), "length") << finished->error().message();
  out.prompt_tokens = finished->usage().prompt_tokens();
  return out;
}

// Equal, or first different where the reference had two logits that close. Returns whether they are equal.
bool expect_answer(const json& prompt, const Got& got) {
  const auto want = prompt["answer"].get<Tokens>();
  EXPECT_EQ(got.prompt_tokens, prompt["prompt_tokens"].get<uint64_t>());
  EXPECT_EQ(got.tokens.size(), want.size());
  for (size_t i = 0; i < std::min(want.size(), got.tokens.size()); ++i) {
    if (got.tokens[i] == want[i]) continue;
    EXPECT_LT(prompt["gaps"][i].get<double>(), kTie)
        << "token " << i << " of the answer after " << got.prompt_tokens << " tokens";
    return false;
  }
  return true;
}

TEST_F(SmolLM2, AnswersAsTransformersDoesWithTheSameBitsOnAnyNumberOfWorkers) {
  const json& prompts = expected()["prompts"];
  ASSERT_EQ(prompts.size(), 20u);
  std::vector<Got> reference;
  for (const int workers : {1, 2, 3, 4}) {
    SCOPED_TRACE("workers: " + std::to_string(workers));
    const std::string n = std::to_string(workers);
    Daemon daemon({"--workers", n, "--pool-tokens", "8192"}, folder_);
    ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
    client::Client client = daemon.client();
    std::vector<std::string> decodes = {"tp", "dp"};
    if (workers > 1) decodes.push_back("dcp(" + n + ")");
    size_t equal = 0;
    for (size_t i = 0; i < prompts.size(); ++i) {
      SCOPED_TRACE("prompt " + std::to_string(i) + ", " + decodes[i % decodes.size()]);
      const Got got = run(client, prompts[i], decodes[i % decodes.size()]);
      equal += expect_answer(prompts[i], got) ? 1 : 0;
      EXPECT_EQ(got.digests.size(), got.prompt_tokens + got.tokens.size() - 1);
      if (workers == 1) reference.push_back(got);
      if (workers == 3) continue;  // no power of two: within tolerance, not to the bit
      EXPECT_EQ(got.tokens, reference[i].tokens);
      EXPECT_TRUE(got.digests == reference[i].digests) << "logits of some position differ";
    }
    std::printf("%d workers: %zu of %zu answers equal to the last token\n", workers, equal, prompts.size());
    EXPECT_GE(equal, prompts.size() / 2);  // ties are rare
    daemon.signal(SIGTERM);
    EXPECT_EQ(daemon.wait_exit(), 0);
    EXPECT_EQ(daemon.leftovers(), "");
  }
}

}  // namespace
}  // namespace weft::integration
