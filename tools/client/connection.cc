#include "tools/client/connection.h"

#include <unistd.h>
#include <zmq.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "proto/frame.h"
#include "proto/version.h"

namespace weft::client {
namespace {

constexpr char kMonitor[] = "inproc://monitor";
constexpr int kMonitored = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_CONNECT_RETRIED |
                           ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                           ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;
// A daemon that is stopped (not gone) is noticed by its silence; over a Unix socket its death is seen at
// once.
constexpr int kHeartbeatMs = 2'000;
constexpr int kHeartbeatTimeoutMs = 30'000;

Error zmq_failure(const std::string& what) {
  return error(ErrorCode::kIo, what + ": " + zmq_strerror(zmq_errno()));
}

}  // namespace

Client::Connection::~Connection() {
  if (monitor_ != nullptr) zmq_close(monitor_);
  if (dealer_ != nullptr) zmq_close(dealer_);
  if (context_ != nullptr) zmq_ctx_term(context_);
}

Result<void> Client::Connection::open(const ClientOptions& options) {
  options_ = options;
  context_ = zmq_ctx_new();
  if (context_ == nullptr) return zmq_failure("cannot start ZeroMQ");
  dealer_ = zmq_socket(context_, ZMQ_DEALER);
  if (dealer_ == nullptr) return zmq_failure("cannot make a ZeroMQ socket");
  const int none = 0;
  zmq_setsockopt(dealer_, ZMQ_LINGER, &none, sizeof none);
  zmq_setsockopt(dealer_, ZMQ_HEARTBEAT_IVL, &kHeartbeatMs, sizeof kHeartbeatMs);
  zmq_setsockopt(dealer_, ZMQ_HEARTBEAT_TIMEOUT, &kHeartbeatTimeoutMs, sizeof kHeartbeatTimeoutMs);
  if (zmq_socket_monitor(dealer_, kMonitor, kMonitored) != 0)
    return zmq_failure("cannot watch the connection");
  monitor_ = zmq_socket(context_, ZMQ_PAIR);
  if (monitor_ == nullptr || zmq_connect(monitor_, kMonitor) != 0) {
    return zmq_failure("cannot watch the connection");
  }
  if (zmq_connect(dealer_, options_.endpoint.c_str()) != 0) {
    return error(ErrorCode::kInvalidArgument,
                 "\"" + options_.endpoint + "\": " + zmq_strerror(zmq_errno()) +
                     " (an endpoint looks like ipc:///path/client.sock or tcp://127.0.0.1:5555)",
                 "client endpoint");
  }
  return wait_for_handshake(Deadline(options_.connect_timeout));
}

Result<void> Client::Connection::wait_for_handshake(const Deadline& deadline) {
  while (!connected_) {
    if (refused_) return no_daemon();
    if (deadline.passed()) {
      return error(ErrorCode::kUnavailable, "no answer from " + options_.endpoint + " within the timeout");
    }
    TRY_VOID(wait(deadline));
  }
  return {};
}

Error Client::Connection::no_daemon() const {
  constexpr char kIpc[] = "ipc://";
  if (options_.endpoint.rfind(kIpc, 0) == 0) {
    const std::string path = options_.endpoint.substr(sizeof kIpc - 1);
    if (::access(path.c_str(), W_OK) != 0 && errno == EACCES) {
      return error(ErrorCode::kNotPermitted, "no permission to use " + path);
    }
  }
  return error(ErrorCode::kUnavailable, "no daemon listens at " + options_.endpoint);
}

Result<uint64_t> Client::Connection::send(wire::ClientRequest request, bool expects_reply) {
  if (lost_) return error(ErrorCode::kUnavailable, "the connection to the daemon is lost");
  const uint64_t tag = next_tag_++;
  request.set_version(kClientProtocol);
  request.set_tag(tag);
  std::string bytes;
  if (!request.SerializeToString(&bytes)) {
    return error(ErrorCode::kInvalidArgument, "the request cannot be encoded (is its text valid UTF-8?)");
  }
  // The DEALER's queue holds a thousand messages; only a daemon that reads nothing lets it fill.
  if (zmq_send(dealer_, bytes.data(), bytes.size(), ZMQ_DONTWAIT) < 0) {
    return zmq_errno() == EAGAIN ? error(ErrorCode::kUnavailable, "the daemon takes no requests")
                                 : zmq_failure("cannot send");
  }
  if (expects_reply) inbox_[tag];
  return tag;
}

Result<wire::ClientReply> Client::Connection::take(uint64_t tag, const Deadline& deadline) {
  const auto known = inbox_.find(tag);
  if (known == inbox_.end()) return error(ErrorCode::kNotFound, "no such stream", "tag");
  while (true) {
    auto& replies = known->second;
    if (!replies.empty()) {
      wire::ClientReply reply = std::move(replies.front());
      replies.pop_front();
      return reply;
    }
    if (lost_) return error(ErrorCode::kUnavailable, "the connection to the daemon is lost");
    if (deadline.passed()) return error(ErrorCode::kDeadlineExceeded, "no reply within the timeout");
    TRY_VOID(wait(deadline));
  }
}

// Sleeps until a reply, a change of the connection, an interrupt or the deadline, and takes in what came.
Result<void> Client::Connection::wait(const Deadline& deadline) {
  zmq_pollitem_t items[] = {{dealer_, 0, ZMQ_POLLIN, 0},
                            {monitor_, 0, ZMQ_POLLIN, 0},
                            {nullptr, options_.interrupt_fd, ZMQ_POLLIN, 0}};
  const int count = options_.interrupt_fd >= 0 ? 3 : 2;
  if (zmq_poll(items, count, deadline.poll_ms()) < 0) {
    if (zmq_errno() == EINTR) return {};
    return zmq_failure("cannot wait");
  }
  if (count == 3 && (items[2].revents & ZMQ_POLLIN) != 0) {
    char drained[256];
    if (::read(options_.interrupt_fd, drained, sizeof drained) > 0) {
      return interrupt_error();
    }
  }
  if ((items[1].revents & ZMQ_POLLIN) != 0) read_monitor();
  // After the monitor: what was sent before a disconnect is taken in before lost_ is reported.
  return receive_all();
}

Result<void> Client::Connection::receive_all() {
  while (true) {
    Frame frame;
    if (!frame.receive(dealer_)) {
      if (zmq_errno() == EAGAIN || zmq_errno() == EINTR) return {};
      return zmq_failure("cannot receive");
    }
    wire::ClientReply reply;
    const bool whole = !frame.more();
    while (frame.more() && frame.receive(dealer_)) {
    }
    if (!whole || !reply.ParseFromArray(frame.view().data(), static_cast<int>(frame.view().size()))) {
      return error(ErrorCode::kBadMessage, "the daemon sent a message that does not parse");
    }
    if (reply.version() != kClientProtocol) {
      return error(ErrorCode::kUnsupported, "the daemon speaks client protocol " +
                                                std::to_string(reply.version()) + ", this client " +
                                                std::to_string(kClientProtocol));
    }
    const auto known = inbox_.find(reply.tag());
    if (known != inbox_.end()) known->second.push_back(std::move(reply));
  }
}

void Client::Connection::read_monitor() {
  while (true) {
    Frame event;
    if (!event.receive(monitor_)) return;
    uint16_t kind = 0;
    if (event.view().size() >= sizeof kind) std::memcpy(&kind, event.view().data(), sizeof kind);
    Frame address;
    address.receive(monitor_);
    if (kind == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
      if (connected_) lost_ = true;  // a second handshake is another daemon
      connected_ = true;
    } else if (connected_) {
      if (kind == ZMQ_EVENT_DISCONNECTED) lost_ = true;
    } else {
      refused_ = true;
    }
  }
}

}  // namespace weft::client
