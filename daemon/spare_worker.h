// One more worker process, without a rank, that has described the model and mapped the arenas: it takes the
// place of a worker that died, so that nobody waits for a start.
//
// A spare is started when want() is called and there is none, and again after one has been taken; one that
// dies is started again by the rules of every worker (daemon/supervisor.h). Its trouble is logged and
// troubles nobody else. Loop thread only.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/event_log.h"
#include "daemon/loop.h"
#include "daemon/process.h"
#include "daemon/supervisor.h"
#include "proto/worker.pb.h"

namespace weft::daemon {

class SpareWorker {
 public:
  // What is said to it: the model, then the arenas, whose descriptors go with the message.
  struct Script {
    std::function<wire::ToWorker()> describe, map_arenas;
    std::function<std::vector<int>()> descriptors;
    std::function<void()> gone;  // after stop(): its process is reaped
  };
  SpareWorker(Loop& loop, const EventLog& log, std::string binary, SupervisorLimits limits, Script script);
  ~SpareWorker();

  void want();  // once there are arenas
  void stop();  // and start none any more
  void kill();
  bool alive() const { return process_.has_value(); }
  // The process, if it is ready: the caller watches it from now on and tells it its rank.
  std::optional<Process> take();

 private:
  void apply(WorkerEvent event);
  void start();
  void send(const wire::ToWorker& message, const std::vector<int>& descriptors = {});
  void read_socket();
  void read_output();
  void ended();
  void forget();  // the watches

  Loop& loop_;
  const EventLog& log_;
  const std::string binary_;
  const Script script_;
  Supervisor supervisor_;
  Timer timer_;
  std::optional<Process> process_;
  std::unique_ptr<Watch> socket_watch_, end_watch_, output_watch_;
  bool stopping_ = false;
};

}  // namespace weft::daemon
