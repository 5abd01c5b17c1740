// A real weftd of the benchmark's own, with a folder of its own for sockets, journal and log.
//
// Owns the process: the destructor kills what stop() has not stopped. weftd is told to stop when the
// benchmark dies. Errors carry the end of the daemon's log. One thread, the one that started it.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "kv/shared_memory.h"
#include "proto/control.pb.h"
#include "proto/vocab/clock.h"
#include "tools/client/client.h"

namespace weft::bench {

// Beside this program.
std::string program_path(const std::string& name);

// Runs a program to its end, its output into a file; kIo unless it exits with 0.
Result<void> run_program(const std::vector<std::string>& command, const std::string& log);

class DaemonProcess {
 public:
  // Makes the folder, starts weftd with `options` and waits until it is ready.
  static Result<DaemonProcess> start(const std::string& folder, const std::vector<std::string>& options);
  DaemonProcess(DaemonProcess&& other) noexcept;
  DaemonProcess& operator=(DaemonProcess&&) = delete;
  ~DaemonProcess();

  client::Client& client() { return *client_; }
  Result<wire::ControlReply> control(wire::ControlRequest request) const;
  // CPU time that the daemon and its workers have used up to now.
  double cpu_seconds() const;
  // The daemon's, then its workers' as they were at the start.
  std::vector<pid_t> processes() const;
  // Politely; kIo if it does not exit with 0.
  Result<void> stop();
  // The failure, with the last lines of the log.
  Error explain(Error failure) const;

 private:
  explicit DaemonProcess(std::string folder) : folder_(std::move(folder)) {}
  Result<void> wait_until_ready();
  Result<void> find_workers();
  bool ended(Duration timeout);

  std::string folder_;
  pid_t pid_ = 0;  // 0: reaped
  int status_ = 0;
  kv::Descriptor pidfd_;
  std::vector<pid_t> workers_;
  std::optional<client::Client> client_;
};

}  // namespace weft::bench
