#include "tools/ctl/interrupt.h"

#include <sys/signalfd.h>

#include <csignal>

namespace weft::ctl {

int interrupt_descriptor() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  const int descriptor = ::signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
  if (descriptor >= 0) sigprocmask(SIG_BLOCK, &signals, nullptr);
  return descriptor;
}

}  // namespace weft::ctl
