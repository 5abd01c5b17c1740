// The journal keeps what it was told over a restart, and refuses a folder that it cannot have.
#include "daemon/journal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sqlite3.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temp_folder.h"

namespace weft::daemon {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class JournalTest : public testing::Test {
 protected:
  Journal must_open() {
    auto journal = Journal::open(folder_);
    CHECK(journal.has_value(), journal.error().text());
    return std::move(journal).value();
  }
  // What lies in the file: columns joined by '|', NULL for nothing.
  std::vector<std::string> rows(const std::string& query) const {
    sqlite3* database = nullptr;
    EXPECT_EQ(sqlite3_open((folder_ + "/journal.sqlite").c_str(), &database), SQLITE_OK);
    std::vector<std::string> out;
    const auto add = [](void* to, int count, char** values, char**) {
      std::string row;
      for (int i = 0; i < count; ++i) row += (i > 0 ? "|" : "") + std::string(values[i] ? values[i] : "NULL");
      static_cast<std::vector<std::string>*>(to)->push_back(std::move(row));
      return 0;
    };
    EXPECT_EQ(sqlite3_exec(database, query.c_str(), add, &out, nullptr), SQLITE_OK);
    sqlite3_close(database);
    return out;
  }
  test::TempFolder temporary_;
  const std::string folder_ = temporary_.path();
};

TEST_F(JournalTest, RemembersOverARestart) {
  {
    Journal journal = must_open();
    ASSERT_TRUE(journal.set_configuration({{"workers", "4"}, {"model", "/models/toy"}}).has_value());
    ASSERT_TRUE(journal.set_wanted({{"decode", "tp"}}).has_value());
    ASSERT_TRUE(journal.set_wanted({{"decode", "dcp(4)"}}).has_value());
    auto first = journal.begin_command("regroup", "--all --decode dcp(4)");
    ASSERT_TRUE(first.has_value());
    ASSERT_TRUE(journal.end_command(*first, "ok").has_value());
    ASSERT_TRUE(journal.begin_command("cancel", "7").has_value());  // and then the daemon dies
  }
  Journal journal = must_open();
  EXPECT_THAT(rows("SELECT value FROM configuration WHERE key = 'workers'"), ElementsAre("4"));
  EXPECT_EQ(journal.wanted("decode").value(), "dcp(4)");
  EXPECT_EQ(journal.wanted("prefill").value(), std::nullopt);
  EXPECT_THAT(rows("SELECT command, detail, outcome, at_ms > 0, done_ms > 0 FROM command ORDER BY id"),
              ElementsAre("regroup|--all --decode dcp(4)|ok|1|1", "cancel|7|NULL|1|NULL"));
}

TEST_F(JournalTest, HistoryIsTheLastLinesNewestLast) {
  Journal journal = must_open();
  EXPECT_TRUE(journal.history(5).value().empty());
  for (int i = 0; i < 4; ++i) {
    const int64_t id = journal.begin_command("drain", std::to_string(i)).value();
    if (i == 3) break;  // the daemon died
    const auto epoch = static_cast<uint32_t>(i);
    ASSERT_TRUE(journal.end_command(id, i == 1 ? "no room" : "ok", Epoch{epoch}).has_value());
  }
  const auto lines = journal.history(3).value();
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_EQ(lines[0].detail, "1");
  EXPECT_EQ(lines[0].outcome, "no room");
  EXPECT_EQ(lines[1].epoch, Epoch{2});
  EXPECT_EQ(lines[1].outcome, "ok");
  EXPECT_GT(lines[2].at_ms, 0);
  EXPECT_EQ(lines[2].epoch, Epoch{0});
  EXPECT_EQ(lines[2].outcome, std::nullopt);
}

TEST_F(JournalTest, AFileOfTheFirstVersionIsTakenOver) {
  sqlite3* database = nullptr;
  ASSERT_EQ(sqlite3_open((folder_ + "/journal.sqlite").c_str(), &database), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(database,
                         "CREATE TABLE configuration (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;"
                         "CREATE TABLE wanted (key TEXT PRIMARY KEY, value TEXT NOT NULL, changed_ms INTEGER "
                         "NOT NULL) STRICT;"
                         "CREATE TABLE command (id INTEGER PRIMARY KEY, at_ms INTEGER NOT NULL, command TEXT "
                         "NOT NULL, detail TEXT NOT NULL, outcome TEXT, done_ms INTEGER) STRICT;"
                         "INSERT INTO wanted VALUES ('decode', 'dcp(4)', 7);"
                         "INSERT INTO command VALUES (1, 7, 'cancel', '3', 'ok', 8);"
                         "PRAGMA user_version=1;",
                         nullptr, nullptr, nullptr),
            SQLITE_OK);
  sqlite3_close(database);
  Journal journal = must_open();
  EXPECT_EQ(journal.wanted("decode").value(), "dcp(4)");
  ASSERT_EQ(journal.history(9).value().size(), 1u);
  EXPECT_EQ(journal.history(9).value()[0].command, "cancel");
  ASSERT_TRUE(journal.end_command(1, "ok", Epoch{3}).has_value());
  EXPECT_EQ(journal.history(9).value()[0].epoch, Epoch{3});
}

TEST_F(JournalTest, ConfigurationIsReplacedWhole) {
  Journal journal = must_open();
  ASSERT_TRUE(journal.set_configuration({{"a", "1"}, {"b", "2"}}).has_value());
  ASSERT_TRUE(journal.set_configuration({{"b", "3"}}).has_value());
  EXPECT_THAT(rows("SELECT key, value FROM configuration"), ElementsAre("b|3"));
}

// What fails in the middle, or at its commit, leaves nothing behind: neither half of it nor an open
// transaction that later writes would vanish in.
TEST_F(JournalTest, AWriteThatFailsIsUndone) {
  Journal journal = must_open();
  ASSERT_TRUE(journal.set_wanted({{"decode", "tp"}, {"prefill", "none"}}).has_value());
  sqlite3* other = nullptr;
  ASSERT_EQ(sqlite3_open((folder_ + "/journal.sqlite").c_str(), &other), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(other,
                         "CREATE TRIGGER refuse BEFORE UPDATE ON wanted WHEN NEW.value = 'interleave' "
                         "BEGIN SELECT RAISE(FAIL, 'no'); END",
                         nullptr, nullptr, nullptr),
            SQLITE_OK);
  EXPECT_FALSE(journal.set_wanted({{"decode", "dp"}, {"prefill", "interleave"}}).has_value());
  EXPECT_EQ(journal.wanted("decode").value(), "tp");
  ASSERT_TRUE(journal.set_wanted({{"decode", "dcp(2)"}}).has_value());
  sqlite3_stmt* seen = nullptr;  // by another connection: it is committed
  ASSERT_EQ(sqlite3_prepare_v2(other, "SELECT value FROM wanted WHERE key = 'decode'", -1, &seen, nullptr),
            SQLITE_OK);
  ASSERT_EQ(sqlite3_step(seen), SQLITE_ROW);
  EXPECT_STREQ(reinterpret_cast<const char*>(sqlite3_column_text(seen, 0)), "dcp(2)");
  sqlite3_finalize(seen);
  sqlite3_close(other);
}

TEST_F(JournalTest, OldCommandsGoAtTheNextStart) {
  {
    Journal journal = must_open();
    ASSERT_TRUE(journal.begin_command("first", "").has_value());
    sqlite3* other = nullptr;
    ASSERT_EQ(sqlite3_open((folder_ + "/journal.sqlite").c_str(), &other), SQLITE_OK);
    const std::string later = "INSERT INTO command (id, at_ms, command, detail) VALUES (" +
                              std::to_string(Journal::kCommandsKept + 1) + ", 1, 'last', '')";
    EXPECT_EQ(sqlite3_exec(other, later.c_str(), nullptr, nullptr, nullptr), SQLITE_OK);
    sqlite3_close(other);
    EXPECT_EQ(rows("SELECT id FROM command").size(), 2u);
  }
  Journal journal = must_open();
  EXPECT_THAT(rows("SELECT command FROM command"), ElementsAre("last"));
}

TEST_F(JournalTest, SecondDaemonOnTheSameFolderIsRefused) {
  Journal journal = must_open();
  auto second = Journal::open(folder_);
  ASSERT_FALSE(second.has_value());
  EXPECT_EQ(second.error().code, ErrorCode::kFailedPrecondition);
  EXPECT_THAT(second.error().message,
              HasSubstr("in use by another weftd, process " + std::to_string(::getpid())));
}

TEST_F(JournalTest, UnwritableFolderIsNamed) {
  const std::string file = folder_ + "/file";
  std::ofstream(file) << "not a folder";
  for (const std::string& path : {file + "/state", std::string("/proc/weft-state")}) {
    auto journal = Journal::open(path);
    ASSERT_FALSE(journal.has_value());
    EXPECT_EQ(journal.error().code, ErrorCode::kIo);
    EXPECT_THAT(journal.error().message, HasSubstr("cannot write to state folder " + path));
  }
}

TEST_F(JournalTest, BrokenAndNewerFilesAreRefused) {
  {
    std::ofstream broken(folder_ + "/journal.sqlite");
    broken << std::string(5000, 'x');
  }
  auto journal = Journal::open(folder_);
  ASSERT_FALSE(journal.has_value());
  EXPECT_EQ(journal.error().code, ErrorCode::kIo);
  std::filesystem::remove(folder_ + "/journal.sqlite");
  {
    sqlite3* database = nullptr;
    ASSERT_EQ(sqlite3_open((folder_ + "/journal.sqlite").c_str(), &database), SQLITE_OK);
    ASSERT_EQ(sqlite3_exec(database, "PRAGMA user_version=99", nullptr, nullptr, nullptr), SQLITE_OK);
    sqlite3_close(database);
  }
  journal = Journal::open(folder_);
  ASSERT_FALSE(journal.has_value());
  EXPECT_EQ(journal.error().code, ErrorCode::kUnsupported);
  EXPECT_THAT(journal.error().message, HasSubstr("99"));
}

}  // namespace
}  // namespace weft::daemon
