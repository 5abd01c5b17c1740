// A connection to weftd's client API (proto/client.proto): a ZeroMQ DEALER behind plain calls.
//
// Owns the socket and the replies that have arrived and not been taken. Any number of streams run over one
// connection; each is named by the tag that start() gave it, and next() hands out its replies in order.
// A lost connection is final: every later call fails with kUnavailable, since the daemon that knew the
// streams is gone. Timeouts are for one call, counted on the monotonic clock; kForever waits.
// One thread at a time. Expected failures are Results; nothing throws.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "proto/client.pb.h"
#include "proto/vocab/clock.h"
#include "proto/vocab/result.h"

namespace weft::client {

inline constexpr Duration kForever = Duration::max();

// The error that says that interrupt_fd became readable, and whether an error is that one (and not a request
// that somebody cancelled).
Error interrupt_error();
bool is_interrupt(const Error& error);

// What became of a stream that has ended: fine for "stop" and "length", else the daemon's error, or
// kCancelled: by the user (interrupt_error()) where `interrupted` is set.
Result<void> outcome_of(const wire::Finished& finished, bool interrupted);

struct ClientOptions {
  std::string endpoint;  // "ipc:///run/user/1000/weft/client.sock", "tcp://127.0.0.1:5555"
  Duration connect_timeout = std::chrono::seconds(5);
  // A descriptor that becomes readable when the user wants out (a signalfd, an eventfd); -1: none. It is
  // drained by the call that it interrupts.
  int interrupt_fd = -1;
};

// Called as the replies of one stream arrive; any may be empty.
struct StreamHandlers {
  std::function<void(const wire::Accepted&)> accepted;
  std::function<void(const wire::PrefillProgress&)> progress;
  std::function<void(const wire::TokenEvent&)> token;
  std::function<void(const wire::PositionDigest&)> digest;
  std::function<void()> interrupted;  // the user wants out, and the request has been cancelled for it
};

class Client {
 public:
  // Returns once the daemon has answered the handshake; kUnavailable as soon as nobody listens.
  static Result<Client> connect(const ClientOptions& options);
  Client(Client&&) noexcept;
  Client& operator=(Client&&) noexcept;
  ~Client();

  Result<wire::ModelList> list_models(Duration timeout);
  Result<std::vector<uint32_t>> tokenize(const std::string& model, const std::string& text, Duration timeout);
  Result<void> cancel(uint64_t request, Duration timeout);

  // Runs one request to its end. An interrupt cancels it and still waits for Finished (reason "cancelled");
  // a second one gives up with kCancelled. A request with a credit is granted more as tokens are taken.
  // At the timeout it is cancelled, and the error is kDeadlineExceeded.
  Result<wire::Finished> generate(const wire::GenerateRequest& request, const StreamHandlers& handlers,
                                  Duration timeout = kForever);

  // The pieces of generate(), for several streams at once.
  Result<uint64_t> start(const wire::GenerateRequest& request);  // the stream's tag
  // The next reply of a stream. A reply that is an error becomes the Result's error and ends the stream, as
  // Finished does. is_interrupt(): the stream lives on. kDeadlineExceeded: nothing came; it lives on too.
  Result<wire::ClientReply> next(uint64_t tag, Duration timeout);
  Result<void> send_cancel(uint64_t request);
  Result<void> grant(uint64_t request, uint32_t tokens);
  // No more of this stream is wanted: what still comes is dropped. The request itself goes on.
  void forget(uint64_t tag);

 private:
  struct Connection;
  explicit Client(std::unique_ptr<Connection> connection);
  Result<wire::ClientReply> call(wire::ClientRequest request, Duration timeout);

  std::unique_ptr<Connection> connection_;
};

}  // namespace weft::client
