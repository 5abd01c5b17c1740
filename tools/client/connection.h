// The ZeroMQ side of Client: one DEALER, its monitor, and the replies not yet taken.
//
// Keeps: a reply is in the inbox of its tag, or was taken, or its tag is unknown and it was dropped.
// Once lost() is true nothing is sent any more; replies that had arrived can still be taken.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>

#include "proto/client.pb.h"
#include "proto/vocab/result.h"
#include "tools/client/client.h"
#include "tools/client/deadline.h"

namespace weft::client {

struct Client::Connection {
  Connection() = default;
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  Result<void> open(const ClientOptions& options);
  // Numbers the request, remembers its tag and sends it.
  Result<uint64_t> send(wire::ClientRequest request, bool expects_reply);
  // Takes the oldest reply of a tag, waiting for it.
  Result<wire::ClientReply> take(uint64_t tag, const Deadline& deadline);
  void forget(uint64_t tag) { inbox_.erase(tag); }

 private:
  Result<void> wait_for_handshake(const Deadline& deadline);
  Result<void> wait(const Deadline& deadline);
  Result<void> receive_all();
  void read_monitor();
  Error no_daemon() const;

  ClientOptions options_;
  void* context_ = nullptr;
  void* dealer_ = nullptr;
  void* monitor_ = nullptr;
  bool connected_ = false;
  bool refused_ = false;  // a connection attempt failed before the handshake
  bool lost_ = false;
  uint64_t next_tag_ = 1;
  std::map<uint64_t, std::deque<wire::ClientReply>> inbox_;  // by tag; only known tags
};

}  // namespace weft::client
