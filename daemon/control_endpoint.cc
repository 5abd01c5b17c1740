#include "daemon/control_endpoint.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "daemon/socket_path.h"
#include "proto/convert.h"
#include "proto/version.h"

namespace weft::daemon {
namespace {

uint32_t read_length(const std::string& bytes) {
  uint32_t length = 0;
  for (int i = 3; i >= 0; --i) length = length << 8 | static_cast<uint8_t>(bytes[static_cast<size_t>(i)]);
  return length;
}

void append_length(uint32_t length, std::string& bytes) {
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(length >> (8 * i) & 0xff);
}

Error io_error(const std::string& path) {
  return error(ErrorCode::kIo, "cannot listen at " + path + ": " + std::strerror(errno), "--control-socket");
}

}  // namespace

struct ControlEndpoint::Connection {
  kv::Descriptor socket;
  std::unique_ptr<Watch> watch;
  std::string in, out;
  bool answering = false;  // a request waits for its reply: no further one is taken
  bool closing = false;    // no more requests: close when `out` is written and read, or after the linger
  std::unique_ptr<Timer> linger;
};

Result<std::unique_ptr<ControlEndpoint>> ControlEndpoint::listen(Loop& loop, const std::string& path,
                                                                 Handler handler) {
  TRY_VOID(claim_socket_path(path, "--control-socket"));
  kv::Descriptor listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.valid()) return io_error(path);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const mode_t before = ::umask(0177);  // so that the file never exists with a wider mode
  const int bound = ::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address);
  ::umask(before);
  if (bound != 0 || ::listen(listener.get(), SOMAXCONN) != 0) return io_error(path);
  return std::unique_ptr<ControlEndpoint>(
      new ControlEndpoint(loop, path, std::move(listener), std::move(handler)));
}

ControlEndpoint::ControlEndpoint(Loop& loop, std::string path, kv::Descriptor listener, Handler handler)
    : loop_(loop), path_(path), listener_(std::move(listener)), handler_(std::move(handler)) {
  listen_watch_ = std::make_unique<Watch>(loop, listener_.get(), [this](int) { accept_all(); });
  listen_watch_->start(kReadable);
}

ControlEndpoint::~ControlEndpoint() {
  connections_.clear();
  listen_watch_.reset();
  path_.remove();
}

void ControlEndpoint::accept_all() {
  for (;;) {
    kv::Descriptor socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) return;
    ucred peer{};
    socklen_t size = sizeof peer;
    const bool known = ::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0;
    const bool owner = known && (peer.uid == ::geteuid() || peer.uid == 0);
    const uint64_t id = next_id_++;
    auto connection = std::make_unique<Connection>();
    connection->socket = std::move(socket);
    connection->watch = std::make_unique<Watch>(loop_, connection->socket.get(),
                                                [this, id](int events) { ready(id, events); });
    connection->watch->start(kReadable);
    connections_.emplace(id, std::move(connection));
    wire::ControlReply refusal;
    if (!owner) {
      fill_error(error(ErrorCode::kNotPermitted, "only the daemon's owner may use this socket"),
                 refusal.mutable_error());
      send_reply(id, refusal, true);
    } else if (connections_.size() > kConnectionsMax) {
      fill_error(error(ErrorCode::kResourceExhausted,
                       "more than " + std::to_string(kConnectionsMax) + " connections"),
                 refusal.mutable_error());
      send_reply(id, refusal, true);
    }
  }
}

void ControlEndpoint::ready(uint64_t id, int events) {
  if ((events & kWritable) != 0) flush(id);
  const auto found = connections_.find(id);
  if (found == connections_.end() || (events & kReadable) == 0) return;
  Connection& own = *found->second;
  char buffer[16 << 10];
  const ssize_t got = ::read(own.socket.get(), buffer, sizeof buffer);
  if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
    connections_.erase(found);
    return;
  }
  if (got > 0 && !own.closing) own.in.append(buffer, static_cast<size_t>(got));
  read_frames(id);
}

void ControlEndpoint::read_frames(uint64_t id) {
  for (;;) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    Connection& own = *found->second;
    if (own.closing || own.answering || own.in.size() < 4) break;
    const uint32_t length = read_length(own.in);
    wire::ControlReply refusal;
    if (length > kFrameBytesMax) {
      fill_error(error(ErrorCode::kTooLarge, "frame of " + std::to_string(length) + " bytes, limit " +
                                                 std::to_string(kFrameBytesMax)),
                 refusal.mutable_error());
      return send_reply(id, refusal, true);
    }
    if (own.in.size() < size_t{4} + length) break;
    wire::ControlRequest request;
    const bool parsed = request.ParseFromArray(own.in.data() + 4, static_cast<int>(length));
    own.in.erase(0, size_t{4} + length);
    if (!parsed || request.version() != kControlProtocol ||
        request.body_case() == wire::ControlRequest::BODY_NOT_SET) {
      const char* what = !parsed                                 ? "the frame is no ControlRequest"
                         : request.version() != kControlProtocol ? "unknown protocol version"
                                                                 : "the request is empty or unknown";
      fill_error(error(ErrorCode::kBadMessage, what), refusal.mutable_error());
      return send_reply(id, refusal, true);
    }
    own.answering = true;
    handler_(request, [this, id, alive = std::weak_ptr<bool>(alive_)](const wire::ControlReply& reply) {
      if (!alive.expired()) send_reply(id, reply, false);
    });
  }
  // A client that sends on while its request is being answered waits in its own socket.
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection& own = *found->second;
  const bool full = own.answering && own.in.size() > kFrameBytesMax;
  own.watch->start((full ? 0 : kReadable) | (own.out.empty() ? 0 : kWritable));
}

void ControlEndpoint::send_reply(uint64_t id, const wire::ControlReply& reply, bool last) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;  // the client has left
  Connection& own = *found->second;
  wire::ControlReply versioned = reply;
  versioned.set_version(kControlProtocol);
  const std::string bytes = versioned.SerializeAsString();
  append_length(static_cast<uint32_t>(bytes.size()), own.out);
  own.out += bytes;
  if (last && !own.closing) {
    own.closing = true;
    own.linger = std::make_unique<Timer>(loop_, [this, id] { connections_.erase(id); });
    own.linger->start(kClosingLinger);
  }
  const bool was_answering = std::exchange(own.answering, false);
  flush(id);
  // Further frames that have come meanwhile; not from inside of read_frames(), which goes on by itself.
  if (was_answering && !last) {
    loop_.defer([this, id, alive = std::weak_ptr<bool>(alive_)] {
      if (!alive.expired()) read_frames(id);
    });
  }
}

void ControlEndpoint::flush(uint64_t id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection& own = *found->second;
  while (!own.out.empty()) {
    const ssize_t put = ::send(own.socket.get(), own.out.data(), own.out.size(), MSG_NOSIGNAL);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0 && errno == EAGAIN) break;
    if (put < 0) {
      connections_.erase(found);
      return;
    }
    own.out.erase(0, static_cast<size_t>(put));
  }
  if (own.out.empty() && own.closing) {
    // Let the client read the answer before the connection resets for what it sent unread.
    ::shutdown(own.socket.get(), SHUT_WR);
  }
  own.watch->start(kReadable | (own.out.empty() ? 0 : kWritable));
}

}  // namespace weft::daemon
