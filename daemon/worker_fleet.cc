#include "daemon/worker_fleet.h"

#include <unistd.h>

#include <algorithm>

#include "kv/packet_socket.h"
#include "proto/convert.h"
#include "proto/version.h"
#include "proto/vocab/units.h"

namespace weft::daemon {
namespace {

constexpr uint64_t kHopelessSpawns = 5;  // starts without the fleet ever having been ready
constexpr size_t kLineBytesMax = 4096;
// A spare is started when a step is done, so that it delays none that is repeated; else so long after the
// begin.
constexpr Duration kSpareDelay = std::chrono::seconds(1);

// Failures that another try cannot mend.
bool is_lasting(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kNotFound:
    case ErrorCode::kTooLarge:
    case ErrorCode::kResourceExhausted:
    case ErrorCode::kBadCheckpoint:
    case ErrorCode::kIo:
    case ErrorCode::kBadMessage:
    case ErrorCode::kUnsupported:
      return true;
    default:
      return false;
  }
}

Error error_of(const wire::Failure& failure) {
  const bool known = failure.code() > 0 && failure.code() <= static_cast<uint32_t>(ErrorCode::kNotPermitted);
  return error(known ? static_cast<ErrorCode>(failure.code()) : ErrorCode::kInternal, failure.message(),
               failure.field());
}

}  // namespace

struct WorkerFleet::Rank {
  Device device;
  std::optional<Process> process;
  std::unique_ptr<Watch> socket_watch, end_watch, output_watch;
  std::string line;  // of its output, not yet ended
  std::optional<Error> failure;
  std::string killed_for;
  Time started{};
  TensorCount tensors;
};

WorkerFleet::WorkerFleet(Loop& loop, const EventLog& log, const Options& options, SupervisorLimits limits,
                         FleetListener& listener)
    : loop_(loop),
      log_(log),
      options_(options),
      listener_(listener),
      rules_(limits, options.rank_count(), kv::Topology::of_all(options.workers), *this),
      timer_(loop, [this] { rules_.pass_time(loop_.now()); }) {
  for (int rank = 0; rank < options.rank_count(); ++rank) {
    auto& added = ranks_.emplace_back(std::make_unique<Rank>());
    if (rank < options.workers) added->device = options.devices[static_cast<size_t>(rank)];
  }
  if (!options.spare) return;
  spare_.emplace(loop, log, options.worker_binary, limits, spare_script());
  spare_timer_.emplace(loop, [this] { spare_->want(); });
}

WorkerFleet::~WorkerFleet() {
  for (const auto& rank : ranks_) CHECK(!rank->process.has_value(), "a worker outlives the fleet");
}

void WorkerFleet::stop() {
  rules_.stop(loop_.now());
  if (spare_) spare_->stop();
  check_stopped();
}

void WorkerFleet::kill_all() {
  if (spare_) spare_->kill();
  rules_.kill_all(loop_.now());
}

void WorkerFleet::hung(int rank, const std::string& why) { rules_.hung(rank, why, loop_.now()); }

void WorkerFleet::step_done() {
  rules_.step_done();
  if (spare_) spare_->want();
}

void WorkerFleet::start_worker(int rank, const Device& device) {
  ranks_[static_cast<size_t>(rank)]->device = device;
  rules_.start_worker(rank, loop_.now());
}

const Device& WorkerFleet::device(int rank) const { return ranks_[static_cast<size_t>(rank)]->device; }

uint64_t WorkerFleet::restarts() const {
  uint64_t sum = 0;
  for (int rank = 0; rank < rank_count(); ++rank) sum += status(rank).restarts;
  return sum;
}

WorkerFleet::Status WorkerFleet::status(int rank) const {
  const Rank& own = *ranks_[static_cast<size_t>(rank)];
  const Supervisor& supervisor = rules_.supervisor(rank);
  Status status;
  status.state = supervisor.state();
  status.device = own.device.name;
  status.takes_part = topology().contains(rank);
  status.restarts = supervisor.spawns() > 0 ? supervisor.spawns() - 1 : 0;
  if (!supervisor.exits().empty()) status.last_exit = supervisor.exits().back().text;
  if (own.process) {
    status.pid = own.process->pid;
    status.uptime = loop_.now() - own.started;
  }
  return status;
}

std::string WorkerFleet::trouble() const {
  std::string text;
  if (epoch_active() || rules_.stopping()) return text;
  for (int rank = 0; rank < rank_count(); ++rank) {
    const auto& exits = rules_.supervisor(rank).exits();
    if (!topology().contains(rank) || rules_.phase(rank) == WorkerPhase::kWaiting || exits.empty()) continue;
    text +=
        (text.empty() ? "" : "; ") + std::string("worker ") + std::to_string(rank) + ": " + exits.back().text;
  }
  return text;
}

// ---- what the rules say

void WorkerFleet::carry_out(int rank, WorkerState, WorkerEvent event, WorkerAction action) {
  Rank& own = *ranks_[static_cast<size_t>(rank)];
  const Supervisor& supervisor = rules_.supervisor(rank);
  switch (action) {
    case WorkerAction::kNone:
    case WorkerAction::kSettle:
    case WorkerAction::kForgive:
      break;
    case WorkerAction::kSpawn:
      spawn_worker(rank);
      break;
    case WorkerAction::kRetryLater:
      if (const auto at = supervisor.deadline()) {
        log_.info("worker_restarts", {{"rank", rank}, {"in_seconds", seconds(*at - loop_.now())}});
      }
      check_stopped();
      break;
    case WorkerAction::kAskToStop: {
      wire::ToWorker message;
      message.mutable_stop();
      send(rank, message);
      break;
    }
    case WorkerAction::kKill:
      if (event == WorkerEvent::kTimeout) {
        log_.warning("worker_late", {{"rank", rank}, {"state", worker_state_name(supervisor.state())}});
      }
      if (own.process) kill_process(*own.process);
      break;
  }
}

void WorkerFleet::hangs(int rank, const std::string& why) {
  Rank& own = *ranks_[static_cast<size_t>(rank)];
  log_.warning("worker_hung", {{"rank", rank}, {"pid", own.process->pid}, {"reason", why}});
  own.killed_for = why;
}

void WorkerFleet::begin_epoch(Epoch epoch) {
  wire::ToWorker message;
  message.mutable_begin()->set_epoch(number(epoch));
  message.mutable_begin()->set_plan_sequence(arenas_->control().plans_published());
  message.mutable_begin()->set_ranks(topology().ranks());
  arenas_->control().set_readers(topology().ranks());
  for (int place = 0; place < topology().count(); ++place) send(topology().rank(place), message);
  log_.info("epoch_began", {{"epoch", number(epoch)}, {"ranks", topology().text()}});
  if (spare_) spare_timer_->start(kSpareDelay);
  listener_.epoch_began(epoch);
}

Duration WorkerFleet::lose_epoch(Epoch epoch, const std::string& reason, Loss loss, bool planned) {
  if (!planned) log_.warning("epoch_lost", {{"epoch", number(epoch)}, {"reason", reason}});
  loading_.begin_again();
  arenas_->control().abort_epoch(epoch);
  return listener_.epoch_lost(epoch, reason, loss);
}

void WorkerFleet::memory_lost(int rank) {
  if (auto cleared = arenas_->clear_pool(rank); !cleared) {
    log_.error("pool_not_cleared", {{"rank", rank}, {"reason", cleared.error().text()}});
  }
  listener_.memory_lost(rank);
}

void WorkerFleet::worker_failed(int rank) {
  const Rank& own = *ranks_[static_cast<size_t>(rank)];
  const Error why = own.failure
                        ? *own.failure
                        : error(ErrorCode::kUnavailable, "the worker ended before it was ready: " +
                                                             rules_.supervisor(rank).exits().back().text);
  loop_.defer([this, rank, why] { listener_.worker_failed(rank, why); });
}

void WorkerFleet::worker_stopped(int rank) {
  loop_.defer([this, rank] { listener_.worker_stopped(rank); });
}

void WorkerFleet::wake_at(std::optional<Time> when) {
  if (when) {
    timer_.start(*when - loop_.now());
  } else {
    timer_.stop();
  }
}

// ---- processes

void WorkerFleet::spawn_worker(int rank) {
  Rank& own = *ranks_[static_cast<size_t>(rank)];
  own.failure.reset();
  own.killed_for.clear();
  own.line.clear();
  own.tensors = {};
  own.started = loop_.now();
  if (adopt_spare(rank)) return;
  auto process = spawn(options_.worker_binary, {"--socket-fd", std::to_string(kChildSocket)});
  if (!process) {
    log_.error("worker_spawn_failed", {{"rank", rank}, {"reason", process.error().text()}});
    rules_.spawn_failed(rank, process.error().text(), loop_.now());
    return give_up_if_hopeless(rank, process.error().text());
  }
  own.process = std::move(process).value();
  rules_.spawned(rank, WorkerPhase::kDescribing);
  watch(rank);
  log_.info("worker_spawned", {{"rank", rank}, {"pid", own.process->pid}});
  listener_.worker_started(rank);
  send(rank, describe(rank));
}

bool WorkerFleet::adopt_spare(int rank) {
  // One that joins has a pool that nobody has touched yet.
  auto spare = spare_ && topology().contains(rank) ? spare_->take() : std::nullopt;
  if (!spare) return false;
  Rank& own = *ranks_[static_cast<size_t>(rank)];
  own.process = std::move(spare);
  rules_.spawned(rank, WorkerPhase::kLoading);
  watch(rank);
  log_.info("spare_takes_over", {{"rank", rank}, {"pid", own.process->pid}});
  listener_.worker_started(rank);
  wire::ToWorker message;
  message.mutable_take_rank()->set_rank(static_cast<uint32_t>(rank));
  for (const uint32_t core : own.device.cores) message.mutable_take_rank()->add_cores(core);
  send(rank, message);
  return true;
}

// Any rank's description would do.
SpareWorker::Script WorkerFleet::spare_script() {
  SpareWorker::Script script;
  script.describe = [this] {
    wire::ToWorker message = describe(0);
    message.mutable_describe()->set_spare(true);
    message.mutable_describe()->clear_cores();
    return message;
  };
  script.map_arenas = [this] {
    wire::ToWorker message;
    *message.mutable_map_arenas() = arenas_->message();
    return message;
  };
  script.descriptors = [this] { return arenas_->descriptors(); };
  script.gone = [this] { check_stopped(); };
  return script;
}

void WorkerFleet::watch(int rank) {
  Rank& own = *ranks_[static_cast<size_t>(rank)];
  own.socket_watch =
      std::make_unique<Watch>(loop_, own.process->socket.get(), [this, rank](int) { read_socket(rank); });
  own.end_watch =
      std::make_unique<Watch>(loop_, own.process->pidfd.get(), [this, rank](int) { worker_ended(rank); });
  own.output_watch =
      std::make_unique<Watch>(loop_, own.process->output.get(), [this, rank](int) { read_output(rank); });
  own.socket_watch->start(kReadable);
  own.end_watch->start(kReadable);
  own.output_watch->start(kReadable);
}

wire::ToWorker WorkerFleet::describe(int rank) const {
  wire::ToWorker message;
  wire::Describe* describe = message.mutable_describe();
  describe->set_protocol_version(kWorkerProtocol);
  describe->set_rank(static_cast<uint32_t>(rank));
  describe->set_rank_count(static_cast<uint32_t>(rank_count()));
  describe->set_packers(static_cast<uint32_t>(options_.workers));
  describe->set_model_path(options_.model_folder);
  if (options_.weight_dtype) describe->set_weight_dtype(to_wire(*options_.weight_dtype));
  describe->set_cache_dtype(to_wire(options_.cache.entries));
  describe->set_index_cache_dtype(to_wire(options_.cache.index_keys));
  describe->set_index_hadamard(options_.cache.index_hadamard);
  describe->set_index_float_scales(options_.cache.index_float_scales);
  describe->set_split_experts(options_.split_experts);
  describe->set_block_tokens(static_cast<uint32_t>(options_.block_tokens));
  describe->set_threads(static_cast<uint32_t>(options_.threads_per_worker));
  for (const uint32_t core : ranks_[static_cast<size_t>(rank)]->device.cores) describe->add_cores(core);
  describe->set_max_step_rows(static_cast<uint32_t>(options_.max_step_rows));
  describe->set_max_context(static_cast<uint64_t>(options_.max_context));
  describe->set_draft_layers(options_.draft_layers());
  return message;
}

void WorkerFleet::send(int rank, const wire::ToWorker& message, const std::vector<int>& descriptors) {
  Rank& own = *ranks_[static_cast<size_t>(rank)];
  if (!own.process) return;
  const std::string bytes = message.SerializeAsString();
  const auto sent = kv::send_packet(own.process->socket.get(),
                                    std::as_bytes(std::span(bytes.data(), bytes.size())), descriptors);
  if (sent || sent.error().code == ErrorCode::kUnavailable) return;  // gone: its pidfd tells
  log_.warning("worker_send_failed", {{"rank", rank}, {"reason", sent.error().text()}});
  loop_.defer([this, rank, pid = own.process->pid] {
    Rank& later = *ranks_[static_cast<size_t>(rank)];
    if (later.process && later.process->pid == pid) hung(rank, "does not read its messages");
  });
}

void WorkerFleet::read_socket(int rank) {
  Rank& own = *ranks_[static_cast<size_t>(rank)];
  while (own.process) {
    auto packet = kv::receive_packet(own.process->socket.get());
    if (!packet) {
      if (own.socket_watch) own.socket_watch->stop();
      if (packet.error().code != ErrorCode::kUnavailable) hung(rank, packet.error().text());
      return;
    }
    if (!packet->has_value()) return;
    const auto& bytes = (*packet)->bytes;
    wire::FromWorker message;
    if (!message.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
      hung(rank, "sent a message that does not parse");
      return;
    }
    take_message(rank, message);
  }
}

void WorkerFleet::read_output(int rank) {
  Rank& own = *ranks_[static_cast<size_t>(rank)];
  char buffer[4096];
  while (own.process) {
    const ssize_t got = ::read(own.process->output.get(), buffer, sizeof buffer);
    if (got <= 0) {
      if (got == 0 && own.output_watch) own.output_watch->stop();
      return;
    }
    own.line.append(buffer, static_cast<size_t>(got));
    for (size_t end; (end = own.line.find('\n')) != std::string::npos || own.line.size() > kLineBytesMax;) {
      const size_t length = std::min(end, kLineBytesMax);
      log_.info("worker_output", {{"rank", rank}, {"line", own.line.substr(0, length)}});
      own.line.erase(0, length == end ? length + 1 : length);
    }
  }
}

void WorkerFleet::take_message(int rank, const wire::FromWorker& message) {
  Rank& own = *ranks_[static_cast<size_t>(rank)];
  switch (message.body_case()) {
    case wire::FromWorker::kDescription:
      take_description(rank, message.description());
      break;
    case wire::FromWorker::kProgress:
      own.tensors = {message.progress().tensors_done(), message.progress().tensors_total()};
      note_progress();
      rules_.progress(rank, loop_.now());
      break;
    case wire::FromWorker::kLoaded:
      if (rules_.phase(rank) != WorkerPhase::kLoading) return hung(rank, "said Loaded out of turn");
      own.tensors = {message.loaded().tensors(), message.loaded().tensors()};
      note_progress();
      log_.info("worker_loaded", {{"rank", rank},
                                  {"tensors", message.loaded().tensors()},
                                  {"bytes", message.loaded().bytes()},
                                  {"seconds", seconds(loop_.now() - own.started)}});
      rules_.loaded(rank, loop_.now());
      break;
    case wire::FromWorker::kAborted:
      rules_.aborted(rank, Epoch{message.aborted().epoch()});
      break;
    case wire::FromWorker::kFailure:
      own.failure = error_of(message.failure());
      log_.error("worker_failure", {{"rank", rank},
                                    {"code", error_code_name(own.failure->code)},
                                    {"field", own.failure->field},
                                    {"message", own.failure->message}});
      break;
    case wire::FromWorker::BODY_NOT_SET:
      hung(rank, "sent an empty message");
      break;
  }
}

void WorkerFleet::note_progress() {
  std::vector<TensorCount> counts;
  for (const auto& rank : ranks_) counts.push_back(rank->tensors);
  loading_.update(counts);
}

void WorkerFleet::take_description(int rank, const wire::ModelDescription& description) {
  if (rules_.phase(rank) != WorkerPhase::kDescribing) return hung(rank, "described itself out of turn");
  if (description.protocol_version() != kWorkerProtocol) {
    return fail(error(ErrorCode::kUnsupported, "weft-worker speaks protocol " +
                                                   std::to_string(description.protocol_version()) +
                                                   ", weftd " + std::to_string(kWorkerProtocol)));
  }
  if (const auto known = from_wire(description.weight_dtype(), "weight_dtype"); !known) {
    return fail(known.error());
  }
  rules_.described(rank, loop_.now());
  const bool first = model_.model_type().empty();
  if (first) model_ = description;
  if (description.SerializeAsString() != model_.SerializeAsString()) {
    return hung(rank, "describes another model than the other ranks: the checkpoint has changed");
  }
  if (arenas_) return send_arenas(rank);
  if (rules_.all_described()) map_arenas_everywhere();
}

void WorkerFleet::map_arenas_everywhere() {
  auto sizes = listener_.size_arenas(model_);
  if (!sizes) return fail(sizes.error());
  auto arenas = Arenas::create(*sizes);
  if (!arenas) return fail(arenas.error());
  arenas_.emplace(std::move(arenas).value());
  listener_.arenas_made(arenas_->control(), arenas_->results_fd());
  for (int place = 0; place < topology().count(); ++place) send_arenas(topology().rank(place));
}

void WorkerFleet::send_arenas(int rank) {
  // It touches its whole pool before it can say anything again; a slow machine does that at 50 MiB/s.
  const wire::MapArenas arenas = arenas_->message();
  const auto pool = static_cast<int64_t>(arenas.pool_bytes(rank));
  rules_.loads(rank, loop_.now() + std::chrono::seconds(pool / (50 * kMiB)));
  wire::ToWorker message;
  *message.mutable_map_arenas() = arenas;
  send(rank, message, arenas_->descriptors());
}

void WorkerFleet::worker_ended(int rank) {
  Rank& own = *ranks_[static_cast<size_t>(rank)];
  read_socket(rank);  // a last Failure may lie there
  read_output(rank);
  if (!own.process) return;
  const auto how = reap(*own.process);
  if (!how) return;
  std::string text = how->text;
  const Loss loss = how->killed && own.killed_for.empty() ? Loss::kKilled : Loss::kFailed;
  if (!own.killed_for.empty()) text += ", killed: " + own.killed_for;
  if (own.failure) text += ", " + own.failure->text();
  if (!own.line.empty()) log_.info("worker_output", {{"rank", rank}, {"line", own.line}});
  const bool expected = rules_.supervisor(rank).state() == WorkerState::kDraining || rules_.stopping();
  const std::initializer_list<Field> fields = {{"rank", rank}, {"pid", own.process->pid}, {"how", text}};
  expected ? log_.info("worker_exited", fields) : log_.warning("worker_exited", fields);
  own.socket_watch.reset();
  own.end_watch.reset();
  own.output_watch.reset();
  own.process.reset();
  const bool memory_lost = own.failure && own.failure->field == "pool";
  rules_.ended(rank, text, loss, memory_lost, loop_.now());
  give_up_if_hopeless(rank, text);
}

void WorkerFleet::give_up_if_hopeless(int rank, const std::string& how) {
  if (ever_ready() || rules_.stopping()) return;
  const Rank& own = *ranks_[static_cast<size_t>(rank)];
  if (own.failure && is_lasting(own.failure->code)) return fail(*own.failure);
  if (rules_.supervisor(rank).spawns() >= kHopelessSpawns) {
    fail(error(ErrorCode::kUnavailable, "worker " + std::to_string(rank) + " did not become ready in " +
                                            std::to_string(kHopelessSpawns) + " starts; the last: " + how));
  }
}

void WorkerFleet::fail(const Error& failure) {
  if (failed_ || rules_.stopping()) return;
  failed_ = true;
  // Out of this callback: the listener will want to stop the fleet.
  loop_.defer([this, failure] { listener_.fleet_failed(failure); });
}

void WorkerFleet::check_stopped() {
  if (!rules_.stopping()) return;
  for (const auto& rank : ranks_) {
    if (rank->process) return;
  }
  if (spare_ && spare_->alive()) return;
  loop_.defer([this] { listener_.fleet_stopped(); });
}

}  // namespace weft::daemon
