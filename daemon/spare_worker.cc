#include "daemon/spare_worker.h"

#include <unistd.h>

#include "kv/packet_socket.h"

namespace weft::daemon {

SpareWorker::SpareWorker(Loop& loop, const EventLog& log, std::string binary, SupervisorLimits limits,
                         Script script)
    : loop_(loop),
      log_(log),
      binary_(std::move(binary)),
      script_(std::move(script)),
      supervisor_(limits),
      timer_(loop, [this] { apply(WorkerEvent::kTimeout); }) {}

SpareWorker::~SpareWorker() { CHECK(!process_.has_value(), "the spare worker outlives the fleet"); }

void SpareWorker::want() {
  if (!stopping_ && !process_ && !supervisor_.deadline()) apply(WorkerEvent::kWantUp);
}

void SpareWorker::stop() {
  stopping_ = true;
  apply(WorkerEvent::kWantDown);
}

void SpareWorker::kill() { apply(WorkerEvent::kHung); }

std::optional<Process> SpareWorker::take() {
  if (stopping_ || supervisor_.state() != WorkerState::kReady) return std::nullopt;
  read_output();
  forget();
  std::optional<Process> taken = std::move(process_);
  process_.reset();
  supervisor_.worked();  // this one did what it is for
  apply(WorkerEvent::kWantDown);
  apply(WorkerEvent::kExited);
  return taken;
}

void SpareWorker::apply(WorkerEvent event) {
  switch (supervisor_.handle(event, loop_.now())) {
    case WorkerAction::kSpawn:
      start();
      break;
    case WorkerAction::kAskToStop:
      if (process_) {
        wire::ToWorker message;
        message.mutable_stop();
        send(message);
      }
      break;
    case WorkerAction::kKill:
      if (process_) kill_process(*process_);
      break;
    case WorkerAction::kNone:
    case WorkerAction::kRetryLater:
    case WorkerAction::kSettle:
    case WorkerAction::kForgive:
      break;
  }
  if (const auto deadline = supervisor_.deadline()) {
    timer_.start(*deadline - loop_.now());
  } else {
    timer_.stop();
  }
}

void SpareWorker::start() {
  auto process = spawn(binary_, {"--socket-fd", std::to_string(kChildSocket)});
  if (!process) {
    log_.warning("spare_spawn_failed", {{"reason", process.error().text()}});
    loop_.defer([this] { apply(WorkerEvent::kExited); });  // not from inside of apply()
    return;
  }
  process_ = std::move(process).value();
  log_.info("spare_spawned", {{"pid", process_->pid}});
  socket_watch_ = std::make_unique<Watch>(loop_, process_->socket.get(), [this](int) { read_socket(); });
  end_watch_ = std::make_unique<Watch>(loop_, process_->pidfd.get(), [this](int) { ended(); });
  output_watch_ = std::make_unique<Watch>(loop_, process_->output.get(), [this](int) { read_output(); });
  for (Watch* watch : {socket_watch_.get(), end_watch_.get(), output_watch_.get()}) watch->start(kReadable);
  send(script_.describe());
  send(script_.map_arenas(), script_.descriptors());
}

void SpareWorker::send(const wire::ToWorker& message, const std::vector<int>& descriptors) {
  const std::string bytes = message.SerializeAsString();
  const auto sent = kv::send_packet(process_->socket.get(),
                                    std::as_bytes(std::span(bytes.data(), bytes.size())), descriptors);
  if (!sent) kill_process(*process_);  // gone, or it does not read: its pidfd tells
}

void SpareWorker::read_socket() {
  while (process_) {
    auto packet = kv::receive_packet(process_->socket.get());
    if (!packet) {
      socket_watch_->stop();
      return;
    }
    if (!packet->has_value()) return;
    const auto& bytes = (*packet)->bytes;
    wire::FromWorker message;
    if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return kill_process(*process_);
    if (message.has_progress()) supervisor_.progress(loop_.now());
    if (message.has_failure()) log_.warning("spare_failure", {{"message", message.failure().message()}});
    if (!message.has_loaded()) continue;
    log_.info("spare_ready", {{"pid", process_->pid}});
    apply(WorkerEvent::kReady);
  }
}

// What it says is of no use to anybody but must be read.
void SpareWorker::read_output() {
  char buffer[4096];
  while (process_) {
    const ssize_t got = ::read(process_->output.get(), buffer, sizeof buffer);
    if (got > 0) continue;
    if (got == 0) output_watch_->stop();
    return;
  }
}

void SpareWorker::ended() {
  const auto how = reap(*process_);
  if (!how) return;
  log_.info("spare_exited", {{"pid", process_->pid}, {"how", how->text}});
  forget();
  process_.reset();
  apply(WorkerEvent::kExited);
  if (stopping_) script_.gone();
}

void SpareWorker::forget() {
  socket_watch_.reset();
  end_watch_.reset();
  output_watch_.reset();
}

}  // namespace weft::daemon
