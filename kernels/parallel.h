// How a kernel spreads independent work over threads. The partition never changes a bit of any result.
#pragma once

#include <cstdint>
#include <functional>

namespace weft::kernels {

class Parallel {
 public:
  virtual ~Parallel() = default;
  virtual int thread_count() const = 0;
  // Calls body(task, thread) once for each task in [0, task_count), thread in [0, thread_count); returns
  // when all are done. Flush-to-zero is on in every thread that runs body. Not reentrant.
  virtual void run(int64_t task_count, const std::function<void(int64_t task, int thread)>& body) = 0;
};

// The caller's thread alone (flush-to-zero stays on in it afterwards). Stateless: threads may share it, and a
// body of another Parallel may use it.
Parallel& serial();

// Sets flush-to-zero and denormals-are-zero for the calling thread. Every computing thread calls it once.
void set_flush_to_zero();

}  // namespace weft::kernels
