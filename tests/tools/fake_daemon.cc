#include "tests/tools/fake_daemon.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <zmq.h>

#include <cstring>

#include "proto/endpoints.h"
#include "proto/vocab/check.h"

namespace weft::test {
namespace {

std::string receive_part(void* socket) {
  zmq_msg_t message;
  zmq_msg_init(&message);
  CHECK(zmq_msg_recv(&message, socket, 0) >= 0);
  std::string out(static_cast<const char*>(zmq_msg_data(&message)), zmq_msg_size(&message));
  zmq_msg_close(&message);
  return out;
}

int listen_at(const std::string& path) {
  const int descriptor = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  CHECK(path.size() < sizeof address.sun_path);
  std::memcpy(address.sun_path, path.data(), path.size());
  CHECK(::bind(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0, path);
  CHECK(::listen(descriptor, 16) == 0);
  return descriptor;
}

}  // namespace

std::string frame_of(const std::string& body) {
  std::string out;
  for (int i = 0; i < 4; ++i) out += static_cast<char>(body.size() >> (8 * i));
  return out + body;
}

std::string framed(wire::ControlReply reply) {
  reply.set_version(1);
  return frame_of(reply.SerializeAsString());
}

FakeDaemon::FakeDaemon(OnClient on_client, OnControl on_control)
    : on_client_(std::move(on_client)), on_control_(std::move(on_control)) {
  context_ = zmq_ctx_new();
  router_ = zmq_socket(context_, ZMQ_ROUTER);
  CHECK(zmq_bind(router_, endpoint().c_str()) == 0, zmq_strerror(zmq_errno()));
  listener_ = listen_at(control_socket());
  stop_ = ::eventfd(0, EFD_CLOEXEC);
  thread_ = std::thread([this] { run(); });
}

FakeDaemon::~FakeDaemon() { stop(); }

std::string FakeDaemon::endpoint() const { return client_endpoint_in(folder()); }
std::string FakeDaemon::control_socket() const { return control_socket_in(folder()); }

void FakeDaemon::send_raw_next(std::string bytes) { raw_ = std::move(bytes); }

void FakeDaemon::stop() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  CHECK(::write(stop_, &one, sizeof one) == sizeof one);
  thread_.join();
  for (const Connection& connection : connections_) ::close(connection.descriptor);
  const int none = 0;
  zmq_setsockopt(router_, ZMQ_LINGER, &none, sizeof none);
  zmq_close(router_);
  zmq_ctx_term(context_);
  ::close(listener_);
  ::close(stop_);
}

void FakeDaemon::run() {
  while (true) {
    std::vector<zmq_pollitem_t> items = {
        {nullptr, stop_, ZMQ_POLLIN, 0}, {router_, 0, ZMQ_POLLIN, 0}, {nullptr, listener_, ZMQ_POLLIN, 0}};
    for (const Connection& connection : connections_)
      items.push_back({nullptr, connection.descriptor, ZMQ_POLLIN, 0});
    if (zmq_poll(items.data(), static_cast<int>(items.size()), -1) < 0) continue;
    if (items[0].revents != 0) return;
    if (items[1].revents != 0) serve_client();
    std::vector<Connection> kept;
    for (size_t i = 0; i < connections_.size(); ++i) {
      if (items[3 + i].revents == 0 || serve_control(connections_[i])) {
        kept.push_back(std::move(connections_[i]));
      } else {
        ::close(connections_[i].descriptor);
      }
    }
    connections_ = std::move(kept);
    if (items[2].revents != 0) connections_.push_back({::accept(listener_, nullptr, nullptr), {}});
  }
}

void FakeDaemon::serve_client() {
  const std::string peer = receive_part(router_);
  wire::ClientRequest request;
  CHECK(request.ParseFromString(receive_part(router_)));
  on_client_(request, [&](wire::ClientReply reply) {
    if (reply.version() == 0) reply.set_version(1);
    if (reply.tag() == 0) reply.set_tag(request.tag());
    const std::string bytes = raw_.empty() ? reply.SerializeAsString() : std::exchange(raw_, {});
    zmq_send(router_, peer.data(), peer.size(), ZMQ_SNDMORE);
    zmq_send(router_, bytes.data(), bytes.size(), 0);
  });
}

// False: the connection is at its end.
bool FakeDaemon::serve_control(Connection& connection) {
  char bytes[4096];
  const ssize_t received = ::recv(connection.descriptor, bytes, sizeof bytes, 0);
  if (received <= 0) return false;
  connection.in.append(bytes, static_cast<size_t>(received));
  while (connection.in.size() >= 4) {
    size_t size = 0;
    for (size_t i = 0; i < 4; ++i) size |= size_t{static_cast<unsigned char>(connection.in[i])} << (8 * i);
    if (connection.in.size() < 4 + size) break;
    wire::ControlRequest request;
    CHECK(request.ParseFromString(connection.in.substr(4, size)));
    connection.in.erase(0, 4 + size);
    // Byte by byte: a reader must put a frame together whatever its pieces.
    for (const char byte : on_control_(request)) ::send(connection.descriptor, &byte, 1, MSG_NOSIGNAL);
    if (close_after_reply_) return false;
  }
  return true;
}

}  // namespace weft::test
