// Both of the daemon's sockets in a thread of the test, answering as the test says.
//
// Real sockets (a ROUTER and a Unix listener in a fresh folder), so that the clients under test run
// unchanged. Handlers run on the fake's thread; what they record must be read after stop(), or be atomic.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "proto/client.pb.h"
#include "proto/control.pb.h"
#include "tests/support/temp_folder.h"

namespace weft::test {

class FakeDaemon {
 public:
  // Sends one reply to whom a request came from; version and tag are filled in where they are zero.
  using Send = std::function<void(wire::ClientReply)>;
  using OnClient = std::function<void(const wire::ClientRequest&, const Send&)>;
  // The bytes to write back, frame and all; empty: nothing.
  using OnControl = std::function<std::string(const wire::ControlRequest&)>;

  FakeDaemon(OnClient on_client, OnControl on_control);
  ~FakeDaemon();

  const std::string& folder() const { return folder_.path(); }
  std::string endpoint() const;
  std::string control_socket() const;
  // Closes both sockets and joins the thread.
  void stop();
  // Closes the control connection after the next reply.
  void close_after_reply() { close_after_reply_ = true; }
  // Sends these bytes instead of a serialised reply, once.
  void send_raw_next(std::string bytes);

 private:
  struct Connection {
    int descriptor;
    std::string in;
  };
  void run();
  void serve_client();
  bool serve_control(Connection& connection);

  OnClient on_client_;
  OnControl on_control_;
  test::TempFolder folder_;
  std::string raw_;
  void* context_;
  void* router_;
  int listener_;
  int stop_;
  std::atomic<bool> close_after_reply_{false};
  std::vector<Connection> connections_;
  std::thread thread_;
};

// A control reply as it goes over the socket.
std::string framed(wire::ControlReply reply);
std::string frame_of(const std::string& body);

}  // namespace weft::test
