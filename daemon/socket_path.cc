#include "daemon/socket_path.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "kv/shared_memory.h"
#include "proto/endpoints.h"

namespace weft::daemon {

Result<OwnedFolder> OwnedFolder::make(const std::string& path, const char* field) {
  std::error_code code;
  const bool made = !path.empty() && std::filesystem::create_directories(path, code);
  if (code) return error(ErrorCode::kIo, "cannot make folder " + path + ": " + code.message(), field);
  if (made) ::chmod(path.c_str(), 0700);
  return OwnedFolder(made ? path : std::string());
}

OwnedFolder::~OwnedFolder() {
  if (!made_.empty()) ::rmdir(made_.c_str());  // fails where something is left, as it should
}

Result<void> claim_socket_path(const std::string& path, const char* field) {
  TRY_VOID(check_socket_path(path));
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return {};
    return error(ErrorCode::kIo, "cannot use " + path + ": " + std::strerror(errno), field);
  }
  if (!S_ISSOCK(info.st_mode))
    return error(ErrorCode::kFailedPrecondition, path + " exists and is no socket", field);
  kv::Descriptor probe(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const bool answered =
      ::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  if (answered || errno != ECONNREFUSED) {
    return error(ErrorCode::kFailedPrecondition, "socket " + path + " is in use by another process", field);
  }
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return error(ErrorCode::kIo, "cannot remove the old socket " + path + ": " + std::strerror(errno), field);
  }
  return {};
}

OwnedPath::OwnedPath(const std::string& path) {
  struct stat info {};
  if (::lstat(path.c_str(), &info) != 0) return;
  path_ = path;
  device_ = info.st_dev;
  inode_ = info.st_ino;
}

void OwnedPath::remove() {
  struct stat info {};
  if (path_.empty() || ::lstat(path_.c_str(), &info) != 0) return;
  if (info.st_dev == device_ && info.st_ino == inode_) ::unlink(path_.c_str());
  path_.clear();
}

}  // namespace weft::daemon
