// The compute threads of a worker: kernels::Parallel over N threads, the caller included.
//
// Tasks are handed out one by one from a counter. A thread that wakes too late to help is not waited for: the
// caller works through all tasks itself if need be, closes the job, and waits only for threads inside it.
// Between jobs a thread spins at most for `spin` (worker/spin.h), then sleeps. Flush-to-zero is on in all of
// them and stays on in the caller. One thread at a time calls run(), never from inside a body; bodies do not
// throw.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <thread>
#include <vector>

#include "kernels/parallel.h"
#include "proto/vocab/clock.h"
#include "proto/vocab/result.h"
#include "worker/spin.h"

namespace weft::worker {

class ThreadPool : public kernels::Parallel {
 public:
  // `threads` ≥ 1; the calling thread is one of them.
  explicit ThreadPool(int threads) : ThreadPool(threads, spin_time(threads)) {}
  ThreadPool(int threads, Duration spin);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Pins thread i to cores[i mod size]; thread 0 is the caller. kInvalidArgument names a core that this
  // process may not use. Empty: nothing.
  Result<void> pin(std::span<const int> cores);

  int thread_count() const override { return static_cast<int>(threads_.size()) + 1; }
  void run(int64_t task_count, const std::function<void(int64_t task, int thread)>& body) override;

 private:
  void serve(int thread);
  void work(int thread);
  bool join(uint64_t seen);

  Duration spin_;
  Spinner end_spinner_;  // of the caller, for helpers to leave
  std::vector<std::thread> threads_;

  // The job. Written by run() while nobody is inside, read by threads that have joined.
  const std::function<void(int64_t, int)>* body_ = nullptr;
  int64_t task_count_ = 0;
  alignas(64) std::atomic<int64_t> next_task_{0};
  // job number << 32 | kOpen while it may be joined | helpers inside.
  alignas(64) std::atomic<uint64_t> job_{0};
  alignas(64) std::atomic<uint32_t> start_bell_{0};  // a new job, or the end
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<uint32_t> done_bell_{0};  // the last helper left a closed job
  std::atomic<bool> stop_{false};
};

}  // namespace weft::worker
