#include "daemon/journal.h"

#include <fcntl.h>
#include <sqlite3.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

namespace weft::daemon {
namespace {

constexpr const char* kSchema = R"sql(
  CREATE TABLE configuration (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
  CREATE TABLE wanted (key TEXT PRIMARY KEY, value TEXT NOT NULL, changed_ms INTEGER NOT NULL) STRICT;
  CREATE TABLE command (
    id INTEGER PRIMARY KEY,
    at_ms INTEGER NOT NULL,
    command TEXT NOT NULL,
    detail TEXT NOT NULL,
    outcome TEXT,
    done_ms INTEGER,
    epoch INTEGER
  ) STRICT;
)sql";
constexpr const char* kFromVersion1 = "ALTER TABLE command ADD COLUMN epoch INTEGER;";

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

Error sql_error(sqlite3* database, const std::string& what) {
  return error(ErrorCode::kIo, "journal: " + what + ": " + sqlite3_errmsg(database));
}

Result<void> execute(sqlite3* database, const char* sql) {
  if (sqlite3_exec(database, sql, nullptr, nullptr, nullptr) != SQLITE_OK)
    return sql_error(database, "write");
  return {};
}

class Statement {
 public:
  Statement(sqlite3* database, const char* sql) : database_(database) {
    ok_ = sqlite3_prepare_v2(database, sql, -1, &statement_, nullptr) == SQLITE_OK;
  }
  ~Statement() { sqlite3_finalize(statement_); }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  Statement& bind(const std::string& text) {
    ok_ = ok_ && sqlite3_bind_text(statement_, ++bound_, text.data(), static_cast<int>(text.size()),
                                   SQLITE_TRANSIENT) == SQLITE_OK;
    return *this;
  }
  Statement& bind(int64_t value) {
    ok_ = ok_ && sqlite3_bind_int64(statement_, ++bound_, value) == SQLITE_OK;
    return *this;
  }
  // True: a row is there; false: done.
  Result<bool> step() {
    if (!ok_) return sql_error(database_, "prepare");
    const int code = sqlite3_step(statement_);
    if (code == SQLITE_ROW) return true;
    if (code == SQLITE_DONE) return false;
    return sql_error(database_, "step");
  }
  Result<void> run() {
    TRY([[maybe_unused]] const bool row, step());
    return {};
  }
  int64_t integer(int column) const { return sqlite3_column_int64(statement_, column); }
  std::string text(int column) const {
    const auto* data = reinterpret_cast<const char*>(sqlite3_column_text(statement_, column));
    return data == nullptr ? std::string() : std::string(data, sqlite3_column_bytes(statement_, column));
  }

 private:
  sqlite3* database_;
  sqlite3_stmt* statement_ = nullptr;
  int bound_ = 0;
  bool ok_ = false;
};

Error folder_error(const std::string& folder, const std::string& reason) {
  return error(ErrorCode::kIo, "cannot write to state folder " + folder + ": " + reason, "--state-dir");
}

Result<kv::Descriptor> lock_folder(const std::string& folder) {
  std::error_code code;
  const bool made = std::filesystem::create_directories(folder, code);
  if (code) return folder_error(folder, code.message());
  if (made) ::chmod(folder.c_str(), 0700);
  kv::Descriptor lock(::open((folder + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!lock.valid()) return folder_error(folder, std::strerror(errno));
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    char owner[32] = {};
    const ssize_t got = ::pread(lock.get(), owner, sizeof owner - 1, 0);
    return error(ErrorCode::kFailedPrecondition,
                 "state folder " + folder + " is in use by another weftd" +
                     (got > 0 ? ", process " + std::string(owner, static_cast<size_t>(got)) : ""),
                 "--state-dir");
  }
  const std::string pid = std::to_string(::getpid());
  if (::ftruncate(lock.get(), 0) != 0 ||
      ::pwrite(lock.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    return folder_error(folder, std::strerror(errno));
  }
  return lock;
}

Result<int64_t> schema_version(sqlite3* database) {
  Statement statement(database, "PRAGMA user_version");
  TRY(const bool row, statement.step());
  return row ? statement.integer(0) : 0;
}

Result<void> migrate(sqlite3* database) {
  TRY_VOID(execute(database, "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"));
  TRY(const int64_t version, schema_version(database));
  if (version == Journal::kSchemaVersion) return {};
  if (version != 0 && version != 1) {
    return error(ErrorCode::kUnsupported, "journal version " + std::to_string(version) +
                                              "; this daemon knows " +
                                              std::to_string(Journal::kSchemaVersion));
  }
  const std::string all = std::string("BEGIN IMMEDIATE;") + (version == 0 ? kSchema : kFromVersion1) +
                          "PRAGMA user_version=" + std::to_string(Journal::kSchemaVersion) + ";COMMIT;";
  return execute(database, all.c_str());
}

}  // namespace

void Journal::Close::operator()(sqlite3* database) const { sqlite3_close_v2(database); }

Journal::Journal(std::string folder, kv::Descriptor lock, std::unique_ptr<sqlite3, Close> database)
    : folder_(std::move(folder)), lock_(std::move(lock)), database_(std::move(database)) {}
Journal::Journal(Journal&&) noexcept = default;
Journal& Journal::operator=(Journal&&) noexcept = default;
Journal::~Journal() = default;

Result<Journal> Journal::open(const std::string& state_folder) {
  TRY(kv::Descriptor lock, lock_folder(state_folder));
  sqlite3* raw = nullptr;
  const std::string path = state_folder + "/journal.sqlite";
  const int code = sqlite3_open_v2(path.c_str(), &raw, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE, nullptr);
  std::unique_ptr<sqlite3, Close> database(raw);
  if (code != SQLITE_OK) return folder_error(state_folder, raw ? sqlite3_errmsg(raw) : "out of memory");
  sqlite3_busy_timeout(raw, 2000);
  if (auto migrated = migrate(raw); !migrated) {
    Error failure = migrated.error();
    failure.message += " (" + path + ")";
    return failure;
  }
  TRY_VOID(Statement(raw, "DELETE FROM command WHERE id <= (SELECT max(id) FROM command) - ?")
               .bind(kCommandsKept)
               .run());
  return Journal(state_folder, std::move(lock), std::move(database));
}

// A transaction that cannot be committed is rolled back: left open, it would swallow every later write.
Result<void> Journal::in_transaction(const std::function<Result<void>()>& writes) {
  TRY_VOID(execute(database_.get(), "BEGIN IMMEDIATE"));
  auto done = writes();
  if (done) done = execute(database_.get(), "COMMIT");
  if (!done) (void)execute(database_.get(), "ROLLBACK");
  return done;
}

Result<void> Journal::set_configuration(const std::map<std::string, std::string>& values) {
  return in_transaction([&]() -> Result<void> {
    TRY_VOID(execute(database_.get(), "DELETE FROM configuration"));
    for (const auto& [key, value] : values) {
      TRY_VOID(
          Statement(database_.get(), "INSERT INTO configuration VALUES (?, ?)").bind(key).bind(value).run());
    }
    return {};
  });
}

Result<void> Journal::set_wanted(const std::map<std::string, std::string>& values) {
  return in_transaction([&]() -> Result<void> {
    for (const auto& [key, value] : values) {
      TRY_VOID(Statement(database_.get(),
                         "INSERT INTO wanted VALUES (?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                         "value = excluded.value, changed_ms = excluded.changed_ms")
                   .bind(key)
                   .bind(value)
                   .bind(now_ms())
                   .run());
    }
    return {};
  });
}

Result<std::optional<std::string>> Journal::wanted(const std::string& key) const {
  Statement statement(database_.get(), "SELECT value FROM wanted WHERE key = ?");
  TRY(const bool row, statement.bind(key).step());
  if (!row) return std::optional<std::string>();
  return std::optional<std::string>(statement.text(0));
}

Result<int64_t> Journal::begin_command(const std::string& command, const std::string& detail) {
  TRY_VOID(Statement(database_.get(), "INSERT INTO command (at_ms, command, detail) VALUES (?, ?, ?)")
               .bind(now_ms())
               .bind(command)
               .bind(detail)
               .run());
  return static_cast<int64_t>(sqlite3_last_insert_rowid(database_.get()));
}

Result<void> Journal::end_command(int64_t id, const std::string& outcome, Epoch epoch) {
  return Statement(database_.get(), "UPDATE command SET outcome = ?, done_ms = ?, epoch = ? WHERE id = ?")
      .bind(outcome)
      .bind(now_ms())
      .bind(int64_t{number(epoch)})
      .bind(id)
      .run();
}

Result<std::vector<Journal::HistoryLine>> Journal::history(int64_t limit) const {
  Statement statement(database_.get(),
                      "SELECT at_ms, ifnull(epoch, 0), command, detail, outcome IS NULL, outcome FROM "
                      "(SELECT * FROM command ORDER BY id DESC LIMIT ?) ORDER BY id");
  statement.bind(limit);
  std::vector<HistoryLine> lines;
  for (;;) {
    TRY(const bool row, statement.step());
    if (!row) return lines;
    HistoryLine& line = lines.emplace_back();
    line.at_ms = statement.integer(0);
    line.epoch = Epoch{static_cast<uint32_t>(statement.integer(1))};
    line.command = statement.text(2);
    line.detail = statement.text(3);
    if (statement.integer(4) == 0) line.outcome = statement.text(5);
  }
}

}  // namespace weft::daemon
