#include "kernels/parallel.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <cstdint>

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

// A processor that is none of these keeps denormal numbers: right results, but other bits.
void set_flush_to_zero() {
#if defined(__x86_64__)
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  _mm_setcsr(_mm_getcsr() | kFlushToZero | kDenormalsAreZero);
#elif defined(__aarch64__)
  constexpr uint64_t kFlushToZero = uint64_t{1} << 24;  // FZ of FPCR: inputs and results
  uint64_t control = 0;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" : : "r"(control | kFlushToZero));
#endif
}

}  // namespace weft::kernels
