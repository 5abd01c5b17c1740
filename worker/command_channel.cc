#include "worker/command_channel.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "proto/utf8.h"
#include "proto/vocab/check.h"
#include "worker/event_log.h"

namespace weft::worker {
namespace {

constexpr size_t kFailureTextMax = 8 << 10;

[[noreturn]] void end_process(const char* event, int status) {
  log_event(event, "status=" + std::to_string(status));
  ::_exit(status);
}

}  // namespace

void CommandChannel::start() {
  std::thread([this] { watch(); }).detach();
}

void CommandChannel::watch() {
  ::prctl(PR_SET_NAME, "weft-watcher");
  for (;;) {
    auto received = kv::receive_packet(socket_.get());
    if (!received) {
      if (received.error().code == ErrorCode::kUnavailable) end_process("daemon_gone", kExitDaemonGone);
      fail(received.error());
    }
    if (!received->has_value()) fail(error(ErrorCode::kInternal, "the command socket does not block"));
    kv::Packet& packet = **received;
    Command command;
    if (!command.message.ParseFromArray(packet.bytes.data(), static_cast<int>(packet.bytes.size())) ||
        command.message.body_case() == wire::ToWorker::BODY_NOT_SET) {
      fail(
          error(ErrorCode::kBadMessage, std::to_string(packet.bytes.size()) + " bytes are no known command"));
    }
    if (command.message.has_stop()) end_process("stopped", kExitStopped);
    command.descriptors = std::move(packet.descriptors);
    {
      const std::lock_guard lock(mutex_);
      if (queue_.size() >= kQueueMax) fail(error(ErrorCode::kResourceExhausted, "too many unread commands"));
      queue_.push_back(std::move(command));
    }
    arrived_.notify_one();
  }
}

Command CommandChannel::next() {
  std::unique_lock lock(mutex_);
  arrived_.wait(lock, [this] { return !queue_.empty(); });
  Command command = std::move(queue_.front());
  queue_.pop_front();
  return command;
}

Result<void> CommandChannel::send(const wire::FromWorker& message) {
  const std::string bytes = message.SerializeAsString();
  return kv::send_packet(socket_.get(), std::as_bytes(std::span(bytes)));
}

void CommandChannel::fail(const Error& error) {
  log_event("failed", error.text());
  wire::FromWorker message;
  wire::Failure* failure = message.mutable_failure();
  failure->set_code(static_cast<uint32_t>(error.code));
  failure->set_message(as_utf8(error.message, kFailureTextMax));  // it may quote a broken file
  failure->set_field(as_utf8(error.field, kFailureTextMax));
  if (auto sent = send(message); !sent) log_event("failure_not_sent", sent.error().text());
  end_process("exits", kExitFailed);
}

}  // namespace weft::worker
