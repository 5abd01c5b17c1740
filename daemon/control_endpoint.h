// The control socket: a Unix stream socket for the daemon's owner alone, mode 0600.
//
// Frames are a 4-byte little-endian length and that many bytes of ControlRequest. Each connection's requests
// are answered one by one, in order; an answer may come later. A frame that is too large or does not parse
// gets a typed error, then the connection is closed: by the client, or after kClosingLinger. At most
// kConnectionsMax connections. Loop thread only.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "daemon/loop.h"
#include "daemon/socket_path.h"
#include "kv/shared_memory.h"
#include "proto/control.pb.h"
#include "proto/vocab/result.h"

namespace weft::daemon {

class ControlEndpoint {
 public:
  static constexpr uint32_t kFrameBytesMax = 1u << 20;
  static constexpr size_t kConnectionsMax = 32;
  static constexpr Duration kClosingLinger = std::chrono::seconds(1);

  // Called once per request; `reply` may be called at once or later, once.
  using Reply = std::function<void(wire::ControlReply)>;
  using Handler = std::function<void(const wire::ControlRequest& request, Reply reply)>;

  // kFailedPrecondition: somebody listens there.
  static Result<std::unique_ptr<ControlEndpoint>> listen(Loop& loop, const std::string& path,
                                                         Handler handler);
  ~ControlEndpoint();  // removes the socket file

 private:
  struct Connection;
  ControlEndpoint(Loop& loop, std::string path, kv::Descriptor listener, Handler handler);
  void accept_all();
  void ready(uint64_t id, int events);
  void read_frames(uint64_t id);
  void send_reply(uint64_t id, const wire::ControlReply& reply, bool last);
  void flush(uint64_t id);

  Loop& loop_;
  OwnedPath path_;
  kv::Descriptor listener_;
  Handler handler_;
  std::unique_ptr<Watch> listen_watch_;
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;
  uint64_t next_id_ = 1;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // late replies hold it weakly
};

}  // namespace weft::daemon
