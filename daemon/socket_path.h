// Unix socket files: making room for one of ours without taking one that is in use.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "proto/vocab/result.h"

namespace weft::daemon {

// A folder for sockets, made (owner only) if it is not there. One that was made is removed at the end, if
// nothing is left in it.
class OwnedFolder {
 public:
  // kIo names the folder. `field` names the option in errors.
  static Result<OwnedFolder> make(const std::string& path, const char* field);
  OwnedFolder(OwnedFolder&& other) noexcept : made_(std::exchange(other.made_, {})) {}
  OwnedFolder& operator=(OwnedFolder&& other) noexcept {
    std::swap(made_, other.made_);
    return *this;
  }
  ~OwnedFolder();

 private:
  explicit OwnedFolder(std::string made) : made_(std::move(made)) {}
  std::string made_;  // empty: it was there
};

// Removes the socket of a daemon that died. kFailedPrecondition: somebody listens there, or a file that is no
// socket is in the way. `field` names the option in errors.
Result<void> claim_socket_path(const std::string& path, const char* field);

// A file that was made, to be removed only while its path still leads to it: whoever removed our folder and
// started a successor there must not lose the successor's socket. The destructor leaves the file.
class OwnedPath {
 public:
  OwnedPath() = default;
  explicit OwnedPath(const std::string& path);  // of a file that was just made
  void remove();

 private:
  std::string path_;
  uint64_t device_ = 0, inode_ = 0;
};

}  // namespace weft::daemon
