// daemon/text: ids equal those of the `tokenizers` package (data/tokenizer_cases.json, made by
// make_tokenizer_cases.py), fast paths equal a slow obvious BPE, broken files are typed errors that name the
// part, and streamed text is the same however tokens cut it.
#include "daemon/text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "daemon/text/bpe.h"
#include "daemon/text/byte_alphabet.h"
#include "proto/utf8.h"
#include "proto/vocab/random.h"

namespace weft::daemon {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json load_cases() {
  std::ifstream file(std::string(WEFT_SOURCE_DIR) + "/tests/daemon/data/tokenizer_cases.json");
  return json::parse(file);
}
const json& cases() {
  static const json all = load_cases();
  return all;
}

json with(json base, const json& override) {
  base.update(override);
  return base;
}

TEST(Tokenizer, IdsEqualTheReferencePackage) {
  size_t compared = 0;
  for (const json& variant : cases()["variants"]) {
    const auto name = variant["name"].get<std::string>();
    auto tokenizer = Tokenizer::parse(with(cases()["base"], variant["override"]).dump());
    ASSERT_TRUE(tokenizer) << name << ": " << tokenizer.error().text();
    for (size_t i = 0; i < cases()["texts"].size(); ++i) {
      const auto text = cases()["texts"][i].get<std::string>();
      EXPECT_EQ(tokenizer->encode(text).value(), variant["ids"][i].get<std::vector<uint32_t>>())
          << name << ": " << text;
      if (!variant["ids_plain"].is_null()) {
        EXPECT_EQ(tokenizer->encode(text, Tokenizer::Template::kSkip).value(),
                  variant["ids_plain"][i].get<std::vector<uint32_t>>())
            << name << ": " << text;
      }
      ++compared;
    }
  }
  EXPECT_GE(compared, 2000u);
}

TEST(Tokenizer, DecodeGivesTheTextBack) {
  // Variants that drop nothing; flags lstrip and rstrip swallow spaces, so texts with such tokens are left
  // out.
  for (const json& variant : cases()["variants"]) {
    if (variant["name"] == "removed" || variant["name"] == "inverted") continue;
    auto tokenizer = Tokenizer::parse(with(cases()["base"], variant["override"]).dump()).value();
    for (const json& item : cases()["texts"]) {
      const auto text = item.get<std::string>();
      if (text.find("<pad>") != std::string::npos || text.find("<mask>") != std::string::npos ||
          text.find("both") != std::string::npos) {
        continue;
      }
      const std::vector<uint32_t> tokens = tokenizer.encode(text, Tokenizer::Template::kSkip).value();
      std::string back;
      for (const uint32_t token : tokens) back += tokenizer.decode(token);
      EXPECT_EQ(back, text);
    }
  }
}

// Merges the best pair of a plain list again and again.
std::vector<std::string> naive_bpe(const json& merges, const std::string& piece) {
  std::vector<std::string> symbols;
  const auto alphabet = byte_alphabet();
  for (const char c : piece) {
    std::string spelled;
    append_utf8(alphabet[static_cast<uint8_t>(c)], spelled);
    symbols.push_back(spelled);
  }
  std::map<std::pair<std::string, std::string>, size_t> ranks;
  for (size_t r = 0; r < merges.size(); ++r) ranks[{merges[r][0], merges[r][1]}] = r;
  for (;;) {
    size_t best = SIZE_MAX, at = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = ranks.find({symbols[i], symbols[i + 1]});
      if (found != ranks.end() && found->second < best) best = found->second, at = i;
    }
    if (best == SIZE_MAX) return symbols;
    symbols[at] += symbols[at + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

TEST(Bpe, EqualsTheNaiveMerge) {
  const json& model = cases()["base"]["model"];
  const Bpe bpe = Bpe::parse(model).value();
  const uint64_t seed = 7;
  SplitMix64 random(seed);
  const std::string letters = "the and rsnio 12. \n\xC3\xA9\xE6\x9D\xB1";
  for (int round = 0; round < 300; ++round) {
    std::string piece;
    const uint64_t length = 1 + random.below(60);
    for (uint64_t i = 0; i < length; ++i) piece.push_back(letters[random.below(letters.size())]);
    std::vector<uint32_t> got;
    bpe.encode(piece, got);
    std::vector<uint32_t> expected;
    for (const std::string& symbol : naive_bpe(model["merges"], piece)) {
      expected.push_back(model["vocab"][symbol].get<uint32_t>());
    }
    ASSERT_EQ(got, expected) << "seed " << seed << " round " << round;
  }
}

TEST(Tokenizer, UnsupportedPartsAreNamed) {
  const json& base = cases()["base"];
  const auto byte_level = json{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  const std::vector<std::pair<json, std::string>> overrides = {
      {{{"normalizer", {{"type", "NFC"}}}}, "NFC"},
      {{{"truncation", {{"max_length", 5}}}}, "truncation"},
      {{{"padding", {{"strategy", "BatchLongest"}}}}, "padding"},
      {{{"pre_tokenizer", {{"type", "Metaspace"}}}}, "Metaspace"},
      {{{"pre_tokenizer", nullptr}}, "ByteLevel"},
      {{{"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", true}}}}, "add_prefix_space"},
      {{{"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {byte_level, byte_level}}}}},
       "after ByteLevel"},
      {{{"pre_tokenizer",
         {{"type", "Split"}, {"pattern", {{"Regex", "("}}}, {"behavior", "Isolated"}, {"invert", false}}}},
       "regular expression"},
      {{{"pre_tokenizer", {{"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Sideways"}}}},
       "Sideways"},
      {{{"decoder", nullptr}}, "decoder"},
      {{{"decoder", {{"type", "WordPiece"}}}}, "WordPiece"},
      {{{"post_processor", {{"type", "BertProcessing"}}}}, "BertProcessing"},
      {{{"model", {{"type", "Unigram"}}}}, "Unigram"},
      {{{"model", {{"type", "BPE"}, {"dropout", 0.1}}}}, "dropout"},
      {{{"model", {{"type", "BPE"}, {"end_of_word_suffix", "</w>"}}}}, "end_of_word_suffix"},
      {{{"model", {{"type", "BPE"}, {"vocab", {{"a", 0}}}, {"unk_token", "a"}}}}, "byte 0"},
      {{{"model", {{"type", "BPE"}, {"vocab", {{"a", 0}}}, {"byte_fallback", true}}}}, "byte_fallback"},
  };
  for (const auto& [override, named] : overrides) {
    const auto tokenizer = Tokenizer::parse(with(base, override).dump());
    ASSERT_FALSE(tokenizer) << override.dump();
    EXPECT_EQ(tokenizer.error().code, ErrorCode::kUnsupported) << tokenizer.error().text();
    EXPECT_THAT(tokenizer.error().text(), HasSubstr(named));
  }
}

// What is left of a text is encoded as if the bytes without a token were not there.
TEST(Tokenizer, BytesWithoutATokenAreLeftOut) {
  const json& base = cases()["base"];
  json poorer = base;
  poorer["model"]["merges"] = json::array();
  for (const json& merge : base["model"]["merges"]) {
    const auto whole = merge[0].get<std::string>() + merge[1].get<std::string>();
    if (whole.find('z') == std::string::npos) poorer["model"]["merges"].push_back(merge);
  }
  json same = poorer;
  poorer["model"]["vocab"].erase("z");
  const auto rich = Tokenizer::parse(same.dump()).value(), poor = Tokenizer::parse(poorer.dump()).value();
  for (const auto& [with, without] : std::vector<std::pair<std::string, std::string>>{
           {"z", ""}, {"zzz", ""}, {"thzez", "the"}, {"z and z", " and "}, {"1z2", "12"}}) {
    EXPECT_EQ(poor.encode(with).value(), rich.encode(without).value()) << with;
  }
}

TEST(Tokenizer, BrokenFilesAreNamed) {
  const json& base = cases()["base"];
  json no_model = base, twice = base, unknown_merge = base, odd_merge = base, clash = base, negative = base;
  no_model.erase("model");
  twice["model"]["vocab"]["!"] = 1;
  unknown_merge["model"]["merges"].push_back({"no", "where"});
  odd_merge["model"]["merges"][0] = "a b c";
  clash["added_tokens"][0]["id"] = 3;
  negative["model"]["vocab"]["!"] = -1;
  const json open_template = with(base, {{"post_processor",
                                          {{"type", "TemplateProcessing"},
                                           {"single", {{{"SpecialToken", {{"id", "<s>"}}}}}},
                                           {"special_tokens", {}}}}});
  for (const json& broken : {no_model, twice, unknown_merge, odd_merge, clash, negative, open_template}) {
    const auto tokenizer = Tokenizer::parse(broken.dump());
    ASSERT_FALSE(tokenizer);
    EXPECT_EQ(tokenizer.error().code, ErrorCode::kBadCheckpoint) << tokenizer.error().text();
    EXPECT_THAT(tokenizer.error().field, HasSubstr("tokenizer.json: "));
  }
  for (const char* text : {"", "{", "[]", "\"x\"", "{\"model\":", "nul"}) {
    EXPECT_EQ(Tokenizer::parse(text).error().code, ErrorCode::kBadCheckpoint) << text;
  }
  EXPECT_EQ(Tokenizer::load("/nonexistent").error().code, ErrorCode::kNotFound);
}

// Damages the file at random places: an error or a working tokenizer, never a crash.
TEST(Tokenizer, SurvivesDamagedFiles) {
  const std::string whole = with(cases()["base"], cases()["variants"][2]["override"]).dump();
  const uint64_t seed = 11;
  SplitMix64 random(seed);
  for (int round = 0; round < 150; ++round) {
    std::string damaged = whole;
    for (int edit = 0; edit < 3; ++edit) {
      const size_t at = random.below(2) == 0 ? random.below(damaged.size()) : random.below(2000);
      damaged[at] = "{}[]\",:0x"[random.below(9)];
    }
    const auto tokenizer = Tokenizer::parse(damaged);
    if (!tokenizer) continue;
    const auto tokens = tokenizer->encode("the word <|end|> 12");
    EXPECT_TRUE(tokens || tokens.error().code == ErrorCode::kTooLarge)
        << "seed " << seed << " round " << round;
  }
}

TEST(Tokenizer, TextThatIsNotUtf8IsRefusedWithItsOffset) {
  const auto tokenizer = Tokenizer::parse(cases()["base"].dump()).value();
  for (const std::string bad :
       {"abc\xFF", "abc\xC0\x80", "abc\xED\xA0\x80", "abc\xF4\x90\x80\x80", "abc\xE6\x9D"}) {
    const auto tokens = tokenizer.encode(bad);
    ASSERT_FALSE(tokens);
    EXPECT_EQ(tokens.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(tokens.error().message, HasSubstr("byte 3"));
  }
}

TEST(Tokenizer, ABacktrackingExpressionGivesUp) {
  const json split = {
      {"type", "Split"}, {"pattern", {{"Regex", "(a+)+$"}}}, {"behavior", "Isolated"}, {"invert", false}};
  const json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  const auto tokenizer = Tokenizer::parse(
      with(cases()["base"],
           {{"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}}}})
          .dump());
  ASSERT_TRUE(tokenizer) << tokenizer.error().text();
  EXPECT_EQ(tokenizer->encode(std::string(60, 'a') + "b").error().code, ErrorCode::kTooLarge);
}

TEST(Tokenizer, OneObjectServesManyThreads) {
  const auto tokenizer =
      Tokenizer::parse(with(cases()["base"], cases()["variants"][3]["override"]).dump()).value();
  const json& ids = cases()["variants"][3]["ids"];
  std::vector<std::thread> threads;
  std::array<size_t, 4> wrong{};
  for (size_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < ids.size(); ++i) {
        const auto got = tokenizer.encode(cases()["texts"][i].get_ref<const std::string&>());
        wrong[t] += got.value() != ids[i].get<std::vector<uint32_t>>();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(wrong, testing::Each(0u));
}

TEST(Tokenizer, SpecialsAndSizes) {
  const auto tokenizer = Tokenizer::parse(cases()["base"].dump()).value();
  const uint32_t end = tokenizer.added_token("<|end|>").value();
  EXPECT_TRUE(tokenizer.is_special(end));
  EXPECT_FALSE(tokenizer.is_special(tokenizer.added_token("word").value()));
  EXPECT_FALSE(tokenizer.is_special(0));
  EXPECT_FALSE(tokenizer.is_special(1u << 30));
  EXPECT_FALSE(tokenizer.added_token("<|nothing|>"));
  EXPECT_EQ(tokenizer.decode(end), "<|end|>");
  EXPECT_EQ(tokenizer.decode(1u << 30), "");
  EXPECT_EQ(tokenizer.size(),
            cases()["base"]["model"]["vocab"].size() + cases()["base"]["added_tokens"].size());
}

// Any cut of any bytes gives the same text as all at once, and always valid UTF-8.
TEST(StreamDecoder, CutsDoNotShow) {
  const uint64_t seed = 5;
  SplitMix64 random(seed);
  const std::string good = "a\xC3\xA9\xE6\x9D\xB1\xF0\x9F\x91\x8Dz";
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    for (int i = 0; i < 12; ++i) {
      if (random.below(3) == 0) {
        bytes.push_back(static_cast<char>(random.below(256)));
      } else {
        bytes += good.substr(random.below(good.size()), 1 + random.below(5));
      }
    }
    StreamDecoder once;
    std::string whole = once.push(bytes);
    whole += once.finish();
    EXPECT_EQ(utf8_valid_prefix(whole), whole.size());
    StreamDecoder cut;
    std::string streamed;
    for (size_t at = 0; at < bytes.size();) {
      const size_t length = 1 + random.below(3);
      const std::string part = cut.push(std::string_view(bytes).substr(at, length));
      EXPECT_EQ(utf8_valid_prefix(part), part.size());
      streamed += part;
      at += length;
    }
    streamed += cut.finish();
    ASSERT_EQ(streamed, whole) << "seed " << seed << " round " << round;
  }
}

TEST(StreamDecoder, HoldsBackAndMends) {
  StreamDecoder decoder;
  EXPECT_EQ(decoder.push("\xF0\x9F"), "");
  EXPECT_EQ(decoder.push("\x91\x8D!"), "\xF0\x9F\x91\x8D!");
  EXPECT_EQ(decoder.push("\xE6\x9D"), "");
  EXPECT_EQ(decoder.push("x"), "\xEF\xBF\xBDx");
  EXPECT_EQ(decoder.push("\xFF\xC3"), "\xEF\xBF\xBD");
  EXPECT_EQ(decoder.finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(decoder.finish(), "");
}

}  // namespace
}  // namespace weft::daemon
