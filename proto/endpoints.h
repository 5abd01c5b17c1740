// Where weftd listens and its clients look, when nobody says otherwise.
//
// One place for both sides, so that they cannot disagree. With a state folder given, both sockets lie in it;
// without, they lie in the run folder: $XDG_RUNTIME_DIR/weft, or /tmp/weft-UID where that is not set. The
// state folder (journal, recordings) is then $XDG_STATE_HOME/weft or ~/.local/state/weft. Pure but for the
// two default_ functions, which read the environment; nothing here touches the file system.
#pragma once

#include <sys/types.h>

#include <string>

#include "proto/vocab/result.h"

namespace weft {

// What the environment says; nullptr or empty: not set.
struct PathEnvironment {
  const char* runtime_dir = nullptr;  // XDG_RUNTIME_DIR
  const char* state_home = nullptr;   // XDG_STATE_HOME
  const char* home = nullptr;         // HOME
  uid_t user = 0;
};

std::string run_folder(const PathEnvironment& environment);
std::string state_folder(const PathEnvironment& environment);
std::string default_run_folder();
std::string default_state_folder();

// "ipc://FOLDER/client.sock": the ZeroMQ endpoint (client.proto).
std::string client_endpoint_in(const std::string& folder);
// "FOLDER/control.sock": the Unix socket (control.proto).
std::string control_socket_in(const std::string& folder);

// A Unix socket's path holds at most 107 bytes (sun_path without its zero); the error names the path.
Result<void> check_socket_path(const std::string& path);

}  // namespace weft
