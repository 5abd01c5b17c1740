#include "daemon/client_endpoint.h"

#include <zmq.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "daemon/socket_path.h"
#include "proto/frame.h"

namespace weft::daemon {
namespace {

constexpr int kMessagesPerTurn = 64;  // so that a flood of frames does not starve the rest of the loop
constexpr std::string_view kIpc = "ipc://";
constexpr const char* kMonitorAddress = "inproc://weft-client-monitor";

int descriptor_of(void* socket) {
  int fd = -1;
  size_t size = sizeof fd;
  zmq_getsockopt(socket, ZMQ_FD, &fd, &size);
  return fd;
}

bool is_readable(void* socket) {
  int events = 0;
  size_t size = sizeof events;
  return zmq_getsockopt(socket, ZMQ_EVENTS, &events, &size) == 0 && (events & ZMQ_POLLIN) != 0;
}

void set(void* socket, int option, int value) { zmq_setsockopt(socket, option, &value, sizeof value); }

Error bind_error(const std::string& address) {
  const int code = zmq_errno();
  const ErrorCode kind = code == EADDRINUSE ? ErrorCode::kFailedPrecondition
                         : code == EINVAL   ? ErrorCode::kInvalidArgument
                                            : ErrorCode::kIo;
  return error(kind, "cannot listen at " + address + ": " + zmq_strerror(code), "--client-endpoint");
}

}  // namespace

struct ClientEndpoint::Sockets {
  void* context = zmq_ctx_new();
  void* router = zmq_socket(context, ZMQ_ROUTER);
  void* monitor = zmq_socket(context, ZMQ_PAIR);
  ~Sockets() {
    zmq_close(monitor);
    zmq_close(router);
    zmq_ctx_term(context);
  }
  Sockets() = default;
  Sockets(const Sockets&) = delete;
  Sockets& operator=(const Sockets&) = delete;
};

Result<std::unique_ptr<ClientEndpoint>> ClientEndpoint::bind(Loop& loop, const EventLog& log,
                                                             const std::string& address,
                                                             const ClientEndpointLimits& limits,
                                                             Listener& listener) {
  // ZeroMQ would silently take a path that another process listens at.
  if (address.rfind(kIpc, 0) == 0) {
    TRY_VOID(claim_socket_path(address.substr(kIpc.size()), "--client-endpoint"));
  }
  auto sockets = std::make_unique<Sockets>();
  set(sockets->monitor, ZMQ_LINGER, 0);
  set(sockets->router, ZMQ_LINGER, 0);
  set(sockets->router, ZMQ_ROUTER_MANDATORY, 1);
  set(sockets->router, ZMQ_SNDHWM, limits.queue_frames);
  set(sockets->router, ZMQ_RCVHWM, limits.queue_frames);
  set(sockets->router, ZMQ_HEARTBEAT_IVL, 5'000);
  set(sockets->router, ZMQ_HEARTBEAT_TIMEOUT, 30'000);
  zmq_setsockopt(sockets->router, ZMQ_MAXMSGSIZE, &limits.frame_bytes, sizeof limits.frame_bytes);
  if (zmq_socket_monitor(sockets->router, kMonitorAddress, ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_DISCONNECTED) !=
          0 ||
      zmq_connect(sockets->monitor, kMonitorAddress) != 0) {
    return error(ErrorCode::kIo, std::string("cannot watch the client socket: ") + zmq_strerror(zmq_errno()));
  }
  if (zmq_bind(sockets->router, address.c_str()) != 0) return bind_error(address);
  return std::unique_ptr<ClientEndpoint>(new ClientEndpoint(loop, log, listener, std::move(sockets)));
}

ClientEndpoint::ClientEndpoint(Loop& loop, const EventLog& log, Listener& listener,
                               std::unique_ptr<Sockets> sockets)
    : log_(log), listener_(listener), sockets_(std::move(sockets)) {
  char bound[512];
  size_t size = sizeof bound;
  if (zmq_getsockopt(sockets_->router, ZMQ_LAST_ENDPOINT, bound, &size) == 0)
    address_.assign(bound, size - 1);
  if (address_.rfind(kIpc, 0) == 0) path_ = OwnedPath(address_.substr(kIpc.size()));
  // The watches only wake the loop; the work is done in turn().
  router_watch_ = std::make_unique<Watch>(loop, descriptor_of(sockets_->router), [](int) {});
  monitor_watch_ = std::make_unique<Watch>(loop, descriptor_of(sockets_->monitor), [](int) {});
  router_watch_->start(kReadable);
  monitor_watch_->start(kReadable);
  hook_ = std::make_unique<TurnHook>(
      loop, [this] { return busy(); }, [this] { turn(); });
}

ClientEndpoint::~ClientEndpoint() {
  stop_accepting();
  hook_.reset();
  router_watch_.reset();
  monitor_watch_.reset();
}

void ClientEndpoint::set_linger(Duration linger) {
  set(sockets_->router, ZMQ_LINGER,
      static_cast<int>(std::chrono::duration_cast<std::chrono::milliseconds>(linger).count()));
}

void ClientEndpoint::stop_accepting() {
  if (!std::exchange(accepting_, false)) return;
  // ZeroMQ leaves the file. (Unbinding would close the connections that came through it, and lose their last
  // replies.)
  path_.remove();
}

bool ClientEndpoint::busy() { return is_readable(sockets_->router) || is_readable(sockets_->monitor); }

void ClientEndpoint::turn() {
  drain_monitor();
  for (int taken = 0; taken < kMessagesPerTurn && take_message(); ++taken) {
  }
}

// A message: its identity, then frames. False: none there.
bool ClientEndpoint::take_message() {
  Frame identity;
  if (!identity.receive(sockets_->router)) return false;
  const ClientIdentity client(identity.view());
  Frame payload;
  bool single = identity.more() && payload.receive(sockets_->router);
  for (bool more = single && payload.more(); more;) {
    Frame extra;
    single = false;
    more = extra.receive(sockets_->router) && extra.more();
  }
  remember(client, payload.descriptor());
  if (single) {
    listener_.client_frame(client, payload.view());
  } else {
    listener_.client_bad_message(client);
  }
  return true;
}

// Before a new peer is entered under its descriptor, all older events are read: a descriptor's former owner
// has been told gone before its number was given again, so no departure can hit the wrong peer. (One I/O
// thread emits both.)
void ClientEndpoint::remember(const ClientIdentity& client, int descriptor) {
  const auto known = known_.find(client);
  if (descriptor < 0 || (known != known_.end() && known->second == descriptor)) return;
  drain_monitor();
  by_descriptor_[descriptor] = client;
  known_[client] = descriptor;
}

void ClientEndpoint::drain_monitor() {
  for (;;) {
    Frame head;
    if (!head.receive(sockets_->monitor)) return;
    for (bool more = head.more(); more;) {
      Frame address;
      more = address.receive(sockets_->monitor) && address.more();
    }
    uint16_t event = 0;
    int32_t value = 0;
    if (head.view().size() < sizeof event + sizeof value) continue;
    std::memcpy(&event, head.view().data(), sizeof event);
    std::memcpy(&value, head.view().data() + sizeof event, sizeof value);
    const auto found = by_descriptor_.find(value);
    if (event != ZMQ_EVENT_DISCONNECTED || found == by_descriptor_.end()) continue;
    const ClientIdentity client = found->second;
    by_descriptor_.erase(found);
    known_.erase(client);
    log_.debug("client_gone", {{"descriptor", int64_t{value}}});
    listener_.client_gone(client);
  }
}

ClientEndpoint::Sent ClientEndpoint::send(const ClientIdentity& client, const std::string& frame) {
  if (zmq_send(sockets_->router, client.data(), client.size(), ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0) {
    return zmq_errno() == EAGAIN ? Sent::kFull : Sent::kGone;
  }
  if (zmq_send(sockets_->router, frame.data(), frame.size(), ZMQ_DONTWAIT) < 0) return Sent::kGone;
  return Sent::kSent;
}

}  // namespace weft::daemon
