// Workers that come and go by command: drain, workers add, workers remove.
//
// One change at a time, in stages, each of which may fail and then leaves everything as it was: the process
// of a worker that comes in starts and loads; the control plane finds room and moves blocks
// (controlplane/topology_change.h); a new epoch begins with the new ranks; the process of a worker that is
// removed ends. The reply is sent, and the journal's line written, when the last one is done. A worker that
// is killed meanwhile is replaced as always, and the change goes on. One that is not there
// when it is to leave is not waited for: the others begin an epoch without it, and move what lies in its
// pool. Loop thread only.
#pragma once

#include <optional>
#include <string>

#include "daemon/arenas.h"
#include "daemon/control_endpoint.h"
#include "daemon/engine.h"
#include "daemon/journal.h"
#include "daemon/worker_fleet.h"
#include "proto/control.pb.h"

namespace weft::daemon {

class TopologyService {
 public:
  TopologyService(const EventLog& log, WorkerFleet& fleet) : log_(log), fleet_(fleet) {}
  // Empty until the model is described, or the journal opened.
  Engine* engine = nullptr;
  Journal* journal = nullptr;
  const ArenaSizes* sizes = nullptr;

  void drain(const wire::DrainRequest& request, ControlEndpoint::Reply reply);
  void add(const wire::AddWorkerRequest& request, ControlEndpoint::Reply reply);
  void remove(const wire::RemoveWorkerRequest& request, ControlEndpoint::Reply reply);
  // The daemon stops: a change that is under way will not be done.
  void stop();

  // ---- what happens meanwhile
  void decided(const controlplane::TopologyNotice& notice);
  void epoch_began(Epoch epoch);
  void worker_waits(int rank);
  void worker_failed(int rank, const Error& why);
  void worker_stopped(int rank);
  // An epoch that ends now makes room for the next one, and is not lost.
  bool changes_epoch() const { return change_ && change_->decided; }

 private:
  enum class Kind : uint8_t { kDrain, kAdd, kRemove };
  struct Change {
    Kind kind{};
    int rank = 0;
    std::string text;  // "drain 3"
    ControlEndpoint::Reply reply;
    int64_t journal_id = 0;
    uint64_t command = 0;
    bool started = false;  // the process was started for it
    bool decided = false;  // the control plane has moved everything
    bool stopping = false;
    std::optional<kv::Topology> before;  // the others began without it
    wire::TopologyReply result;
  };

  // Empty where the request can be begun; else the reason.
  Result<void> check_free() const;
  Result<void> check_leaves(int rank) const;
  Result<int> check_joins(const wire::AddWorkerRequest& request) const;
  void begin(Kind kind, int rank, const std::string& text, ControlEndpoint::Reply reply);
  void ask_control_plane();
  void finish(const Result<void>& outcome);
  std::string ranks_text() const;

  const EventLog& log_;
  WorkerFleet& fleet_;
  std::optional<Change> change_;
  uint64_t commands_ = 0;
};

}  // namespace weft::daemon
