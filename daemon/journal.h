// The journal of intent: what the daemon was told to be, in a SQLite file of the state folder.
//
// Holds the configuration of the present run, the wanted topology (worker count, default groupings) and the
// history of the last kCommandsKept commands and recoveries with their outcomes (older ones go at the next
// start). Requests are not in it: a daemon's crash ends streams. The state folder belongs to one daemon at a
// time, by a lock that dies with it. Loop thread only; a write takes about a millisecond.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kv/shared_memory.h"
#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"

struct sqlite3;

namespace weft::daemon {

class Journal {
 public:
  static constexpr int kSchemaVersion = 2;
  static constexpr int64_t kCommandsKept = 10'000;

  // Makes the folder if needed, takes its lock, opens and migrates the file. kFailedPrecondition: another
  // daemon has the folder. kIo names the folder and the reason. kUnsupported: the file is of a newer version.
  static Result<Journal> open(const std::string& state_folder);
  Journal(Journal&&) noexcept;
  Journal& operator=(Journal&&) noexcept;
  ~Journal();

  const std::string& folder() const { return folder_; }

  // The configuration of this run replaces that of the last.
  Result<void> set_configuration(const std::map<std::string, std::string>& values);

  Result<void> set_wanted(const std::map<std::string, std::string>& values);  // all of them or none
  Result<std::optional<std::string>> wanted(const std::string& key) const;

  // A command without an outcome: the daemon died before it was done.
  Result<int64_t> begin_command(const std::string& command, const std::string& detail);
  // `epoch`: the one it was done in, or that it began; 0: none.
  Result<void> end_command(int64_t id, const std::string& outcome, Epoch epoch = Epoch{0});
  struct HistoryLine {
    int64_t at_ms = 0;  // since 1970
    Epoch epoch{};
    std::string command, detail;
    std::optional<std::string> outcome;
  };
  // The last `limit` lines, newest last.
  Result<std::vector<HistoryLine>> history(int64_t limit) const;

 private:
  struct Close {
    void operator()(sqlite3* database) const;
  };
  Result<void> in_transaction(const std::function<Result<void>()>& writes);
  Journal(std::string folder, kv::Descriptor lock, std::unique_ptr<sqlite3, Close> database);

  std::string folder_;
  kv::Descriptor lock_;
  std::unique_ptr<sqlite3, Close> database_;
};

}  // namespace weft::daemon
