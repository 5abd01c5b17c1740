#include "worker/spin.h"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace weft::worker {

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

Duration spin_time(int busy_threads) {
  return busy_threads <= usable_cores() ? Duration(std::chrono::microseconds(50)) : Duration::zero();
}

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace weft::worker
