// Goal: packets arrive whole and in order with their descriptors; what breaks the limits is refused without a
// leaked descriptor; a closed socket says so.
#include "kv/packet_socket.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <array>
#include <cstring>
#include <filesystem>

#include "proto/vocab/random.h"

namespace weft::kv {
namespace {

std::vector<std::byte> random_bytes(SplitMix64& random, size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::byte& b : bytes) b = std::byte(random.below(256));
  return bytes;
}

ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

TEST(PacketSocket, PacketsArriveWholeAndInOrder) {
  auto [a, b] = packet_socket_pair().value();
  SplitMix64 random(1);
  for (size_t size : {size_t{1}, size_t{2}, size_t{4096}, kPacketBytesMax}) {
    const auto first = random_bytes(random, size);
    const auto second = random_bytes(random, 3);
    ASSERT_TRUE(send_packet(a.get(), first).has_value());
    ASSERT_TRUE(send_packet(a.get(), second).has_value());
    EXPECT_EQ(receive_packet(b.get()).value()->bytes, first);
    EXPECT_EQ(receive_packet(b.get()).value()->bytes, second);
  }
}

TEST(PacketSocket, DescriptorsNameTheSameMemory) {
  auto [a, b] = packet_socket_pair().value();
  std::vector<Descriptor> memories;
  std::vector<int> fds;
  for (size_t i = 0; i < kPacketDescriptorsMax; ++i) {
    memories.push_back(create_memory("test", 4096).value());
    fds.push_back(memories.back().get());
    Mapping::map(fds.back(), 4096).value().data()[5] = std::byte(i);
  }
  ASSERT_TRUE(send_packet(a.get(), std::array{std::byte{9}}, fds).has_value());
  memories.clear();
  const Packet packet = std::move(*receive_packet(b.get()).value());
  ASSERT_EQ(packet.descriptors.size(), kPacketDescriptorsMax);
  for (size_t i = 0; i < kPacketDescriptorsMax; ++i) {
    const int fd = packet.descriptors[i].get();
    EXPECT_EQ(Mapping::map(fd, 4096).value().data()[5], std::byte(i));
    EXPECT_NE(::fcntl(fd, F_GETFD) & FD_CLOEXEC, 0);
  }
}

TEST(PacketSocket, ClosedOtherSide) {
  auto [a, b] = packet_socket_pair().value();
  ASSERT_TRUE(send_packet(a.get(), std::array{std::byte{1}}).has_value());
  a.reset();
  EXPECT_TRUE(receive_packet(b.get()).value().has_value());  // what was sent still arrives
  EXPECT_EQ(receive_packet(b.get()).error().code, ErrorCode::kUnavailable);
  EXPECT_EQ(send_packet(b.get(), std::array{std::byte{1}}).error().code, ErrorCode::kUnavailable);
}

TEST(PacketSocket, NonBlockingEnds) {
  auto [a, b] = packet_socket_pair().value();
  ASSERT_EQ(::fcntl(a.get(), F_SETFL, O_NONBLOCK), 0);
  ASSERT_EQ(::fcntl(b.get(), F_SETFL, O_NONBLOCK), 0);
  EXPECT_FALSE(receive_packet(b.get()).value().has_value());
  const std::vector<std::byte> bytes(1000);
  Result<void> sent;
  for (int i = 0; i < 100'000 && sent; ++i) sent = send_packet(a.get(), bytes);
  ASSERT_FALSE(sent.has_value());
  EXPECT_EQ(sent.error().code, ErrorCode::kResourceExhausted);
}

TEST(PacketSocket, OversizedPacketsAreConsumedAndLeakNothing) {
  auto [a, b] = packet_socket_pair().value();
  const Descriptor memory = create_memory("test", 4096).value();
  const ptrdiff_t before = open_descriptors();
  const int wide = 1 << 20;
  ASSERT_EQ(::setsockopt(a.get(), SOL_SOCKET, SO_SNDBUF, &wide, sizeof wide), 0);

  std::vector<std::byte> bytes(kPacketBytesMax + 1);
  iovec piece{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  std::array<int, kPacketDescriptorsMax + 1> fds{};
  fds.fill(memory.get());
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof fds)> control{};
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* part = CMSG_FIRSTHDR(&message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(sizeof fds);
  std::memcpy(CMSG_DATA(part), fds.data(), sizeof fds);
  ASSERT_EQ(::sendmsg(a.get(), &message, 0), static_cast<ssize_t>(bytes.size()));
  piece.iov_len = 10;  // few bytes, still too many descriptors
  ASSERT_EQ(::sendmsg(a.get(), &message, 0), 10);
  ASSERT_TRUE(send_packet(a.get(), std::array{std::byte{3}}).has_value());

  EXPECT_EQ(receive_packet(b.get()).error().code, ErrorCode::kBadMessage);
  EXPECT_EQ(receive_packet(b.get()).error().code, ErrorCode::kBadMessage);
  EXPECT_EQ(receive_packet(b.get()).value()->bytes, std::vector{std::byte{3}});
  EXPECT_EQ(open_descriptors(), before);
}

}  // namespace
}  // namespace weft::kv
