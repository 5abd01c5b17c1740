// weftd. Exit codes: 0 stopped as asked; 1 could not start or run; 2 a bad command line.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#include "daemon/daemon.h"
#include "daemon/list_devices.h"
#include "daemon/options.h"

namespace {

int fail(const weft::Error& failure, int code) {
  std::fprintf(stderr, "weftd: %s\n", failure.text().c_str());
  return code;
}

// Every client is a descriptor, and a worker cannot be started again without some.
void take_all_descriptors() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

int main(int argc, char** argv) {
  // Descriptors 0 to 2 must be there, or the first files opened would become them.
  while (true) {
    const int fd = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    if (fd > STDERR_FILENO) {
      ::close(fd);
      break;
    }
    if (fd < 0) return 1;
  }
  ::signal(SIGPIPE, SIG_IGN);
  take_all_descriptors();
  ::umask(0077);  // sockets, journal and recordings are the owner's alone

  auto parsed = weft::daemon::parse_options(std::vector<std::string>(argv + 1, argv + argc));
  if (!parsed) return fail(parsed.error(), 2);
  if (parsed->device_query) {
    const auto devices = weft::daemon::list_devices(*parsed->device_query);
    if (!devices) return fail(devices.error(), 1);
    return std::fputs(devices->c_str(), stdout) >= 0 && std::fflush(stdout) == 0 ? 0 : 1;
  }
  if (!parsed->options) {
    std::fputs(parsed->message.c_str(), stdout);
    return 0;
  }
  const weft::daemon::Options& options = *parsed->options;
  const weft::daemon::EventLog log(options.log_level);
  weft::daemon::Daemon daemon(options, log);
  if (auto opened = daemon.open(); !opened) return fail(opened.error(), 1);
  if (auto ran = daemon.run(); !ran) return fail(ran.error(), 1);
  return 0;
}
