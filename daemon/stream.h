// What one request's client still has to get, and whether it keeps up.
//
// Frames wait here in order. They go out while ZeroMQ takes them and, for tokens, while the client's credit
// lasts. A stream that cannot give everything away is *blocked*: its request is paused, and after the stall
// limit it is given up. So at most what was in flight when it blocked waits here. Pure: the transport is a
// function, times are passed in.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>

#include "daemon/client_endpoint.h"
#include "proto/vocab/clock.h"

namespace weft::daemon {

class Stream {
 public:
  using Transport = std::function<ClientEndpoint::Sent(const std::string& frame)>;

  // `credit` 0: the client set no limit.
  Stream(Transport transport, uint32_t credit)
      : transport_(std::move(transport)), limited_(credit > 0), credit_(credit) {}

  enum class Frame : uint8_t { kToken, kOther, kLast };
  // kGone: the client is not there any more.
  ClientEndpoint::Sent push(std::string frame, Frame kind, Time now);
  ClientEndpoint::Sent flush(Time now);
  void grant(uint32_t tokens);
  // The request was cut off, or the stream is given up: nothing that was made before holds the end back.
  void lift_limit() { limited_ = false; }

  bool blocked() const { return !pending_.empty(); }
  bool complete() const { return last_pushed_ && pending_.empty(); }
  bool last_pushed() const { return last_pushed_; }
  // How long it has given nothing away although it wanted to.
  Duration stalled(Time now) const { return blocked_since_ ? now - *blocked_since_ : Duration(0); }

 private:
  struct Pending {
    std::string frame;
    bool token = false;
  };
  Transport transport_;
  bool limited_;
  uint64_t credit_;
  bool last_pushed_ = false;
  std::deque<Pending> pending_;
  std::optional<Time> blocked_since_;
};

}  // namespace weft::daemon
