#include "daemon/process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "kv/packet_socket.h"

extern "C" char** environ;

namespace weft::daemon {
namespace {

Error io_error(const std::string& what) { return error(ErrorCode::kIo, what + ": " + std::strerror(errno)); }

class SpawnSetup {
 public:
  SpawnSetup() {
    posix_spawn_file_actions_init(&actions_);
    posix_spawnattr_init(&attributes_);
  }
  ~SpawnSetup() {
    posix_spawn_file_actions_destroy(&actions_);
    posix_spawnattr_destroy(&attributes_);
  }
  SpawnSetup(const SpawnSetup&) = delete;
  SpawnSetup& operator=(const SpawnSetup&) = delete;

  // `socket` and `output` are above kChildSocket, so no dup2 overwrites a source of a later one.
  void descriptors(int socket, int output) {
    CHECK_GT(socket, kChildSocket);
    CHECK_GT(output, kChildSocket);
    CHECK_EQ(posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, "/dev/null", O_RDONLY, 0), 0);
    CHECK_EQ(posix_spawn_file_actions_adddup2(&actions_, output, STDOUT_FILENO), 0);
    CHECK_EQ(posix_spawn_file_actions_adddup2(&actions_, output, STDERR_FILENO), 0);
    CHECK_EQ(posix_spawn_file_actions_adddup2(&actions_, socket, kChildSocket), 0);
    CHECK_EQ(posix_spawn_file_actions_addclosefrom_np(&actions_, kChildSocket + 1), 0);
  }
  void fresh_signals_and_group() {
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    CHECK_EQ(posix_spawnattr_setsigmask(&attributes_, &none), 0);
    CHECK_EQ(posix_spawnattr_setsigdefault(&attributes_, &all), 0);
    CHECK_EQ(posix_spawnattr_setpgroup(&attributes_, 0), 0);
    CHECK_EQ(posix_spawnattr_setflags(&attributes_,
                                      POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP),
             0);
  }
  const posix_spawn_file_actions_t* actions() const { return &actions_; }
  const posix_spawnattr_t* attributes() const { return &attributes_; }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

// Moves a descriptor above those that the child's own will have.
Result<kv::Descriptor> lift(int fd) {
  kv::Descriptor owned(fd);
  if (fd > kChildSocket) return owned;
  kv::Descriptor lifted(::fcntl(fd, F_DUPFD_CLOEXEC, kChildSocket + 1));
  if (!lifted.valid()) return io_error("cannot duplicate a descriptor");
  return lifted;
}

void set_non_blocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

}  // namespace

Result<Process> spawn(const std::string& binary, const std::vector<std::string>& arguments) {
  TRY(auto pair, kv::packet_socket_pair());
  kv::Descriptor ours = std::move(pair.first);
  TRY(kv::Descriptor theirs, lift(pair.second.release()));
  int pipe_ends[2];
  if (::pipe2(pipe_ends, O_CLOEXEC) != 0) return io_error("cannot make a pipe");
  kv::Descriptor output(pipe_ends[0]);
  TRY(kv::Descriptor writer, lift(pipe_ends[1]));

  SpawnSetup setup;
  setup.descriptors(theirs.get(), writer.get());
  setup.fresh_signals_and_group();
  std::vector<char*> argv;
  argv.push_back(const_cast<char*>(binary.c_str()));
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  Process process;
  if (const int code = ::posix_spawn(&process.pid, binary.c_str(), setup.actions(), setup.attributes(),
                                     argv.data(), environ);
      code != 0) {
    errno = code;
    return io_error("cannot start " + binary);
  }
  // The child is not reaped before its pidfd exists, so the number cannot have been reused.
  process.pidfd = kv::Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0)));
  if (!process.pidfd.valid()) {
    const Error failure = io_error("cannot watch process " + std::to_string(process.pid));
    ::kill(process.pid, SIGKILL);
    ::waitpid(process.pid, nullptr, 0);
    return failure;
  }
  set_non_blocking(ours.get());
  set_non_blocking(output.get());
  process.socket = std::move(ours);
  process.output = std::move(output);
  return process;
}

std::optional<ProcessEnd> reap(const Process& process) {
  siginfo_t info{};
  const int code = ::waitid(P_PIDFD, static_cast<id_t>(process.pidfd.get()), &info, WEXITED | WNOHANG);
  if (code != 0 || info.si_pid == 0) return std::nullopt;
  const int status = info.si_status;
  if (info.si_code == CLD_EXITED) return ProcessEnd{"exit " + std::to_string(status)};
  return ProcessEnd{"signal " + std::to_string(status) + " (" + ::strsignal(status) + ")",
                    status == SIGKILL || status == SIGTERM || status == SIGINT || status == SIGHUP};
}

void kill_process(const Process& process) {
  ::syscall(SYS_pidfd_send_signal, process.pidfd.get(), SIGKILL, nullptr, 0);
}

}  // namespace weft::daemon
