#include "kv/packet_socket.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <string>

#include "proto/vocab/check.h"

namespace weft::kv {
namespace {

constexpr size_t kControlBytes = CMSG_SPACE(kPacketDescriptorsMax * sizeof(int));

Error socket_error(const char* what) {
  const ErrorCode code = errno == EPIPE || errno == ECONNRESET || errno == ENOTCONN ? ErrorCode::kUnavailable
                         : errno == EAGAIN || errno == EWOULDBLOCK ? ErrorCode::kResourceExhausted
                                                                   : ErrorCode::kIo;
  return error(code, std::string(what) + ": " + std::strerror(errno));
}

// Takes ownership of every descriptor that came along, whatever becomes of the packet.
std::vector<Descriptor> take_descriptors(msghdr& message) {
  std::vector<Descriptor> taken;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof fd);
      taken.emplace_back(fd);
    }
  }
  return taken;
}

}  // namespace

Result<std::pair<Descriptor, Descriptor>> packet_socket_pair() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0)
    return socket_error("socketpair");
  return std::pair(Descriptor(ends[0]), Descriptor(ends[1]));
}

Result<void> send_packet(int fd, std::span<const std::byte> bytes, std::span<const int> descriptors) {
  CHECK(!bytes.empty());
  CHECK_LE(bytes.size(), kPacketBytesMax);
  CHECK_LE(descriptors.size(), kPacketDescriptorsMax);
  iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<std::byte, kControlBytes> control{};
  if (!descriptors.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(part), descriptors.data(), descriptors.size_bytes());
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(fd, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return socket_error("send");
  CHECK_EQ(static_cast<size_t>(sent), bytes.size());  // a packet socket sends all or nothing
  return {};
}

Result<std::optional<Packet>> receive_packet(int fd) {
  Packet packet;
  packet.bytes.resize(kPacketBytesMax);
  iovec piece{packet.bytes.data(), packet.bytes.size()};
  alignas(cmsghdr) std::array<std::byte, kControlBytes> control{};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = 0;
  do {
    got = ::recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return std::optional<Packet>();
    return socket_error("receive");
  }
  packet.descriptors = take_descriptors(message);
  if (got == 0) return error(ErrorCode::kUnavailable, "the other side closed the socket");
  if ((message.msg_flags & MSG_TRUNC) != 0) {
    return error(ErrorCode::kBadMessage, "packet of more than " + std::to_string(kPacketBytesMax) + " bytes");
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    return error(ErrorCode::kBadMessage,
                 "packet with more than " + std::to_string(kPacketDescriptorsMax) + " descriptors");
  }
  packet.bytes.resize(static_cast<size_t>(got));
  return std::optional<Packet>(std::move(packet));
}

}  // namespace weft::kv
