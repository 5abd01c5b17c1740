#include "kernels/parallel.h"

#include <xmmintrin.h>

namespace weft::kernels {
namespace {

class Serial final : public Parallel {
 public:
  int thread_count() const override { return 1; }
  void run(int64_t task_count, const std::function<void(int64_t, int)>& body) override {
    set_flush_to_zero();
    for (int64_t task = 0; task < task_count; ++task) body(task, 0);
  }
};

}  // namespace

Parallel& serial() {
  static Serial instance;  // stateless: any number of threads may use it at once
  return instance;
}

void set_flush_to_zero() {
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  _mm_setcsr(_mm_getcsr() | kFlushToZero | kDenormalsAreZero);
}

}  // namespace weft::kernels
