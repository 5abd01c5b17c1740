#include "daemon/topology_service.h"

#include "daemon/memory_budget.h"
#include "proto/convert.h"

namespace weft::daemon {
namespace {

Error refused(const std::string& why) { return error(ErrorCode::kFailedPrecondition, why, "rank"); }

std::string worker_text(int rank) { return "worker " + std::to_string(rank); }

void send(const ControlEndpoint::Reply& reply, const Error& failure) {
  wire::ControlReply message;
  fill_error(failure, message.mutable_error());
  reply(message);
}

int rank_of(uint32_t rank) {
  return rank < static_cast<uint32_t>(kMaxRanks) ? static_cast<int>(rank) : kMaxRanks;
}

}  // namespace

std::string TopologyService::ranks_text() const {
  std::string text;
  for (int rank = 0; rank < fleet_.rank_count(); ++rank) {
    if (fleet_.has_worker(rank)) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  }
  return text;
}

Result<void> TopologyService::check_free() const {
  if (engine == nullptr) {
    return error(ErrorCode::kFailedPrecondition, "the model is still being loaded");
  }
  if (change_) {
    return error(ErrorCode::kFailedPrecondition, "another change of workers is under way: " + change_->text);
  }
  return {};
}

Result<void> TopologyService::check_leaves(int rank) const {
  TRY_VOID(check_free());
  if (!fleet_.has_worker(rank)) {
    return error(ErrorCode::kNotFound, "no such worker: there are " + ranks_text(), "rank");
  }
  if (fleet_.topology().contains(rank) && fleet_.topology().count() == 1) {
    return refused(worker_text(rank) + " is the last one that computes");
  }
  return {};
}

// The rank that is to come in.
Result<int> TopologyService::check_joins(const wire::AddWorkerRequest& request) const {
  TRY_VOID(check_free());
  if (request.has_rank() == !request.device().empty()) {
    return error(ErrorCode::kInvalidArgument, "needs a device, or a rank, and not both", "device");
  }
  std::optional<int> rank;
  if (request.has_rank()) {
    rank = rank_of(request.rank());
    const bool known =
        *rank < fleet_.rank_count() && (fleet_.has_worker(*rank) || !fleet_.status(*rank).last_exit.empty());
    if (!known) {
      return error(ErrorCode::kNotFound,
                   "no worker was drained or removed from this rank; there are " + ranks_text(), "rank");
    }
    if (fleet_.topology().contains(*rank)) return refused(worker_text(*rank) + " takes part already");
  } else {
    if (const auto device = parse_device(request.device()); !device)
      return error(device.error().code, device.error().message, "device");
    rank = fleet_.unused_rank();
    if (!rank) {
      return error(
          ErrorCode::kResourceExhausted,
          std::to_string(fleet_.rank_count()) + " workers are all there may be (weftd --max-workers)",
          "device");
    }
  }
  if (!fleet_.has_worker(*rank))
    TRY_VOID(check_fits_memory(sizes_of_one_more(*sizes), "device", available_memory()));
  return *rank;
}

// ---- commands

void TopologyService::drain(const wire::DrainRequest& request, ControlEndpoint::Reply reply) {
  const int rank = rank_of(request.rank());
  if (auto can = check_leaves(rank); !can) return send(reply, can.error());
  if (!fleet_.topology().contains(rank))
    return send(reply, refused(worker_text(rank) + " is drained already"));
  begin(Kind::kDrain, rank, "drain " + std::to_string(rank), std::move(reply));
  ask_control_plane();
}

void TopologyService::remove(const wire::RemoveWorkerRequest& request, ControlEndpoint::Reply reply) {
  const int rank = rank_of(request.rank());
  if (auto can = check_leaves(rank); !can) return send(reply, can.error());
  begin(Kind::kRemove, rank, "workers remove " + std::to_string(rank), std::move(reply));
  if (fleet_.topology().contains(rank)) return ask_control_plane();
  change_->stopping = true;
  fleet_.stop_worker(rank);
}

void TopologyService::add(const wire::AddWorkerRequest& request, ControlEndpoint::Reply reply) {
  const Result<int> rank = check_joins(request);
  if (!rank) return send(reply, rank.error());
  begin(Kind::kAdd, *rank,
        "workers add " + (request.has_rank() ? "--rank " + std::to_string(*rank) : request.device()),
        std::move(reply));
  if (fleet_.has_worker(*rank)) return ask_control_plane();
  change_->started = true;
  fleet_.start_worker(*rank,
                      request.has_rank() ? fleet_.device(*rank) : parse_device(request.device()).value());
}

void TopologyService::begin(Kind kind, int rank, const std::string& text, ControlEndpoint::Reply reply) {
  log_.info("command", {{"command", text}});
  change_.emplace();
  change_->kind = kind;
  change_->rank = rank;
  change_->text = text;
  change_->reply = std::move(reply);
  change_->command = ++commands_;
  const size_t space = text.rfind(' ');
  auto id = journal->begin_command(text.substr(0, space), text.substr(space + 1));
  if (!id) log_.error("journal_failed", {{"reason", id.error().text()}});
  change_->journal_id = id ? *id : 0;
}

void TopologyService::ask_control_plane() {
  controlplane::TopologyRequested event{change_->command, change_->rank, change_->kind == Kind::kAdd};
  event.gone = !event.joins && !fleet_.epoch_active() && !fleet_.waits(change_->rank);
  if (!event.gone) return engine->post(event);
  engine->post_without_plans(event);
  change_->before = fleet_.topology();
  fleet_.set_topology(kv::Topology(fleet_.topology().ranks() & ~mask_of(change_->rank)));
}

void TopologyService::stop() {
  if (change_) finish(error(ErrorCode::kCancelled, "the daemon stops"));
}

// ---- what happens meanwhile

void TopologyService::decided(const controlplane::TopologyNotice& notice) {
  const bool moved = notice.error.code == ErrorCode::kOk;
  if (!change_ || change_->command != notice.command) {
    if (moved) fleet_.set_topology(kv::Topology(notice.ranks));  // given up here, done there
    return;
  }
  if (!moved) {
    if (change_->started) fleet_.stop_worker(change_->rank);
    if (change_->before) fleet_.set_topology(*change_->before);
    return finish(notice.error);
  }
  change_->decided = true;
  change_->result.set_bytes_moved(static_cast<uint64_t>(notice.bytes_moved));
  change_->result.set_sequences_moved(static_cast<uint64_t>(notice.sequences_moved));
  change_->result.set_blocks_dropped(static_cast<uint64_t>(notice.blocks_dropped));
  fleet_.set_topology(kv::Topology(notice.ranks));
}

void TopologyService::epoch_began(Epoch epoch) {
  if (!change_ || !change_->decided || change_->stopping) return;
  change_->result.set_epoch(number(epoch));
  if (change_->kind != Kind::kRemove) return finish({});
  change_->stopping = true;
  fleet_.stop_worker(change_->rank);
}

void TopologyService::worker_waits(int rank) {
  if (change_ && change_->started && change_->rank == rank) ask_control_plane();
}

void TopologyService::worker_failed(int rank, const Error& why) {
  if (change_ && change_->started && change_->rank == rank) finish(why);
}

void TopologyService::worker_stopped(int rank) {
  if (change_ && change_->stopping && change_->rank == rank) finish({});
}

void TopologyService::finish(const Result<void>& outcome) {
  Change done = std::move(*change_);
  change_.reset();
  if (done.result.epoch() == 0) done.result.set_epoch(number(fleet_.epoch()));
  std::string text = "ok";
  if (!outcome) {
    text = outcome.error().text();
  } else if (done.decided) {
    text += ": ranks " + fleet_.topology().text() + ", moved " + std::to_string(done.result.bytes_moved()) +
            " bytes of " + std::to_string(done.result.sequences_moved()) + " requests, dropped " +
            std::to_string(done.result.blocks_dropped()) + " cached blocks";
  }
  log_.info("workers_changed", {{"command", done.text}, {"outcome", text}, {"epoch", done.result.epoch()}});
  if (done.journal_id != 0) {
    if (auto ended = journal->end_command(done.journal_id, text, Epoch{done.result.epoch()}); !ended) {
      log_.error("journal_failed", {{"reason", ended.error().text()}});
    }
  }
  if (!outcome) return send(done.reply, outcome.error());
  for (int place = 0; place < fleet_.topology().count(); ++place) {
    done.result.add_active(static_cast<uint32_t>(fleet_.topology().rank(place)));
  }
  wire::ControlReply reply;
  *reply.mutable_topology() = std::move(done.result);
  done.reply(reply);
}

}  // namespace weft::daemon
