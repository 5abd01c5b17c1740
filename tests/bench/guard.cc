#include "tests/bench/guard.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <vector>

#include "proto/vocab/clock.h"

namespace weft::bench {
namespace {

namespace fs = std::filesystem;

constexpr Duration kPolite = std::chrono::seconds(15);  // for daemons that were told to stop

sigset_t watched() {
  sigset_t set;
  sigemptyset(&set);
  for (int number : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) sigaddset(&set, number);
  return set;
}

// The parent's number out of /proc/PID/stat; the name before it may hold anything, so from its last ')'.
pid_t parent_of(const fs::path& process) {
  std::ifstream file(process / "stat");
  std::string text;
  std::getline(file, text);
  const size_t end = text.rfind(')');
  if (end == std::string::npos || text.size() < end + 4) return 0;
  return static_cast<pid_t>(std::strtol(text.c_str() + end + 4, nullptr, 10));
}

std::vector<pid_t> children() {
  std::vector<pid_t> out;
  std::error_code code;
  for (const auto& entry : fs::directory_iterator("/proc", code)) {
    const pid_t pid = static_cast<pid_t>(std::strtol(entry.path().filename().c_str(), nullptr, 10));
    if (pid > 0 && parent_of(entry.path()) == ::getpid()) out.push_back(pid);
  }
  return out;
}

// Reaps whoever has ended; false once there is no child left.
bool reap_some(pid_t work, int& status) {
  while (true) {
    int ended = 0;
    const pid_t pid = ::waitpid(-1, &ended, WNOHANG);
    if (pid == work) status = ended;
    if (pid == 0) return true;
    if (pid < 0 && errno != EINTR) return false;
  }
}

// Waits for the child, handing signals on to it.
int wait_for_work(pid_t work) {
  const sigset_t set = watched();
  int status = -1;
  while (true) {
    reap_some(work, status);
    if (status != -1) return status;
    const int number = ::sigwaitinfo(&set, nullptr);
    if (number > 0 && number != SIGCHLD) ::kill(work, number);
  }
}

// Processes that the child left are ours now. Daemons were told to stop by its death. True if all went.
bool wait_for_the_rest() {
  const sigset_t set = watched();
  int ignored = -1;
  const Time end = monotonic_now() + kPolite;
  while (reap_some(0, ignored)) {
    if (monotonic_now() > end) {
      for (pid_t pid : children()) ::kill(pid, SIGKILL);
      while (::waitpid(-1, nullptr, 0) > 0 || errno == EINTR) {
      }
      return false;
    }
    const timespec tick{0, 100'000'000};
    ::sigtimedwait(&set, nullptr, &tick);
  }
  return true;
}

}  // namespace

int run_guarded(const std::string& name, const std::function<int(const std::string& folder)>& work) {
  std::error_code code;
  std::string folder = (fs::temp_directory_path(code) / (name + ".XXXXXX")).string();
  if (::mkdtemp(folder.data()) == nullptr) {
    std::fprintf(stderr, "%s: cannot make %s: %s\n", name.c_str(), folder.c_str(), std::strerror(errno));
    return 1;
  }
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  const sigset_t set = watched();
  sigset_t before;
  ::sigprocmask(SIG_BLOCK, &set, &before);
  const pid_t self = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != self) ::_exit(1);
    ::sigprocmask(SIG_SETMASK, &before, nullptr);
    std::exit(work(folder));
  }
  int status = 1 << 8;
  if (child > 0) status = wait_for_work(child);
  const bool left_by_themselves = wait_for_the_rest();
  fs::remove_all(folder, code);
  if (child < 0) {
    std::fprintf(stderr, "%s: cannot fork\n", name.c_str());
    return 1;
  }
  if (!left_by_themselves) std::fprintf(stderr, "%s: processes were left and killed\n", name.c_str());
  if (code) std::fprintf(stderr, "%s: cannot remove %s\n", name.c_str(), folder.c_str());
  if (WIFSIGNALED(status)) {
    std::fprintf(stderr, "%s: ended by signal %d\n", name.c_str(), WTERMSIG(status));
    return 128 + WTERMSIG(status);
  }
  if (WEXITSTATUS(status) != 0) return WEXITSTATUS(status);
  return left_by_themselves && !code ? 0 : 1;
}

}  // namespace weft::bench
