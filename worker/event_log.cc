#include "worker/event_log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace weft::worker {
namespace {
std::atomic<int> log_rank{-1};
}  // namespace

void set_log_rank(int rank) { log_rank = rank; }

void log_event(const std::string& event, const std::string& fields) {
  std::string line = "weft-worker rank=" + std::to_string(log_rank) + " event=" + event;
  if (!fields.empty()) line += " " + fields;
  std::replace(line.begin(), line.end(), '\n', ' ');
  line += '\n';
  // One write, so that lines of several workers on one pipe do not mix. Nobody to tell if it fails.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace weft::worker
