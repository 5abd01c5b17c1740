// weft-worker: started by weftd, one per device. Not for people.
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "worker/command_channel.h"
#include "worker/event_log.h"
#include "worker/list_devices.h"
#include "worker/worker_process.h"

namespace {

constexpr const char* kUsage =
    "usage: weft-worker --socket-fd N\n"
    "       weft-worker --list-devices\n"
    "\n"
    "Runs step plans for weftd, which starts it with a Unix SOCK_SEQPACKET socket as descriptor N.\n"
    "Ends with status 0 when told to stop, 1 after a failure, 2 for a bad command line, 3 when weftd is "
    "gone.\n"
    "With --list-devices it prints this machine's devices as JSON and ends; weftd --list-devices shows "
    "them.\n";

// The descriptor of "--socket-fd N", or −1.
int parse_socket(int argc, char** argv) {
  if (argc != 3 || std::string_view(argv[1]) != "--socket-fd") return -1;
  int fd = -1;
  const char* end = argv[2] + std::strlen(argv[2]);
  const auto [at, failure] = std::from_chars(argv[2], end, fd);
  return failure == std::errc{} && at == end && fd > STDERR_FILENO ? fd : -1;
}

bool is_packet_socket(int fd) {
  int type = 0;
  socklen_t size = sizeof type;
  return ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_SEQPACKET;
}

int print_devices() {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a driver may hang, and whoever asked may be interrupted
  const auto devices = weft::worker::list_devices();
  if (!devices) {
    std::fprintf(stderr, "weft-worker: %s\n", devices.error().text().c_str());
    return weft::worker::kExitFailed;
  }
  return std::fputs(devices->c_str(), stdout) >= 0 && std::fflush(stdout) == 0 ? 0
                                                                               : weft::worker::kExitFailed;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == "--help") {
    std::fputs(kUsage, stdout);
    return 0;
  }
  if (argc == 2 && std::string_view(argv[1]) == "--list-devices") return print_devices();
  const int fd = parse_socket(argc, argv);
  if (fd < 0 || !is_packet_socket(fd)) {
    std::fputs(fd < 0 ? kUsage : "weft-worker: --socket-fd is not a packet socket; it is started by weftd\n",
               stderr);
    return weft::worker::kExitUsage;
  }
  // The daemon's death must end this process: by signal, and by the socket for the case that it died before
  // this line. Ctrl-C in a terminal reaches the whole process group, but it is the daemon that stops its
  // workers.
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  if (std::getenv("WEFT_INJECT_MEMORY_LOSS") != nullptr) {  // worker_process.cc; before there are threads
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR2);
    ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  }
  // Whatever else the daemon had open when it forked.
  if (fd > STDERR_FILENO + 1) ::close_range(STDERR_FILENO + 1, static_cast<unsigned>(fd - 1), 0);
  ::close_range(static_cast<unsigned>(fd + 1), ~0u, 0);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);

  weft::worker::CommandChannel channel{weft::kv::Descriptor(fd)};
  channel.start();
  weft::worker::WorkerProcess process(channel);
  channel.fail(process.run());
}
