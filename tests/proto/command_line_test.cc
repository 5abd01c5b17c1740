// What all programs' command lines share: limits, errors with hints, help.
#include "proto/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <sstream>

namespace weft::command_line {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using Words = std::vector<std::string>;

// A program with an option of every kind.
struct Program {
  int64_t workers = 2, tokens = 0, pool = 0;
  uint64_t seed = 0;
  double deadline = 1.5;
  std::vector<int64_t> sizes = {8, 16};
  std::string folder, form = "table", name;
  bool list = false;
  CLI::App app{"Says what a program is for.", "weft-program"};

  Program() {
    app.set_version_flag("--version", "weft-program 1");
    app.add_option("--out", folder, "where to write")->type_name("FOLDER")->required();
    app.add_option("--workers", workers, "processes")
        ->type_name("N")
        ->check(between(int64_t{1}, int64_t{8}))
        ->capture_default_str();
    app.add_option("--tokens", tokens, "tokens")->type_name("N")->check(at_least(1));
    auto* size = app.add_option("--pool-bytes", pool, "memory")->type_name("SIZE")->transform(byte_size());
    size->excludes(app.get_option("--tokens"));
    app.add_option("--seed", seed, "seed")->type_name("N")->check(decimal<uint64_t>());
    app.add_option("--deadline", deadline, "patience")
        ->type_name("SECONDS")
        ->check(between(0.1, 86400.0))
        ->capture_default_str()
        ->group("Watching");
    app.add_option("--sizes", sizes, "sizes")
        ->type_name("LIST")
        ->delimiter(',')
        ->check(between(int64_t{1}, int64_t{64}))
        ->capture_default_str();
    auto* flag = app.add_flag("-l,--list", list, "list what there is");
    app.add_option("-o,--output", form, "form of the list")
        ->type_name("FORM")
        ->check(one_of({"table", "lines", "json"}))
        ->needs(flag)
        ->capture_default_str();
  }

  Result<Asked> parse(Words words) {
    words.insert(words.begin(), {"--out", "/x"});
    return parse_words(app, words);
  }
};

TEST(ParseWords, FillsInWhatIsGood) {
  Program program;
  const auto asked = program.parse({"--workers", "8", "--pool-bytes", "3MiB", "--seed=18446744073709551615",
                                    "--deadline", "0.1", "--sizes", "1,64", "-l", "-o", "json"});
  ASSERT_TRUE(asked) << asked.error().text();
  EXPECT_EQ(*asked, Asked::kRun);
  EXPECT_EQ(program.workers, 8);
  EXPECT_EQ(program.pool, 3 << 20);
  EXPECT_EQ(program.seed, std::numeric_limits<uint64_t>::max());
  EXPECT_DOUBLE_EQ(program.deadline, 0.1);
  EXPECT_EQ(program.sizes, (std::vector<int64_t>{1, 64}));
  EXPECT_EQ(program.form, "json");
}

TEST(ParseWords, HelpAndVersionWinOverWhatIsMissing) {
  for (const char* word : {"-h", "--help"}) {
    Program program;
    EXPECT_EQ(*parse_words(program.app, {word}), Asked::kHelp);
  }
  Program program;
  EXPECT_EQ(*parse_words(program.app, {"--version"}), Asked::kVersion);
}

TEST(ParseWords, EveryFaultIsOneSentence) {
  const std::pair<Words, const char*> cases[] = {
      {{"--workers", "9"}, "--workers: must be a whole number, 1 to 8, not \"9\""},
      {{"--workers", "0"}, "--workers: must be a whole number, 1 to 8, not \"0\""},
      {{"--workers", " 7"}, "not \" 7\""},
      {{"--workers", "0x2"}, "not \"0x2\""},
      {{"--workers", "2.0"}, "not \"2.0\""},
      {{"--workers"}, "--workers: needs a value"},
      {{"--workers", "2", "--workers", "3"}, "--workers: is given more than once"},
      {{"--tokens", "0"}, "--tokens: must be a whole number, at least 1, not \"0\""},
      {{"--seed", "-1"}, "--seed: must be a whole number, not \"-1\""},
      {{"--seed", "18446744073709551616"}, "not \"18446744073709551616\""},
      {{"--deadline", "0"}, "--deadline: must be a number, 0.1 to 86400, not \"0\""},
      {{"--deadline", "nan"}, "not \"nan\""},
      {{"--deadline", "inf"}, "not \"inf\""},
      {{"--sizes", "1,65"}, "--sizes: must be a whole number, 1 to 64, not \"65\""},
      {{"-l", "-o", "xml"}, "--output: \"xml\" is none of table, lines, json"},
      {{"-o", "json"}, "--output: requires --list"},
      {{"--pool-bytes", "5x"}, "--pool-bytes: must be a size such as 65536, 512MiB or 4GiB, not \"5x\""},
      {{"--pool-bytes", "-5"}, "not \"-5\""},
      {{"--pool-bytes", "9000000TiB"}, "not \"9000000TiB\""},
      {{"--pool-bytes", "5", "--tokens", "5"}, "excludes"},
      {{"--wokers", "3"}, "unknown option --wokers; did you mean --workers?"},
      {{"--wokers=3"}, "unknown option --wokers; did you mean --workers?"},
      {{"--frobnicate"}, "unknown option --frobnicate (see"},
      {{"-x"}, "unknown option -x (see"},
      {{"surplus"}, "\"surplus\" is one word too many"}};
  for (const auto& [words, text] : cases) {
    Program program;
    const auto asked = program.parse(words);
    ASSERT_FALSE(asked) << text;
    EXPECT_EQ(asked.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(asked.error().text(), HasSubstr(text));
    EXPECT_THAT(asked.error().message, HasSubstr(" (see weft-program --help)"));
    EXPECT_THAT(asked.error().message, Not(HasSubstr("\n")));
  }
}

TEST(ParseWords, TheFieldIsTheOptionsName) {
  const std::pair<Words, const char*> cases[] = {{{"--workers", "9"}, "--workers"},
                                                 {{"--workers"}, "--workers"},
                                                 {{"--workers", "2", "--workers", "3"}, "--workers"},
                                                 {{"-l", "-o", "xml"}, "--output"},
                                                 {{"-o", "json"}, "--output"},
                                                 {{"--pool-bytes", "5", "--tokens", "5"}, "--tokens"},
                                                 {{"--wokers", "3"}, ""},
                                                 {{"surplus"}, ""}};
  for (const auto& [words, field] : cases) {
    Program program;
    const auto asked = program.parse(words);
    ASSERT_FALSE(asked) << words.front();
    EXPECT_EQ(asked.error().field, field) << asked.error().text();
  }
  Program program;
  const auto asked = parse_words(program.app, {});
  ASSERT_FALSE(asked);
  EXPECT_EQ(asked.error().text(), "invalid_argument: --out: is required (see weft-program --help)");
}

TEST(ByteSize, KnowsItsUnits) {
  const std::pair<const char*, int64_t> cases[] = {{"0", 0},
                                                   {"65536", 65536},
                                                   {"1KiB", 1024},
                                                   {"512MiB", int64_t{512} << 20},
                                                   {"4GiB", int64_t{4} << 30},
                                                   {"2TiB", int64_t{2} << 40}};
  for (const auto& [text, bytes] : cases) {
    Program program;
    ASSERT_TRUE(program.parse({"--pool-bytes", text})) << text;
    EXPECT_EQ(program.pool, bytes);
  }
}

TEST(HelpText, IsForPeople) {
  Program program;
  EXPECT_EQ(help_text(program.app), R"(Says what a program is for.

Usage: weft-program --out FOLDER [options]

Options
  -h, --help          this help
  --version           the version
  --out FOLDER        where to write
  --workers N         processes; 1 to 8; default 2
  --tokens N          tokens; at least 1; not with --pool-bytes
  --pool-bytes SIZE   memory; not with --tokens
  --seed N            seed
  --sizes LIST        sizes; 1 to 64; default 8,16
  -l, --list          list what there is
  -o, --output FORM   form of the list; table, lines or json; default table; only with --list

Watching
  --deadline SECONDS  patience; 0.1 to 86400; default 1.5
)");
}

TEST(NearestWord, FindsTheWordThatWasMeant) {
  const Words words = {"status", "requests", "regroup", "workers", "stop", "--watch", "--wait"};
  const std::pair<const char*, const char*> cases[] = {{"status", "status"},
                                                       {"stauts", "status"},
                                                       {"stat", "status"},
                                                       {"sttaus", "status"},
                                                       {"worker", "workers"},
                                                       {"regruop", "regroup"},
                                                       {"req", "requests"},
                                                       {"stpo", "stop"},
                                                       {"--wathc", "--watch"},
                                                       {"--wiat", "--wait"},
                                                       {"kill", ""},
                                                       {"x", ""},
                                                       {"", ""},
                                                       {"frobnicate", ""},
                                                       {"list", ""}};
  for (const auto& [word, expected] : cases) EXPECT_EQ(nearest_word(word, words), expected) << word;
}

TEST(Wrapped, KeepsToTheWidthAndToTheWords) {
  std::string text;
  for (int i = 0; i < 60; ++i) text += "w\u00f6rd" + std::to_string(i) + " ";
  const std::string out = wrapped(text, 10);
  std::istringstream lines(out);
  std::string line, all;
  for (int number = 0; std::getline(lines, line); ++number) {
    EXPECT_LE(character_count(line) + (number == 0 ? 10 : 0), 100u) << line;
    if (number > 0) {
      EXPECT_EQ(line.find_first_not_of(" "), 10u);
    }
    std::istringstream words(line);
    for (std::string word; words >> word;) all += word + " ";
  }
  EXPECT_EQ(all, text);
  EXPECT_EQ(wrapped("", 4), "\n");
  EXPECT_EQ(wrapped(std::string(200, 'x'), 4), std::string(200, 'x') + "\n") << "a long word stays whole";
}

TEST(TwoColumns, LineUpByCharacters) {
  EXPECT_EQ(two_columns({{"a", "one"}, {"\u00e9\u00e9\u00e9", "two"}}),
            "  a    one\n  \u00e9\u00e9\u00e9  two\n");
  EXPECT_EQ(two_columns({{"a", "one"}}, 4), "  a     one\n");
}

}  // namespace
}  // namespace weft::command_line
