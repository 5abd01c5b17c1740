#include "tests/bench/ceilings.h"

#include <immintrin.h>
#include <sched.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/features.h"
#include "proto/vocab/random.h"

namespace weft::bench {
namespace {

constexpr int kAccumulators = 12;  // latency of 4 cycles × 2 units, and some to spare; fits 16 registers

__attribute__((target("avx512f"))) float fma_loop_avx512(int64_t steps) {
  __m512 sum[kAccumulators], a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
  for (auto& s : sum) s = _mm512_setzero_ps();
  for (int64_t i = 0; i < steps; ++i) {
    asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
    for (int j = 0; j < kAccumulators; ++j) sum[j] = _mm512_fmadd_ps(a, b, sum[j]);
  }
  float parts[16], total = 0;
  for (auto& s : sum) {
    _mm512_storeu_ps(parts, s);
    for (float part : parts) total += part;
  }
  return total;
}

__attribute__((target("avx512f,avx512bf16"))) float bf16_loop_avx512(int64_t steps) {
  __m512 sum[kAccumulators];
  __m512i a = _mm512_set1_epi32(0x3f003f00), b = _mm512_set1_epi32(0x3e803e80);
  for (auto& s : sum) s = _mm512_setzero_ps();
  for (int64_t i = 0; i < steps; ++i) {
    asm volatile("" : "+v"(a), "+v"(b));
#pragma GCC unroll 12
    for (int j = 0; j < kAccumulators; ++j) {
      sum[j] = _mm512_dpbf16_ps(sum[j], reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
    }
  }
  float parts[16], total = 0;
  for (auto& s : sum) {
    _mm512_storeu_ps(parts, s);
    for (float part : parts) total += part;
  }
  return total;
}

__attribute__((target("avx2,fma"))) float fma_loop_avx2(int64_t steps) {
  __m256 sum[kAccumulators], a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
  for (auto& s : sum) s = _mm256_setzero_ps();
  for (int64_t i = 0; i < steps; ++i) {
    asm volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 12
    for (int j = 0; j < kAccumulators; ++j) sum[j] = _mm256_fmadd_ps(a, b, sum[j]);
  }
  float parts[8], total = 0;
  for (auto& s : sum) {
    _mm256_storeu_ps(parts, s);
    for (float part : parts) total += part;
  }
  return total;
}

// The baseline of x86-64: no fused multiply-add; a multiplication and an addition.
float fma_loop_portable(int64_t steps) {
  __m128 sum[kAccumulators], a = _mm_set1_ps(0.5f), b = _mm_set1_ps(0.25f);
  for (auto& s : sum) s = _mm_setzero_ps();
  for (int64_t i = 0; i < steps; ++i) {
    asm volatile("" : "+x"(a), "+x"(b));
#pragma GCC unroll 12
    for (int j = 0; j < kAccumulators; ++j) sum[j] = _mm_add_ps(_mm_mul_ps(a, b), sum[j]);
  }
  float parts[4], total = 0;
  for (auto& s : sum) {
    _mm_storeu_ps(parts, s);
    for (float part : parts) total += part;
  }
  return total;
}

void on_threads(int threads, const std::function<void(int)>& body) {
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back([&body, t] { body(t); });
  body(0);
  for (auto& other : others) other.join();
}

// Keep results from being optimised away; all threads store here.
std::atomic<float> sink_float;
std::atomic<uint64_t> sink_word;

// A loop, and the operations of one of its instructions.
struct Loop {
  float (*run)(int64_t steps);
  int operations;
};

// About a millisecond: short enough to fall between others' time slices.
constexpr int64_t kSteps = 400'000;

bool in_use(const char* name) { return std::strcmp(kernels::instruction_set(), name) == 0; }

Loop best_fma_loop() {
  if (in_use("avx512") || in_use("avx512_bf16")) return {fma_loop_avx512, 32};
  if (in_use("avx2")) return {fma_loop_avx2, 16};
  return {fma_loop_portable, 8};
}
Loop best_bf16_loop() { return in_use("avx512_bf16") ? Loop{bf16_loop_avx512, 64} : best_fma_loop(); }

double loop_gflops(int threads, double seconds, const Loop& loop) {
  const double best = best_seconds(
      seconds,
      [&] {
        on_threads(threads, [&](int) { sink_float.store(loop.run(kSteps), std::memory_order_relaxed); });
      },
      threads);
  return static_cast<double>(kSteps) * kAccumulators * loop.operations * threads / best * 1e-9;
}

// Several pieces for each thread: one that comes late takes fewer.
constexpr int64_t kPieces = 8;
int64_t pieces(const kernels::Parallel& parallel) {
  return parallel.thread_count() == 1 ? 1 : kPieces * parallel.thread_count();
}

Contender in_turns(std::string what, kernels::Parallel& parallel, const Loop& loop) {
  const int64_t steps = kSteps * parallel.thread_count() / pieces(parallel);
  return {std::move(what), static_cast<double>(steps * pieces(parallel)) * kAccumulators * loop.operations,
          [=, &parallel] {
            parallel.run(pieces(parallel),
                         [&](int64_t, int) { sink_float.store(loop.run(steps), std::memory_order_relaxed); });
          }};
}

uint64_t read_words(const uint64_t* words, size_t count) {
  uint64_t sums[8] = {};
  for (size_t i = 0; i + 8 <= count; i += 8) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) sums[j] += words[i + static_cast<size_t>(j)];
  }
  uint64_t total = 0;
  for (uint64_t s : sums) total += s;
  return total;
}

}  // namespace

double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double fma_gflops(int threads, double seconds) { return loop_gflops(threads, seconds, best_fma_loop()); }

double bf16_dot_gflops(int threads, double seconds) {
  return loop_gflops(threads, seconds, best_bf16_loop());
}

double stream_read_gbs(int threads, size_t bytes, double seconds) {
  const size_t words = bytes / 8 / static_cast<size_t>(threads);
  std::vector<uint64_t> memory(words * static_cast<size_t>(threads), 1);
  const double best = best_seconds(
      seconds,
      [&] {
        on_threads(threads, [&](int t) {
          sink_word.store(read_words(memory.data() + static_cast<size_t>(t) * words, words),
                          std::memory_order_relaxed);
        });
      },
      threads);
  return static_cast<double>(memory.size() * 8) / best * 1e-9;
}

double random_rows_gbs(int threads, size_t bytes, size_t row_bytes, double seconds) {
  const size_t rows = bytes / row_bytes / static_cast<size_t>(threads), words = row_bytes / 8;
  std::vector<uint64_t> memory(rows * words * static_cast<size_t>(threads), 1);
  std::vector<uint32_t> order(rows);
  std::iota(order.begin(), order.end(), 0u);
  SplitMix64 random(1);
  for (size_t i = rows; i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
  const double best = best_seconds(
      seconds,
      [&] {
        on_threads(threads, [&](int t) {
          const uint64_t* part = memory.data() + static_cast<size_t>(t) * rows * words;
          uint64_t total = 0;
          for (const uint32_t row : order) total += read_words(part + row * words, words);
          sink_word.store(total, std::memory_order_relaxed);
        });
      },
      threads);
  return static_cast<double>(memory.size() * 8) / best * 1e-9;
}

double memcpy_gbs(int threads, size_t bytes, double seconds) {
  const size_t part = bytes / static_cast<size_t>(threads);
  std::vector<char> source(part * static_cast<size_t>(threads), 1), target(source.size());
  const double best = best_seconds(
      seconds,
      [&] {
        on_threads(threads, [&](int t) {
          const size_t at = static_cast<size_t>(t) * part;
          std::memcpy(target.data() + at, source.data() + at, part);
          asm volatile("" : : "r"(target.data()) : "memory");  // somebody may read it
        });
      },
      threads);
  return static_cast<double>(source.size()) / best * 1e-9;
}

double barrier_microseconds(int threads, double seconds) {
  constexpr uint32_t kRounds = 20'000;  // far more than starting the threads costs
  constexpr int kPatience = 1'000;
  const double best = best_seconds(seconds, [&] {
    std::atomic<uint32_t> arrived{0};
    on_threads(threads, [&](int) {
      for (uint32_t target = static_cast<uint32_t>(threads), round = 0; round < kRounds;
           ++round, target += static_cast<uint32_t>(threads)) {
        arrived.fetch_add(1);
        for (int spins = 0; arrived.load() < target; ++spins) {
          if (spins >= kPatience) ::sched_yield();
        }
      }
    });
  });
  return best / kRounds * 1e6;
}

Contender fma_loop(kernels::Parallel& parallel) { return in_turns("FMA loop", parallel, best_fma_loop()); }

Contender bf16_dot_loop(kernels::Parallel& parallel) {
  return in_turns("bf16 dot loop", parallel, best_bf16_loop());
}

Contender stream_read(kernels::Parallel& parallel, size_t bytes) {
  const size_t words = bytes / 8 / static_cast<size_t>(pieces(parallel));
  const size_t all = words * static_cast<size_t>(pieces(parallel));
  auto memory = std::make_shared<std::vector<uint64_t>>(all, 1);  // shared: a std::function is copied
  return {"stream read", static_cast<double>(all * 8), [=, &parallel] {
            parallel.run(pieces(parallel), [&](int64_t piece, int) {
              sink_word.store(read_words(memory->data() + static_cast<size_t>(piece) * words, words),
                              std::memory_order_relaxed);
            });
          }};
}

}  // namespace weft::bench
