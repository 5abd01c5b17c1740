// Answers weftctl: status, requests, explain, regroup, cancel, workers, version, shutdown, record, history;
// drain, workers add and remove through the topology service.
//
// Reads snapshots of the other parts and posts events to the engine; holds only the regroup commands that
// wait for their notices. Commands that change something are journalled with their outcome. Loop thread only.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "daemon/control_endpoint.h"
#include "daemon/engine.h"
#include "daemon/journal.h"
#include "daemon/options.h"
#include "daemon/topology_service.h"
#include "daemon/worker_fleet.h"
#include "proto/control.pb.h"

namespace weft::daemon {

// The parts it reads. Pointers are empty until the model is described.
struct ControlView {
  const Options* options = nullptr;
  const WorkerFleet* fleet = nullptr;
  Engine* engine = nullptr;
  TopologyService* topology = nullptr;
  Journal* journal = nullptr;
  controlplane::GroupingWish* defaults = nullptr;
  std::string client_address;
  Time started{};
  bool stopping = false;
};

class ControlService {
 public:
  ControlService(Loop& loop, const EventLog& log, std::function<void()> shut_down)
      : loop_(loop), log_(log), shut_down_(std::move(shut_down)) {}
  ControlView view;

  void handle(const wire::ControlRequest& request, ControlEndpoint::Reply reply);
  void regrouped(const controlplane::RegroupedNotice& notice);
  void pinned(const controlplane::PinNotice& notice);

 private:
  struct Regroup {
    wire::ControlReply reply;
    ControlEndpoint::Reply send;
    int64_t journal_id = 0;
    controlplane::GroupingWish defaults;  // as they are then, or would be
    size_t open = 0;                      // notices to come
  };
  struct PinChange {
    ControlEndpoint::Reply send;
    int64_t journal_id = 0;
  };
  using Answer = Result<wire::ControlReply>;

  wire::ControlReply status() const;
  Answer requests(const wire::RequestsRequest& request) const;
  Answer explain(const wire::ExplainRequest& request) const;
  Result<void> check_live(RequestId id) const;
  Answer cancel(const wire::CancelRequest& request);
  wire::ControlReply workers() const;
  Answer record(const wire::RecordRequest& request);
  wire::ControlReply pins() const;
  void change_pins(const std::string& command, uint64_t which, ControlEndpoint::Reply reply);
  Answer history(const wire::HistoryRequest& request) const;
  void regroup(const wire::RegroupRequest& request, ControlEndpoint::Reply reply);
  void finish_regroup(Regroup& regroup);
  // The defaults as the request wants them; taken, unless it is a dry run.
  Result<controlplane::GroupingWish> set_defaults(const wire::RegroupRequest& request);

  std::string state() const;
  void fill_status(const RequestRecord& record, wire::RequestStatus* to) const;
  int64_t begin(const std::string& command, const std::string& detail);
  void end(int64_t id, const std::string& outcome);

  Loop& loop_;
  const EventLog& log_;
  std::function<void()> shut_down_;
  std::map<uint64_t, Regroup> regroups_;
  std::map<uint64_t, PinChange> pin_changes_;
  uint64_t next_command_ = 1;
};

}  // namespace weft::daemon
