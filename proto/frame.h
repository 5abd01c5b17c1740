// One part of a ZeroMQ message: received without waiting, read in place, closed by itself.
//
// Views live until the next receive. Only the two ends of the client conversation include this, for the sake
// of zmq.h.
#pragma once

#include <zmq.h>

#include <string_view>

namespace weft {

class Frame {
 public:
  Frame() { zmq_msg_init(&message_); }
  ~Frame() { zmq_msg_close(&message_); }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;
  // False: there is none, or the socket failed (zmq_errno).
  bool receive(void* socket) { return zmq_msg_recv(&message_, socket, ZMQ_DONTWAIT) >= 0; }
  bool more() const { return zmq_msg_more(&message_) != 0; }
  std::string_view view() {
    return {static_cast<const char*>(zmq_msg_data(&message_)), zmq_msg_size(&message_)};
  }
  // The descriptor of the connection it came by. Deprecated in ZeroMQ for use with other system calls; as a
  // key it is the only link between a message and the monitor's events.
  int descriptor() { return zmq_msg_get(&message_, ZMQ_SRCFD); }

 private:
  zmq_msg_t message_;
};

}  // namespace weft
