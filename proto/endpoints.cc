#include "proto/endpoints.h"

#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>

namespace weft {
namespace {

bool is_set(const char* value) { return value != nullptr && *value != '\0'; }

PathEnvironment environment_of_process() {
  return {std::getenv("XDG_RUNTIME_DIR"), std::getenv("XDG_STATE_HOME"), std::getenv("HOME"), ::getuid()};
}

}  // namespace

std::string run_folder(const PathEnvironment& environment) {
  if (is_set(environment.runtime_dir)) return std::string(environment.runtime_dir) + "/weft";
  return "/tmp/weft-" + std::to_string(environment.user);
}

std::string state_folder(const PathEnvironment& environment) {
  if (is_set(environment.state_home)) return std::string(environment.state_home) + "/weft";
  if (is_set(environment.home)) return std::string(environment.home) + "/.local/state/weft";
  return run_folder(environment);
}

std::string default_run_folder() { return run_folder(environment_of_process()); }
std::string default_state_folder() { return state_folder(environment_of_process()); }

std::string client_endpoint_in(const std::string& folder) { return "ipc://" + folder + "/client.sock"; }
std::string control_socket_in(const std::string& folder) { return folder + "/control.sock"; }

Result<void> check_socket_path(const std::string& path) {
  constexpr size_t kLimit = sizeof(sockaddr_un::sun_path) - 1;
  if (path.empty()) return error(ErrorCode::kInvalidArgument, "a socket path must not be empty");
  if (path.size() > kLimit) {
    return error(ErrorCode::kTooLarge, "socket path of " + std::to_string(path.size()) + " bytes, limit " +
                                           std::to_string(kLimit) + ": " + path);
  }
  return {};
}

}  // namespace weft
