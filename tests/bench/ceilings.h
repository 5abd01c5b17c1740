// What this machine can do, measured in the run that wants to compare itself with it.
//
// The loops are the plainest that reach the peak: independent accumulators in registers, no memory. All take
// the instruction set in use (kernels/features.h). Rates count a multiply-add as two operations.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/parallel.h"
#include "tests/bench/rounds.h"

namespace weft::bench {

// Seconds that the calling thread has computed so far, and seconds on the wall.
double thread_seconds();
double wall_seconds();

// Best of at least three runs of `work`, repeated for about `seconds`. Work of one thread is timed by that
// thread's CPU clock, so that a busy machine shows the kernel and not the queue for the core (caches and
// clock rate stay shared); more threads, or threads = 0, by the wall.
template <typename Work>
double best_seconds(double seconds, const Work& work, int threads = 0) {
  const auto now = threads == 1 ? thread_seconds : wall_seconds;
  const double start = wall_seconds();
  double before = now();
  work();
  // Short work is timed many runs at once, two milliseconds together: clocks have edges.
  const double once = std::max(now() - before, 1e-7);
  const int repeats = seconds > 0 ? static_cast<int>(std::clamp(2e-3 / once, 1.0, 1e4)) : 1;
  double best = 1e30;
  for (int run = 0; run < 3 || wall_seconds() - start < seconds; ++run) {
    before = now();
    for (int i = 0; i < repeats; ++i) work();
    best = std::min(best, (now() - before) / repeats);
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
// GB/s of reading rows of `row_bytes` (a multiple of 64) whole, each once, in random order, out of `bytes`;
// each of `threads` reads its own part.
double random_rows_gbs(int threads, size_t bytes, size_t row_bytes, double seconds);
// GB/s of memcpy of `bytes` to elsewhere, each byte counted once, each thread copying its own part.
double memcpy_gbs(int threads, size_t bytes, double seconds);
// Microseconds of the plainest barrier: all threads count up one word and spin on it until all have. A thread
// that waits longer than any core-to-core message takes lets others run.
double barrier_microseconds(int threads, double seconds);

// The first three once more, to take turns with others; about a millisecond, or one pass, for all threads of
// `parallel`, which outlives them.
Contender fma_loop(kernels::Parallel& parallel);
Contender bf16_dot_loop(kernels::Parallel& parallel);
Contender stream_read(kernels::Parallel& parallel, size_t bytes);

}  // namespace weft::bench
