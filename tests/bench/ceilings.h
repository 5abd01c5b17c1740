// What this machine can do, measured in the run that wants to compare itself with it.
//
// The loops are the plainest that reach the peak: independent accumulators in registers, no memory. All take
// the instruction set in use (kernels/features.h). Rates count a multiply-add as two operations.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>

namespace weft::bench {

// Best of at least three runs of `work`, repeated for about `seconds`: the run least disturbed by others.
template <typename Work>
double best_seconds(double seconds, const Work& work) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  double best = 1e30;
  for (int run = 0; run < 3 || std::chrono::duration<double>(Clock::now() - start).count() < seconds; ++run) {
    const auto before = Clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - before).count());
  }
  return best;
}

// GFLOP/s of float32 fused multiply-adds, all threads together.
double fma_gflops(int threads, double seconds);
// GFLOP/s of bf16 pairs: VDPBF16PS where the instruction set in use has it, else the float32 loop (two fused
// multiply-adds per pair, conversions not counted).
double bf16_dot_gflops(int threads, double seconds);
// GB/s of one pass over `bytes` of memory, read once from front to back by each of `threads` on its own part.
double stream_read_gbs(int threads, size_t bytes, double seconds);

}  // namespace weft::bench
