#include "worker/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <limits>
#include <string>

#include "kv/shared_memory.h"
#include "proto/vocab/check.h"

namespace weft::worker {
namespace {

constexpr uint64_t kOpen = uint64_t{1} << 31;
constexpr uint64_t kHelpersMask = kOpen - 1;
constexpr Duration kForever = Duration::max();

}  // namespace

ThreadPool::ThreadPool(int threads, Duration spin) : spin_(spin), end_spinner_(spin) {
  CHECK_GE(threads, 1);
  threads_.reserve(static_cast<size_t>(threads - 1));
  for (int thread = 1; thread < threads; ++thread) {
    threads_.emplace_back([this, thread] { serve(thread); });
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_seq_cst);
  start_bell_.fetch_add(1, std::memory_order_seq_cst);
  kv::futex_wake(start_bell_);
  for (std::thread& thread : threads_) thread.join();
}

Result<void> ThreadPool::pin(std::span<const int> cores) {
  if (cores.empty()) return {};
  for (int thread = 0; thread < thread_count(); ++thread) {
    const int core = cores[static_cast<size_t>(thread) % cores.size()];
    cpu_set_t set;
    CPU_ZERO(&set);
    if (core >= 0 && core < CPU_SETSIZE) CPU_SET(static_cast<size_t>(core), &set);
    const pthread_t handle =
        thread == 0 ? ::pthread_self() : threads_[static_cast<size_t>(thread - 1)].native_handle();
    if (::pthread_setaffinity_np(handle, sizeof set, &set) != 0) {
      return error(ErrorCode::kInvalidArgument, "core " + std::to_string(core) + " cannot be used here",
                   "cores");
    }
  }
  return {};
}

void ThreadPool::run(int64_t task_count, const std::function<void(int64_t, int)>& body) {
  kernels::set_flush_to_zero();
  if (task_count <= 0) return;
  if (threads_.empty() || task_count == 1) {
    for (int64_t task = 0; task < task_count; ++task) body(task, 0);
    return;
  }
  const uint64_t last = job_.load(std::memory_order_relaxed);
  CHECK_EQ(last & (kOpen | kHelpersMask), 0u);  // else run() was called inside a body, or twice at once
  body_ = &body;
  task_count_ = task_count;
  next_task_.store(0, std::memory_order_relaxed);
  const uint64_t number = ((last >> 32) + 1) << 32;
  job_.store(number | kOpen, std::memory_order_seq_cst);
  start_bell_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) kv::futex_wake(start_bell_);

  work(0);

  job_.fetch_and(~kOpen, std::memory_order_seq_cst);
  auto alone = [&] { return (job_.load(std::memory_order_seq_cst) & kHelpersMask) == 0; };
  if (end_spinner_.until(alone)) return;
  for (;;) {
    const uint32_t heard = done_bell_.load(std::memory_order_seq_cst);
    if (alone()) return;
    kv::futex_wait(done_bell_, heard, kForever);
  }
}

void ThreadPool::work(int thread) {
  const auto& body = *body_;
  const int64_t count = task_count_;
  for (int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed); task < count;
       task = next_task_.fetch_add(1, std::memory_order_relaxed)) {
    body(task, thread);
  }
}

// True when this thread is now inside the job of `seen`; false when that job is closed.
bool ThreadPool::join(uint64_t seen) {
  while ((seen & kOpen) != 0) {
    if (job_.compare_exchange_weak(seen, seen + 1, std::memory_order_seq_cst)) return true;
  }
  return false;
}

void ThreadPool::serve(int thread) {
  kernels::set_flush_to_zero();
  Spinner spinner(spin_);
  uint64_t helped = 0;  // number of the last job that this thread was in
  auto something_new = [&] {
    const uint64_t job = job_.load(std::memory_order_seq_cst);
    return stop_.load(std::memory_order_seq_cst) || ((job & kOpen) != 0 && job >> 32 != helped);
  };
  for (;;) {
    if (!spinner.until(something_new)) {
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      for (;;) {
        const uint32_t heard = start_bell_.load(std::memory_order_seq_cst);
        if (something_new()) break;
        kv::futex_wait(start_bell_, heard, kForever);
      }
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
    if (stop_.load(std::memory_order_seq_cst)) return;
    if (!join(job_.load(std::memory_order_seq_cst))) continue;
    helped = job_.load(std::memory_order_seq_cst) >> 32;  // cannot change while we are inside
    work(thread);
    const uint64_t before = job_.fetch_sub(1, std::memory_order_seq_cst);
    if ((before & kHelpersMask) == 1 && (before & kOpen) == 0) {
      done_bell_.fetch_add(1, std::memory_order_seq_cst);
      kv::futex_wake(done_bell_);
    }
  }
}

}  // namespace weft::worker
