#include "tests/bench/daemon_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "proto/endpoints.h"
#include "tools/client/control.h"

namespace weft::bench {
namespace {

namespace fs = std::filesystem;

constexpr Duration kStart = std::chrono::seconds(120);
constexpr Duration kControl = std::chrono::seconds(10);
constexpr Duration kStop = std::chrono::seconds(20);
constexpr Duration kLook = std::chrono::milliseconds(20);  // between two questions to a daemon that starts

// The child gets `death` when this process dies. Only async-signal-safe calls between fork and exec: the
// client library may have threads.
Result<pid_t> spawn(const std::vector<std::string>& command, const std::string& log, int death) {
  std::vector<char*> argv;
  for (const std::string& part : command) argv.push_back(const_cast<char*>(part.c_str()));
  argv.push_back(nullptr);
  const kv::Descriptor output(::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  const kv::Descriptor input(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!output.valid() || !input.valid()) {
    return error(ErrorCode::kIo, "cannot open " + log + ": " + std::strerror(errno));
  }
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, death);
    if (::getppid() != parent) ::_exit(127);
    ::dup2(input.get(), STDIN_FILENO);
    ::dup2(output.get(), STDOUT_FILENO);
    ::dup2(output.get(), STDERR_FILENO);
    ::setpgid(0, 0);  // Ctrl-C reaches the benchmark, whose end stops the daemon once
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  if (child < 0) return error(ErrorCode::kIo, std::string("cannot fork: ") + std::strerror(errno));
  return child;
}

std::string last_lines(const std::string& path) {
  std::ifstream file(path);
  std::deque<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    lines.push_back(line);
    if (lines.size() > 12) lines.pop_front();
  }
  std::string out;
  for (const std::string& line : lines) out += "\n    " + line;
  return out;
}

std::string how(int status) {
  if (WIFEXITED(status)) return "exit " + std::to_string(WEXITSTATUS(status));
  return "signal " + std::to_string(WTERMSIG(status));
}

// Fields 14 and 15 of /proc/PID/stat: user and system time in clock ticks; the name ends at the last ')'.
double process_cpu_seconds(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 2));
  std::string skipped;
  for (int field = 3; field < 14; ++field) fields >> skipped;
  double user = 0, system = 0;
  fields >> user >> system;
  return (user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

}  // namespace

std::string program_path(const std::string& name) {
  std::error_code code;
  return (fs::read_symlink("/proc/self/exe", code).parent_path() / name).string();
}

Result<void> run_program(const std::vector<std::string>& command, const std::string& log) {
  TRY(const pid_t child, spawn(command, log, SIGKILL));
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (status == 0) return {};
  return error(ErrorCode::kIo, command[0] + ": " + how(status) + last_lines(log));
}

Result<DaemonProcess> DaemonProcess::start(const std::string& folder,
                                           const std::vector<std::string>& options) {
  std::error_code code;
  fs::create_directories(folder, code);
  if (code) return error(ErrorCode::kIo, "cannot make " + folder + ": " + code.message());
  std::vector<std::string> command{program_path("weftd"), "--state-dir", folder};
  command.insert(command.end(), options.begin(), options.end());
  DaemonProcess daemon(folder);
  TRY(daemon.pid_, spawn(command, folder + "/weftd.log", SIGTERM));
  daemon.pidfd_ = kv::Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, daemon.pid_, 0)));
  if (!daemon.pidfd_.valid())
    return error(ErrorCode::kIo, std::string("pidfd_open: ") + std::strerror(errno));
  if (auto ready = daemon.wait_until_ready(); !ready) return daemon.explain(ready.error());
  if (auto found = daemon.find_workers(); !found) return daemon.explain(found.error());
  auto client = client::Client::connect({.endpoint = client_endpoint_in(folder)});
  if (!client) return daemon.explain(client.error());
  daemon.client_.emplace(std::move(*client));
  return daemon;
}

DaemonProcess::DaemonProcess(DaemonProcess&& other) noexcept
    : folder_(std::move(other.folder_)),
      pid_(std::exchange(other.pid_, 0)),
      status_(other.status_),
      pidfd_(std::move(other.pidfd_)),
      workers_(std::move(other.workers_)),
      client_(std::move(other.client_)) {}

DaemonProcess::~DaemonProcess() {
  if (pid_ == 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

Result<wire::ControlReply> DaemonProcess::control(wire::ControlRequest request) const {
  TRY(auto control, client::ControlClient::connect(control_socket_in(folder_)));
  return control.call(std::move(request), kControl);
}

// True once the process has ended; it is reaped then.
bool DaemonProcess::ended(Duration timeout) {
  pollfd item{pidfd_.get(), POLLIN, 0};
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(timeout).count();
  if (::poll(&item, 1, static_cast<int>(ms)) <= 0) return false;
  if (::waitpid(pid_, &status_, 0) == pid_) pid_ = 0;
  return true;
}

// Readiness is asked for, since the control socket announces nothing; between two questions an end is noticed
// at once.
Result<void> DaemonProcess::wait_until_ready() {
  const Time end = monotonic_now() + kStart;
  wire::ControlRequest request;
  request.mutable_status();
  while (true) {
    const auto reply = control(request);
    if (reply && reply->status().state() == "ready") return {};
    if (!reply && reply.error().code != ErrorCode::kUnavailable) return reply.error();
    if (ended(kLook)) return error(ErrorCode::kUnavailable, "weftd ended: " + how(status_));
    if (monotonic_now() > end) {
      const std::string state = reply ? reply->status().state() : reply.error().text();
      return error(ErrorCode::kDeadlineExceeded, "weftd does not become ready: " + state);
    }
  }
}

Result<void> DaemonProcess::find_workers() {
  wire::ControlRequest request;
  request.mutable_workers();
  TRY(const auto reply, control(std::move(request)));
  for (const auto& worker : reply.workers().workers()) workers_.push_back(static_cast<pid_t>(worker.pid()));
  return {};
}

double DaemonProcess::cpu_seconds() const {
  double seconds = process_cpu_seconds(pid_);
  for (pid_t worker : workers_) seconds += process_cpu_seconds(worker);
  return seconds;
}

std::vector<pid_t> DaemonProcess::processes() const {
  std::vector<pid_t> all{pid_};
  all.insert(all.end(), workers_.begin(), workers_.end());
  return all;
}

Result<void> DaemonProcess::stop() {
  client_.reset();
  if (pid_ == 0) return explain(error(ErrorCode::kIo, "weftd had ended: " + how(status_)));
  ::kill(pid_, SIGTERM);
  if (!ended(kStop)) return explain(error(ErrorCode::kIo, "weftd does not stop"));
  if (status_ != 0) return explain(error(ErrorCode::kIo, "weftd: " + how(status_)));
  return {};
}

Error DaemonProcess::explain(Error failure) const {
  failure.message += last_lines(folder_ + "/weftd.log");
  return failure;
}

}  // namespace weft::bench
