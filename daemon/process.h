// One child process of the daemon: spawned with a socket pair, watched by a pidfd, reaped once.
//
// The child gets descriptor 3 (its end of a SOCK_SEQPACKET pair), standard output and error joined in a pipe
// that the daemon reads, standard input from /dev/null, and nothing else. It runs in a process group of its
// own, so that Ctrl-C at the daemon's terminal reaches the daemon alone. Loop thread only.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "kv/shared_memory.h"
#include "proto/vocab/result.h"

namespace weft::daemon {

inline constexpr int kChildSocket = 3;

struct Process {
  pid_t pid = 0;
  kv::Descriptor pidfd;   // readable when the process has ended
  kv::Descriptor socket;  // our end; non-blocking
  kv::Descriptor output;  // what it prints; non-blocking
};

// kIo names the binary and the reason.
Result<Process> spawn(const std::string& binary, const std::vector<std::string>& arguments);

struct ProcessEnd {
  std::string text;     // "exit 0", "signal 9 (Killed)"
  bool killed = false;  // by a signal that no fault of its own raises
};
// How it ended, if it has. Reaps it; call no more after a value.
std::optional<ProcessEnd> reap(const Process& process);

void kill_process(const Process& process);  // SIGKILL; safe at any time before reap()

}  // namespace weft::daemon
