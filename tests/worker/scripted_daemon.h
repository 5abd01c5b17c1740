// A daemon that a test drives by hand: real weft-worker processes, real arenas, one sequence in table 0.
//
// Every failure inside is a CHECK: the test dies where it went wrong. Receives skip LoadProgress and wait
// without a limit; the test runner's timeout ends a worker that never answers.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "kv/control_arena.h"
#include "kv/packet_socket.h"
#include "kv/page_pool.h"
#include "proto/worker.pb.h"

namespace weft::worker {

// One worker process and the daemon's end of its socket.
struct WorkerHandle {
  pid_t pid = -1;
  kv::Descriptor socket;

  static WorkerHandle start();
  void send(const wire::ToWorker& message, std::span<const int> descriptors = {}) const;
  wire::FromWorker receive() const;
  int wait_exit() const;  // the wait status
};

class ScriptedDaemon {
 public:
  static constexpr int64_t kBlockTokens = 8;
  static constexpr int64_t kBlocks = 40;

  ScriptedDaemon(std::string model_path, int rank_count);
  ~ScriptedDaemon();  // stops what still runs
  ScriptedDaemon(const ScriptedDaemon&) = delete;
  ScriptedDaemon& operator=(const ScriptedDaemon&) = delete;

  wire::ToWorker describe_message(int rank) const;
  wire::ToWorker map_message() const;
  std::vector<int> map_descriptors() const;

  // Starts a worker and brings it to Loaded. The first one's description sizes the arenas.
  void start_worker(int rank);
  // A worker without a rank, brought to Loaded; after start_worker().
  WorkerHandle start_spare() const;
  void take_rank(int rank, WorkerHandle spare);
  void begin(uint32_t epoch);  // every worker, from the next plan on
  void publish(uint32_t epoch, const wire::StepPlan& plan);
  std::map<int, wire::StepResult> results();  // of the next step, by rank
  WorkerHandle& worker(int rank) { return workers_[static_cast<size_t>(rank)]; }
  kv::ControlArena& control() { return *control_; }
  const wire::ModelDescription& description() const { return description_; }
  const std::vector<wire::Loaded>& loaded() const { return loaded_; }

  // A step of the one sequence: `rows` rows from `start`, under tp with a copy on every rank.
  wire::StepPlan plan(uint64_t step, uint64_t start, uint32_t rows) const;

 private:
  void make_arenas();
  int mailbox_fd(int rank) const { return memory_[2 + static_cast<size_t>(rank)].get(); }

  std::string model_path_;
  int rank_count_;
  wire::ModelDescription description_;
  std::vector<WorkerHandle> workers_;
  std::vector<wire::Loaded> loaded_;
  std::vector<kv::Descriptor> memory_;  // control, weights, mailboxes, pools
  std::vector<size_t> memory_bytes_;
  kv::Descriptor event_;
  std::unique_ptr<kv::ControlArena> control_;
};

}  // namespace weft::worker
