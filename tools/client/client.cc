#include "tools/client/client.h"

#include <utility>

#include "proto/convert.h"
#include "proto/utf8.h"
#include "tools/client/connection.h"
#include "tools/client/deadline.h"

namespace weft::client {
namespace {

constexpr char kInterruptField[] = "signal";

}  // namespace

Error interrupt_error() { return error(ErrorCode::kCancelled, "interrupted", kInterruptField); }

bool is_interrupt(const Error& error) {
  return error.code == ErrorCode::kCancelled && error.field == kInterruptField;
}

Result<void> outcome_of(const wire::Finished& finished, bool interrupted) {
  if (finished.reason() == "error") return from_wire(finished.error());
  if (finished.reason() != "cancelled") return {};
  return interrupted ? interrupt_error() : error(ErrorCode::kCancelled, "the request was cancelled");
}

Client::Client(std::unique_ptr<Connection> connection) : connection_(std::move(connection)) {}
Client::Client(Client&&) noexcept = default;
Client& Client::operator=(Client&&) noexcept = default;
Client::~Client() = default;

Result<Client> Client::connect(const ClientOptions& options) {
  auto connection = std::make_unique<Connection>();
  TRY_VOID(connection->open(options));
  return Client(std::move(connection));
}

Result<wire::ClientReply> Client::call(wire::ClientRequest request, Duration timeout) {
  TRY(const uint64_t tag, connection_->send(std::move(request), true));
  auto reply = next(tag, timeout);
  forget(tag);
  return reply;
}

Result<wire::ModelList> Client::list_models(Duration timeout) {
  wire::ClientRequest request;
  request.mutable_list_models();
  TRY(auto reply, call(std::move(request), timeout));
  if (!reply.has_models()) return error(ErrorCode::kBadMessage, "the daemon answered something else");
  return std::move(*reply.mutable_models());
}

Result<std::vector<uint32_t>> Client::tokenize(const std::string& model, const std::string& text,
                                               Duration timeout) {
  wire::ClientRequest request;
  request.mutable_tokenize()->set_model(model);
  request.mutable_tokenize()->set_text(text);
  TRY(auto reply, call(std::move(request), timeout));
  if (!reply.has_tokenize()) return error(ErrorCode::kBadMessage, "the daemon answered something else");
  return std::vector<uint32_t>(reply.tokenize().ids().begin(), reply.tokenize().ids().end());
}

Result<void> Client::cancel(uint64_t request_id, Duration timeout) {
  wire::ClientRequest request;
  request.mutable_cancel()->set_request(request_id);
  TRY(auto reply, call(std::move(request), timeout));
  if (!reply.has_cancel()) return error(ErrorCode::kBadMessage, "the daemon answered something else");
  return {};
}

Result<uint64_t> Client::start(const wire::GenerateRequest& request) {
  if (!is_utf8(request.text())) return error(ErrorCode::kInvalidArgument, "is not valid UTF-8", "text");
  wire::ClientRequest message;
  *message.mutable_generate() = request;
  return connection_->send(std::move(message), true);
}

Result<wire::ClientReply> Client::next(uint64_t tag, Duration timeout) {
  TRY(auto reply, connection_->take(tag, Deadline(timeout)));
  if (reply.has_error()) {
    forget(tag);
    return from_wire(reply.error());
  }
  if (reply.has_finished()) forget(tag);
  return reply;
}

Result<void> Client::send_cancel(uint64_t request_id) {
  wire::ClientRequest request;
  request.mutable_cancel()->set_request(request_id);
  TRY([[maybe_unused]] const uint64_t tag, connection_->send(std::move(request), false));
  return {};
}

Result<void> Client::grant(uint64_t request_id, uint32_t tokens) {
  wire::ClientRequest request;
  request.mutable_credit()->set_request(request_id);
  request.mutable_credit()->set_tokens(tokens);
  TRY([[maybe_unused]] const uint64_t tag, connection_->send(std::move(request), false));
  return {};
}

void Client::forget(uint64_t tag) { connection_->forget(tag); }

namespace {

// What generate() knows of its stream.
struct Progress {
  uint64_t request = 0;  // 0: not accepted yet
  uint32_t ungranted = 0;
  bool cancelling = false;
};

void hand_out(const wire::ClientReply& reply, const StreamHandlers& handlers) {
  if (reply.has_accepted() && handlers.accepted) handlers.accepted(reply.accepted());
  if (reply.has_progress() && handlers.progress) handlers.progress(reply.progress());
  if (reply.has_token() && handlers.token) handlers.token(reply.token());
  if (reply.has_digest() && handlers.digest) handlers.digest(reply.digest());
}

}  // namespace

Result<wire::Finished> Client::generate(const wire::GenerateRequest& request, const StreamHandlers& handlers,
                                        Duration timeout) {
  const Deadline deadline(timeout);
  TRY(const uint64_t tag, start(request));
  Progress stream;
  while (true) {
    auto reply = next(tag, deadline.left());
    if (!reply) {
      const bool late = reply.error().code == ErrorCode::kDeadlineExceeded;
      if (late && stream.request != 0) (void)send_cancel(stream.request);
      // Before Accepted there is no id to cancel; the daemon drops the request when the connection closes.
      if (is_interrupt(reply.error()) && stream.request != 0 && !stream.cancelling) {
        stream.cancelling = true;
        TRY_VOID(send_cancel(stream.request));
        if (handlers.interrupted) handlers.interrupted();
        continue;
      }
      forget(tag);
      return std::move(reply).error();
    }
    if (reply->has_accepted()) stream.request = reply->accepted().request();
    hand_out(*reply, handlers);
    if (reply->has_finished()) return std::move(*reply->mutable_finished());
    // Half of the credit at a time: one message per half window, and the stream never runs dry.
    if (reply->has_token() && request.credit() > 0 && ++stream.ungranted >= (request.credit() + 1) / 2) {
      TRY_VOID(grant(stream.request, stream.ungranted));
      stream.ungranted = 0;
    }
  }
}

}  // namespace weft::client
