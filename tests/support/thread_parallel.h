// A Parallel for tests and benchmarks: threads started at every run, tasks taken in any order. Simple rather
// than fast.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "kernels/parallel.h"

namespace weft::test {

class ThreadParallel final : public kernels::Parallel {
 public:
  explicit ThreadParallel(int threads) : threads_(threads) {}
  int thread_count() const override { return threads_; }
  void run(int64_t task_count, const std::function<void(int64_t, int)>& body) override {
    std::atomic<int64_t> next{0};
    const auto work = [&](int thread) {
      kernels::set_flush_to_zero();
      for (int64_t task; (task = next.fetch_add(1)) < task_count;) body(task, thread);
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads_; ++t) others.emplace_back(work, t);
    work(0);
    for (auto& other : others) other.join();
  }

 private:
  int threads_;
};

}  // namespace weft::test
