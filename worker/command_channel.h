// The worker's end of the socket pair: commands in, answers out.
//
// A watcher thread reads the socket all the time, also while a step computes, because two things must not
// wait for a step: the daemon's death (the socket closes: the process ends at once) and Stop (exit status 0,
// at once; a step in progress is worth nothing to a daemon that stops). Everything else is queued for the
// main thread. What cannot be a command (unparsable, oversized, more than kQueueMax unread) is answered with
// a Failure and ends the process. send() may be called from any thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <vector>

#include "kv/packet_socket.h"
#include "proto/vocab/result.h"
#include "proto/worker.pb.h"

namespace weft::worker {

// Exit statuses of weft-worker.
inline constexpr int kExitStopped = 0;
inline constexpr int kExitFailed = 1;  // after a Failure message
inline constexpr int kExitUsage = 2;
inline constexpr int kExitDaemonGone = 3;

struct Command {
  wire::ToWorker message;
  std::vector<kv::Descriptor> descriptors;
};

class CommandChannel {
 public:
  static constexpr size_t kQueueMax = 16;

  explicit CommandChannel(kv::Descriptor socket) : socket_(std::move(socket)) {}
  // Starts the watcher. The channel then lives as long as the process.
  void start();

  Command next();  // waits
  // kUnavailable: the daemon is gone.
  Result<void> send(const wire::FromWorker& message);
  // Tells the daemon and stderr why this process ends, and ends it.
  [[noreturn]] void fail(const Error& error);

 private:
  void watch();

  kv::Descriptor socket_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Command> queue_;
};

}  // namespace weft::worker
