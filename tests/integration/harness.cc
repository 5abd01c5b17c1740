#include "tests/integration/harness.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "tools/client/control.h"
#include "tools/client/deadline.h"

namespace weft::integration {
namespace {

namespace fs = std::filesystem;

std::string make_folder() {
  char name[] = "/tmp/weft-integration-XXXXXX";
  CHECK(::mkdtemp(name) != nullptr);
  return name;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Starts a program with its output in two files.
pid_t start_program(const std::vector<std::string>& command, const std::string& output,
                    const std::string& errors) {
  std::vector<char*> argv;
  for (const std::string& part : command) argv.push_back(const_cast<char*>(part.c_str()));
  argv.push_back(nullptr);
  const pid_t pid = ::fork();
  CHECK_GE(pid, 0);
  if (pid > 0) return pid;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test program that aborts leaves no daemon
  const int out = ::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
  const int err = ::open(errors.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
  ::dup2(out, STDOUT_FILENO);
  ::dup2(err, STDERR_FILENO);
  ::execv(argv[0], argv.data());
  ::_exit(127);
}

int exit_code_of(int status) { return WIFEXITED(status) ? WEXITSTATUS(status) : -1; }

struct ModelFolder {
  std::string path = make_folder();
  ModelFolder() {
    const Finished made = run_program({WEFT_RECALL_MODEL, "--out", path + "/recall"});
    CHECK_EQ(made.exit_code, 0);
  }
  ~ModelFolder() { fs::remove_all(path); }
};

}  // namespace

bool wait_until(const std::function<bool()>& done) {
  const Time end = monotonic_now() + kPatience;
  while (!done()) {
    if (monotonic_now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // nothing announces what `done` looks at
  }
  return true;
}

uint64_t start_of_process(pid_t pid) {
  const std::string stat = read_file("/proc/" + std::to_string(pid) + "/stat");
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return 0;
  // Behind the name: the state, then 18 fields, then the start.
  std::istringstream fields(stat.substr(name_end + 1));
  std::string field;
  fields >> field;
  if (field == "Z") return 0;  // a zombie of somebody else's has ended too
  for (int i = 0; i < 18; ++i) fields >> field;
  uint64_t start = 0;
  fields >> start;
  return start;
}

const std::string& recall_model() {
  static const ModelFolder folder;
  static const std::string path = folder.path + "/recall";
  return path;
}

std::string prompt_with_fact(size_t bytes, const std::string& station, const std::string& answer) {
  const std::string fact = "The passkey of station " + station + " is " + answer + ". ";
  const std::string question = "The passkey of station " + station + " is";
  std::string text;
  for (int line = 0; text.size() + fact.size() + question.size() < bytes; ++line) {
    if (text.size() >= bytes / 2 && text.find(fact) == std::string::npos) text += fact;
    text +=
        "Line " + std::to_string(line * 7919 % 100003) + " of the log says that nothing much has happened. ";
  }
  return text + question;
}

Finished run_program(const std::vector<std::string>& command) {
  const std::string folder = make_folder();
  const pid_t pid = start_program(command, folder + "/out", folder + "/err");
  int status = 0;
  CHECK_EQ(::waitpid(pid, &status, 0), pid);
  Finished finished{exit_code_of(status), read_file(folder + "/out"), read_file(folder + "/err")};
  fs::remove_all(folder);
  return finished;
}

Daemon::Daemon(std::vector<std::string> arguments, std::string model, std::string folder)
    : folder_(folder.empty() ? make_folder() : std::move(folder)) {
  std::vector<std::string> command = {WEFT_WEFTD, "--model", std::move(model), "--state-dir", folder_};
  command.insert(command.end(), arguments.begin(), arguments.end());
  fs::remove(folder_ + "/out");  // an earlier daemon's ready line
  pid_ = start_program(command, folder_ + "/out", folder_ + "/err");
}

Daemon::~Daemon() {
  if (running()) {
    remember_workers();
    signal(SIGKILL);
    wait_exit();
  }
  if (testing::Test::HasFailure()) std::fprintf(stderr, "---- log of weftd\n%s----\n", log().c_str());
  if (owns_folder_) fs::remove_all(folder_);
}

bool Daemon::wait_ready() {
  const client::Deadline deadline(kPatience);
  const int written = ::inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
  const int ended = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
  CHECK(written >= 0 && ended >= 0);
  CHECK_GE(::inotify_add_watch(written, folder_.c_str(), IN_MODIFY), 0);
  bool ready = false;
  while (!(ready = read_file(folder_ + "/out").find("weftd ready") != std::string::npos) && running() &&
         !deadline.passed()) {
    pollfd items[] = {{written, POLLIN, 0}, {ended, POLLIN, 0}};
    ::poll(items, std::size(items), deadline.poll_ms());
    char events[4096];
    while (::read(written, events, sizeof events) > 0) {  // that something was written is enough
    }
  }
  ::close(written);
  ::close(ended);
  if (!ready || !running()) return false;
  remember_workers();
  return true;
}

void Daemon::signal(int number) { ::kill(pid_, number); }

bool Daemon::running() {
  if (exit_code_) return false;
  int status = 0;
  if (::waitpid(pid_, &status, WNOHANG) == pid_) exit_code_ = exit_code_of(status);
  return !exit_code_;
}

int Daemon::wait_exit() {
  if (running()) {
    const auto ended = client::wait_for_exit(pid_, kPatience);
    EXPECT_TRUE(ended) << (ended ? "" : ended.error().text());
  }
  return running() ? -2 : *exit_code_;
}

bool Daemon::wait_workers_gone() const {
  return std::all_of(seen_workers_.begin(), seen_workers_.end(), [](const auto& worker) {
    return start_of_process(worker.first) != worker.second ||
           client::wait_for_exit(worker.first, kPatience).has_value();
  });
}

client::Client Daemon::client() {
  client::ClientOptions options;
  options.endpoint = endpoint();
  auto connected = client::Client::connect(options);
  CHECK(connected.has_value(), connected.error().text());
  return std::move(connected).value();
}

wire::ControlReply Daemon::control(const wire::ControlRequest& request) {
  auto connected = client::ControlClient::connect(control_socket());
  CHECK(connected.has_value(), connected.error().text());
  auto reply = connected->call(request, kPatience);
  if (reply) return *reply;
  wire::ControlReply failed;
  failed.mutable_error()->set_code(static_cast<wire::WireErrorCode>(reply.error().code));
  failed.mutable_error()->set_message(reply.error().message);
  return failed;
}

wire::StatusReply Daemon::status() {
  wire::ControlRequest request;
  request.mutable_status();
  return control(request).status();
}

std::vector<wire::WorkerStatus> Daemon::workers() {
  wire::ControlRequest request;
  request.mutable_workers();
  const wire::ControlReply reply = control(request);
  std::vector<wire::WorkerStatus> all(reply.workers().workers().begin(), reply.workers().workers().end());
  for (const wire::WorkerStatus& worker : all) {
    const auto pid = static_cast<pid_t>(worker.pid());
    const uint64_t start = pid != 0 ? start_of_process(pid) : 0;
    if (start != 0) seen_workers_[pid] = start;
  }
  return all;
}

void Daemon::remember_workers() {
  if (client::ControlClient::connect(control_socket())) (void)workers();
}

std::string Daemon::log() const { return read_file(folder_ + "/err"); }

std::string Daemon::leftovers() const {
  std::string left;
  for (const char* name : {"/client.sock", "/control.sock"}) {
    if (fs::exists(folder_ + name)) left += std::string(name) + " ";
  }
  for (const auto& [pid, start] : seen_workers_) {
    if (start_of_process(pid) == start) left += "process " + std::to_string(pid) + " ";
  }
  return left;
}

wire::GenerateRequest text_request(const std::string& text, uint32_t max_tokens) {
  wire::GenerateRequest request;
  request.set_text(text);
  request.set_max_tokens(max_tokens);
  return request;
}

Answer run_request(client::Client& client, const wire::GenerateRequest& request,
                   const client::StreamHandlers& extra) {
  Answer answer;
  client::StreamHandlers handlers = extra;
  handlers.token = [&](const wire::TokenEvent& event) {
    EXPECT_EQ(event.index(), answer.tokens.size());
    answer.tokens.push_back(event.token());
    answer.text += event.text();
    if (extra.token) extra.token(event);
  };
  auto finished = client.generate(request, handlers, kPatience);
  if (!finished) {
    answer.failure = finished.error();
    return answer;
  }
  answer.finished = std::move(finished).value();
  answer.text += answer.finished.text();
  EXPECT_EQ(answer.finished.usage().completion_tokens(), answer.tokens.size());
  return answer;
}

}  // namespace weft::integration
