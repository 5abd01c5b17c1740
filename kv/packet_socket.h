// Packets with descriptors over a Unix SOCK_SEQPACKET socket pair: how the daemon and a worker talk slowly.
//
// A packet arrives whole or not at all. Both directions follow the descriptor's own blocking mode: with
// O_NONBLOCK a send that has no room is kResourceExhausted and a receive that has nothing is an empty
// optional. Errors: kUnavailable when the other side is gone, kBadMessage for a packet beyond the limits (it
// is consumed and its descriptors are closed), kIo for the rest. Any thread; packets of two senders never
// mix.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kv/shared_memory.h"
#include "proto/vocab/result.h"

namespace weft::kv {

inline constexpr size_t kPacketBytesMax = 64 << 10;
inline constexpr size_t kPacketDescriptorsMax = 64;

struct Packet {
  std::vector<std::byte> bytes;
  std::vector<Descriptor> descriptors;  // close-on-exec
};

// Two connected ends, blocking, both close-on-exec (a spawner clears it for the end it passes on).
Result<std::pair<Descriptor, Descriptor>> packet_socket_pair();

// `bytes` is not empty (an empty packet reads like a closed socket) and within the limits: CHECKed.
Result<void> send_packet(int fd, std::span<const std::byte> bytes, std::span<const int> descriptors = {});

Result<std::optional<Packet>> receive_packet(int fd);

}  // namespace weft::kv
