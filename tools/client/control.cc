#include "tools/client/control.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "proto/convert.h"
#include "proto/endpoints.h"
#include "proto/version.h"
#include "tools/client/client.h"
#include "tools/client/deadline.h"

namespace weft::client {
namespace {

constexpr size_t kHeader = 4;  // the length, little endian

Error system_failure(const std::string& what, int number) {
  return error(ErrorCode::kIo, what + ": " + std::strerror(number));
}

Error connect_failure(const std::string& path, int number) {
  switch (number) {
    case ENOENT:
    case ECONNREFUSED:
    case ENOTDIR:
      return error(ErrorCode::kUnavailable, "no daemon listens at " + path);
    case EACCES:
    case EPERM:
      return error(ErrorCode::kNotPermitted, "no permission to use " + path);
    default:
      return system_failure("cannot connect to " + path, number);
  }
}

Result<void> wait_for(int descriptor, short events, const Deadline& deadline) {
  while (true) {
    pollfd item{descriptor, events, 0};
    const int ready = ::poll(&item, 1, deadline.poll_ms());
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) return system_failure("cannot wait", errno);
    if (deadline.passed()) return error(ErrorCode::kDeadlineExceeded, "no answer within the timeout");
  }
}

bool would_block(int number) { return number == EAGAIN || number == EWOULDBLOCK || number == EINTR; }

Result<void> send_all(int descriptor, const std::string& bytes, const Deadline& deadline) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t sent = ::send(descriptor, bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
    if (sent > 0) {
      done += static_cast<size_t>(sent);
    } else if (sent < 0 && would_block(errno)) {
      TRY_VOID(wait_for(descriptor, POLLOUT, deadline));
    } else {
      return error(ErrorCode::kUnavailable, "the daemon closed the control connection");
    }
  }
  return {};
}

Result<void> receive_all(int descriptor, char* bytes, size_t size, const Deadline& deadline) {
  size_t done = 0;
  while (done < size) {
    const ssize_t received = ::recv(descriptor, bytes + done, size - done, 0);
    if (received > 0) {
      done += static_cast<size_t>(received);
    } else if (received < 0 && would_block(errno)) {
      TRY_VOID(wait_for(descriptor, POLLIN, deadline));
    } else {
      return error(ErrorCode::kUnavailable, "the daemon closed the control connection");
    }
  }
  return {};
}

std::string framed(const std::string& body) {
  const auto size = static_cast<uint32_t>(body.size());
  std::string out;
  for (size_t i = 0; i < kHeader; ++i) out += static_cast<char>(size >> (8 * i));
  return out + body;
}

}  // namespace

Result<ControlClient> ControlClient::connect(const std::string& path) {
  TRY_VOID(check_socket_path(path));
  const int descriptor = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (descriptor < 0) return system_failure("cannot make a socket", errno);
  ControlClient client(descriptor);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  // A Unix socket connects at once, or fails: EAGAIN is a full backlog, not "in progress".
  if (::connect(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    return connect_failure(path, errno);
  }
  return client;
}

ControlClient::ControlClient(ControlClient&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)) {}

ControlClient& ControlClient::operator=(ControlClient&& other) noexcept {
  if (this != &other) {
    close();
    descriptor_ = std::exchange(other.descriptor_, -1);
  }
  return *this;
}

ControlClient::~ControlClient() { close(); }

void ControlClient::close() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

Result<void> ControlClient::exchange(const std::string& out, std::string& in, Duration timeout) {
  if (descriptor_ < 0) return error(ErrorCode::kUnavailable, "the control connection is closed");
  const Deadline deadline(timeout);
  TRY_VOID(send_all(descriptor_, framed(out), deadline));
  unsigned char header[kHeader];
  TRY_VOID(receive_all(descriptor_, reinterpret_cast<char*>(header), kHeader, deadline));
  size_t size = 0;
  for (size_t i = 0; i < kHeader; ++i) size |= size_t{header[i]} << (8 * i);
  if (size > kMaxControlFrame) {
    return error(ErrorCode::kBadMessage, "the daemon announced a frame of " + std::to_string(size) +
                                             " bytes, limit " + std::to_string(kMaxControlFrame));
  }
  in.resize(size);
  return receive_all(descriptor_, in.data(), size, deadline);
}

Result<wire::ControlReply> ControlClient::call(wire::ControlRequest request, Duration timeout) {
  request.set_version(kControlProtocol);
  std::string out;
  if (!request.SerializeToString(&out)) {
    return error(ErrorCode::kInvalidArgument, "the request cannot be encoded");
  }
  std::string in;
  auto exchanged = exchange(out, in, timeout);
  if (!exchanged) {
    close();
    return std::move(exchanged).error();
  }
  wire::ControlReply reply;
  if (!reply.ParseFromString(in)) {
    close();
    return error(ErrorCode::kBadMessage, "the daemon sent a message that does not parse");
  }
  if (reply.has_error()) return from_wire(reply.error());
  if (reply.version() != kControlProtocol) {
    return error(ErrorCode::kUnsupported, "the daemon speaks control protocol " +
                                              std::to_string(reply.version()) + ", this client " +
                                              std::to_string(kControlProtocol));
  }
  return reply;
}

Result<pid_t> ControlClient::daemon_pid() const {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(descriptor_, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return system_failure("cannot ask for the daemon's process id", errno);
  }
  return peer.pid;
}

Result<void> wait_for_exit(pid_t pid, Duration timeout) {
  const int descriptor = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  if (descriptor < 0) {
    if (errno == ESRCH) return {};
    return system_failure("cannot watch process " + std::to_string(pid), errno);
  }
  auto waited = wait_for(descriptor, POLLIN, Deadline(timeout));
  ::close(descriptor);
  if (!waited && waited.error().code == ErrorCode::kDeadlineExceeded) {
    return error(ErrorCode::kDeadlineExceeded, "process " + std::to_string(pid) + " is still running");
  }
  return waited;
}

}  // namespace weft::client
