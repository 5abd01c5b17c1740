// A real weftd with real workers, in a state folder of its own, for tests that start, kill and stop it.
//
// Uses the built binaries and the client library, as a user would. Every wait is for an event or a state; a
// generous limit (kPatience) turns a wait for something that never comes into a failed test.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/control.pb.h"
#include "tools/client/client.h"
#include "tools/client/control.h"

namespace weft::integration {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr Duration kPatience = std::chrono::seconds(1200);  // everything is ten times slower
#else
inline constexpr Duration kPatience = std::chrono::seconds(120);
#endif

// For what only looking tells (a counter of the daemon, a line in its log): looks again and again; false
// after kPatience.
bool wait_until(const std::function<bool()>& done);
// When a process began, in the kernel's ticks; 0: there is none, or it has ended. A number alone names
// nobody: the kernel gives it again.
uint64_t start_of_process(pid_t pid);

// The recall model, made once per test program, and removed at its end.
const std::string& recall_model();
// Real text of so many bytes (distinct lines), with a fact in the middle; ends with the question for it.
std::string prompt_with_fact(size_t bytes, const std::string& station, const std::string& answer);

struct Finished {
  int exit_code = -1;  // -1: by a signal
  std::string output, errors;
};
// Runs a program to its end.
Finished run_program(const std::vector<std::string>& command);

class Daemon {
 public:
  // Arguments beside --model, --state-dir and --worker-binary. `folder`: of an earlier daemon; empty: a new
  // one.
  explicit Daemon(std::vector<std::string> arguments, std::string model = recall_model(),
                  std::string folder = {});
  ~Daemon();  // kills what is left
  Daemon(const Daemon&) = delete;
  Daemon& operator=(const Daemon&) = delete;

  bool wait_ready();  // for its ready line; false: it ended or took too long
  pid_t pid() const { return pid_; }
  void signal(int number);
  // Waits for its end; the exit code, or -1 if a signal ended it.
  int wait_exit();
  // Waits for the end of every worker that was seen; false after kPatience.
  bool wait_workers_gone() const;
  bool running();

  client::Client client();
  wire::ControlReply control(const wire::ControlRequest& request);
  wire::StatusReply status();
  std::vector<wire::WorkerStatus> workers();
  std::string endpoint() const { return "ipc://" + folder_ + "/client.sock"; }
  std::string control_socket() const { return folder_ + "/control.sock"; }
  const std::string& folder() const { return folder_; }
  std::string log() const;

  // After its end: sockets still there, workers still alive. Empty: nothing is left.
  std::string leftovers() const;
  void keep_folder() { owns_folder_ = false; }

 private:
  void remember_workers();
  std::string folder_;
  bool owns_folder_ = true;
  pid_t pid_ = -1;
  std::optional<int> exit_code_;
  std::map<pid_t, uint64_t> seen_workers_;  // with their start
};

// What one stream got.
struct Answer {
  std::vector<uint32_t> tokens;
  std::string text;
  wire::Finished finished;
  std::optional<Error> failure;
};
// Runs a request to its end; checks that token indexes are 0, 1, 2, … and that texts join up.
Answer run_request(client::Client& client, const wire::GenerateRequest& request,
                   const client::StreamHandlers& extra = {});
wire::GenerateRequest text_request(const std::string& text, uint32_t max_tokens);

}  // namespace weft::integration
