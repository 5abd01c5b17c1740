// The ZeroMQ ROUTER that clients talk to: frames in, frames out, and who is gone.
//
// Knows nothing of requests. A message is the peer's identity and one frame; anything else is told as a bad
// frame. Frames beyond the limit never arrive: ZeroMQ drops the connection. send() never waits: a peer whose
// queue is full says kFull, one that has left says kGone. Departures are also announced: the socket's monitor
// reports the closed descriptor, and every message tells which descriptor its peer came by. ZeroMQ heartbeats
// find dead hosts.
//
// The descriptor of a ZeroMQ socket is edge triggered, so its events are asked for in every turn of the loop.
// Loop thread only; ZeroMQ's own thread does the I/O.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "daemon/event_log.h"
#include "daemon/loop.h"
#include "daemon/socket_path.h"
#include "proto/vocab/result.h"

namespace weft::daemon {

using ClientIdentity = std::string;

struct ClientEndpointLimits {
  int64_t frame_bytes = int64_t{64} << 20;
  int queue_frames = 256;  // per peer, each way, before kFull
};

class ClientEndpoint {
 public:
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void client_frame(const ClientIdentity& client, std::string_view frame) = 0;
    // More or fewer frames than one.
    virtual void client_bad_message(const ClientIdentity& client) = 0;
    virtual void client_gone(const ClientIdentity& client) = 0;
  };
  enum class Sent : uint8_t { kSent, kFull, kGone };

  // kFailedPrecondition: the address is in use. kIo, kInvalidArgument: it cannot be bound.
  static Result<std::unique_ptr<ClientEndpoint>> bind(Loop& loop, const EventLog& log,
                                                      const std::string& address,
                                                      const ClientEndpointLimits& limits, Listener& listener);
  ~ClientEndpoint();

  const std::string& address() const { return address_; }  // as bound: a wildcard port is resolved
  Sent send(const ClientIdentity& client, const std::string& frame);
  // An ipc path is no longer to be found; the present connections stay. (A TCP port listens until the end.)
  void stop_accepting();
  // How long the destructor may go on handing out what was sent. Default: not at all.
  void set_linger(Duration linger);

 private:
  struct Sockets;
  ClientEndpoint(Loop& loop, const EventLog& log, Listener& listener, std::unique_ptr<Sockets> sockets);
  bool busy();
  void turn();
  void drain_monitor();
  bool take_message();
  void remember(const ClientIdentity& client, int descriptor);

  const EventLog& log_;
  Listener& listener_;
  std::unique_ptr<Sockets> sockets_;
  std::string address_;
  OwnedPath path_;  // of an ipc address
  bool accepting_ = true;
  std::map<int, ClientIdentity> by_descriptor_;
  std::map<ClientIdentity, int> known_;
  std::unique_ptr<Watch> router_watch_, monitor_watch_;
  std::unique_ptr<TurnHook> hook_;
};

}  // namespace weft::daemon
