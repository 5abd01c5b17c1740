// Unix socket files: making room for one of ours without taking one that is in use.
#pragma once

#include <string>

#include "proto/vocab/result.h"

namespace weft::daemon {

// Makes the folder (owner only) and removes the socket of a daemon that died. kFailedPrecondition: somebody
// listens there, or a file that is no socket is in the way. `field` names the option in errors.
Result<void> claim_socket_path(const std::string& path, const char* field);

}  // namespace weft::daemon
