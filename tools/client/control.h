// A connection to weftd's control socket (proto/control.proto): a Unix stream socket with framed messages.
//
// Owns the descriptor. One request at a time, each answered by one reply; a reply that is an error becomes
// the Result's error. After a timeout or a broken frame the connection is closed and later calls fail, since
// replies could no longer be matched to requests. One thread at a time; nothing throws.
#pragma once

#include <sys/types.h>

#include <string>

#include "proto/control.pb.h"
#include "proto/vocab/clock.h"
#include "proto/vocab/result.h"

namespace weft::client {

inline constexpr size_t kMaxControlFrame = size_t{64} << 20;  // bytes; a reply beyond it is broken

class ControlClient {
 public:
  // kUnavailable: nobody listens there. kNotPermitted: the socket is another user's.
  static Result<ControlClient> connect(const std::string& path);
  ControlClient(ControlClient&& other) noexcept;
  ControlClient& operator=(ControlClient&& other) noexcept;
  ~ControlClient();

  // `request` needs only its body; the version is filled in.
  Result<wire::ControlReply> call(wire::ControlRequest request, Duration timeout);

  // The daemon's process, as the kernel knows it.
  Result<pid_t> daemon_pid() const;

 private:
  explicit ControlClient(int descriptor) : descriptor_(descriptor) {}
  Result<void> exchange(const std::string& out, std::string& in, Duration timeout);
  void close();

  int descriptor_ = -1;
};

// Waits until a process is gone; kDeadlineExceeded if it is still there. One that is gone already is fine.
Result<void> wait_for_exit(pid_t pid, Duration timeout);

}  // namespace weft::client
