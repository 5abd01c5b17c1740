// Moves pages between ranks' pools, mostly this rank's own, and the host pool beside the computing of a step.
//
// A thread of its own brings the loads layer by layer, so that layer l is there when attention reads it while
// later layers are still on their way, and then takes the spills out. The step waits for a layer before it
// reads cached bytes of it, and before it passes the exchange point behind which other ranks may read them in
// this rank's pages; and for everything before it reports. So what a step reports has been copied, and a step
// that is left in the middle leaves no thread behind that touches shared memory.
//
// Safe to repeat: a page that is loaded or spilled is written by nobody else in the step (the control plane
// moves full blocks only), and is handed out anew only when all ranks have acknowledged the step. Between
// jobs, and while the step waits for it, threads sleep. One thread calls all of it. Bytes are counted by the
// caller.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "kv/page_pool.h"
#include "kv/piece_copy.h"
#include "proto/vocab/clock.h"
#include "proto/vocab/result.h"

namespace weft::worker {

struct HostMove {
  kv::Stream stream{};
  PageId page{}, host_page{};
  int rank = 0;  // whose pool the page is in
};

struct MoverSetup {
  std::vector<kv::PagePool> pools;  // by rank
  kv::PagePool host;
  std::vector<uint8_t> keeps_index;  // by layer of the model: whether it has index keys
  std::vector<int> cores;            // where its thread may run; empty: anywhere
};

class PageMover {
 public:
  explicit PageMover(MoverSetup setup);
  ~PageMover();
  PageMover(const PageMover&) = delete;
  PageMover& operator=(const PageMover&) = delete;

  // No job runs. `aborted` is asked between pieces, by the mover's thread.
  void start(std::vector<HostMove> loads, std::vector<HostMove> spills, std::function<bool()> aborted);
  // Until the loads of all layers up to this one are there. kCancelled: the job was aborted;
  // kDeadlineExceeded.
  Result<void> wait_layer(int64_t layer, Duration deadline);
  Result<void> finish(Duration deadline);  // the same for the whole job
  // Leaves a job that still runs; afterwards nothing is touched. Its targets hold anything.
  void stop();

 private:
  void serve();
  void run_job();
  bool copy(std::span<const HostMove> moves, bool load, kv::Stream stream, kv::Range layers, size_t whole);
  bool leaves() const;
  Result<void> wait(Duration deadline, const std::function<bool()>& there);

  const MoverSetup setup_;
  std::mutex mutex_;
  std::condition_variable work_, progress_;
  // Under the mutex; the job itself belongs to the mover's thread while busy_.
  bool busy_ = false, ending_ = false, complete_ = true;
  int64_t layers_done_ = 0;
  std::atomic<bool> stop_{false};
  std::vector<HostMove> loads_, spills_;
  std::function<bool()> aborted_;
  std::vector<kv::CopyPiece> pieces_;
  std::thread thread_;  // last: it starts when all else is there
};

// Layers of a stream that are loaded at once: small ones together, for short pieces copy slowly.
int64_t layers_at_once(const kv::CacheGeometry& geometry, kv::Stream stream);

}  // namespace weft::worker
