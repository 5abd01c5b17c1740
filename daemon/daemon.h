// weftd: joins the parts and leads them from start to stop.
//
// Start: journal (and the lock of the state folder), sockets, workers; when these have described the model
// the engine is made, and the first epoch makes the daemon ready. Stop: no new clients, streams end with a
// typed reply, workers are asked and then killed, sockets are removed. Owns everything; all of it on the loop
// thread.
#pragma once

#include <memory>
#include <optional>

#include "daemon/client_endpoint.h"
#include "daemon/client_service.h"
#include "daemon/control_endpoint.h"
#include "daemon/control_service.h"
#include "daemon/engine.h"
#include "daemon/event_log.h"
#include "daemon/journal.h"
#include "daemon/loop.h"
#include "daemon/options.h"
#include "daemon/sizing.h"
#include "daemon/socket_path.h"
#include "daemon/topology_service.h"
#include "daemon/worker_fleet.h"

namespace weft::daemon {

class Daemon : private FleetListener, private EngineListener {
 public:
  Daemon(const Options& options, const EventLog& log);
  ~Daemon() override;

  // Opens what can fail for reasons of the outside: state folder, tokenizer, sockets.
  Result<void> open();
  // Until it has stopped. An Error: it could not start its workers.
  Result<void> run();

 private:
  void stop(const std::string& why);
  Result<void> make_socket_folders();
  void restore_defaults();
  void write_configuration();
  void journal(const Result<void>& written);
  void print_ready();

  // ---- FleetListener
  Result<ArenaSizes> size_arenas(const wire::ModelDescription& model) override;
  void arenas_made(kv::ControlArena& control, int results_fd) override;
  void epoch_began(Epoch epoch) override;
  Duration epoch_lost(Epoch epoch, const std::string& reason, Loss loss) override;
  void worker_started(int rank) override;
  void worker_waits(int rank) override { topology_.worker_waits(rank); }
  void worker_failed(int rank, const Error& why) override { topology_.worker_failed(rank, why); }
  void worker_stopped(int rank) override { topology_.worker_stopped(rank); }
  void memory_lost(int rank) override { engine_->memory_lost(rank); }
  void fleet_failed(const Error& failure) override;
  void fleet_stopped() override;

  // ---- EngineListener
  void token(const controlplane::TokenNotice& notice) override { clients_.token(notice); }
  void prefill(const controlplane::PrefillNotice& notice) override { clients_.prefill(notice); }
  void digest(RequestId request, int64_t position, const std::string& sha256) override {
    clients_.digest(request, position, sha256);
  }
  void finished(const controlplane::FinishedNotice& notice, const RequestRecord& record) override {
    clients_.finished(notice, record);
  }
  void regrouped(const controlplane::RegroupedNotice& notice) override { control_.regrouped(notice); }
  void pinned(const controlplane::PinNotice& notice) override { control_.pinned(notice); }
  void topology(const controlplane::TopologyNotice& notice) override { topology_.decided(notice); }
  void rank_hung(int rank, const std::string& why) override { fleet_.hung(rank, why); }
  void step_done() override { fleet_.step_done(); }

  const Options& options_;
  const EventLog& log_;
  Loop loop_;
  controlplane::GroupingWish defaults_;
  std::optional<Journal> journal_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::string no_tokenizer_;
  std::optional<Sizing> sizing_;
  WorkerFleet fleet_;
  std::unique_ptr<Engine> engine_;
  ClientService clients_;
  TopologyService topology_;
  ControlService control_;
  int64_t recovery_ = 0;                     // line of the journal
  std::vector<OwnedFolder> socket_folders_;  // outlive the sockets
  std::unique_ptr<ClientEndpoint> client_endpoint_;
  std::unique_ptr<ControlEndpoint> control_endpoint_;
  std::unique_ptr<SignalWatch> terminate_, interrupt_;
  std::optional<Error> failure_;
  bool ready_ = false;
  bool stopping_ = false;
};

}  // namespace weft::daemon
