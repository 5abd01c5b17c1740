// Goal: every task runs exactly once, whatever the number of tasks, threads and spinning; the caller sees all
// their effects; flush-to-zero is on in every thread.
#include "worker/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <array>
#include <atomic>
#include <cmath>
#include <limits>

#include "proto/vocab/random.h"

namespace weft::worker {
namespace {

using namespace std::chrono_literals;

TEST(ThreadPool, EveryTaskRunsOnce) {
  SplitMix64 random(7);
  for (int threads : {1, 2, 3, 8}) {
    for (Duration spin : {Duration(0), Duration(20us)}) {
      ThreadPool pool(threads, spin);
      ASSERT_EQ(pool.thread_count(), threads);
      for (int job = 0; job < 2000; ++job) {
        const auto tasks = static_cast<int64_t>(random.below(job % 10 == 0 ? 300 : 9));
        std::vector<int> runs(static_cast<size_t>(tasks), 0);  // plain: run() must publish them to the caller
        std::atomic<bool> bad_thread{false};
        pool.run(tasks, [&](int64_t task, int thread) {
          ++runs[static_cast<size_t>(task)];
          if (thread < 0 || thread >= threads) bad_thread = true;
        });
        for (int n : runs) ASSERT_EQ(n, 1);
        ASSERT_FALSE(bad_thread);
      }
    }
  }
}

TEST(Spinner, LearnsWhetherSpinningPays) {
  Spinner spinner(64us);
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(spinner.until([] { return false; }));
  EXPECT_EQ(spinner.now(), 1us);
  // What takes longer than that is found by a full spin now and then.
  while (spinner.now() == 1us) {
    const Time ready = monotonic_now() + 5us;
    (void)spinner.until([&] { return monotonic_now() >= ready; });
  }
  Spinner never(0us);
  EXPECT_FALSE(never.until([] { return false; }));
  EXPECT_TRUE(never.until([] { return true; }));
}

TEST(ThreadPool, ThreadNumbersAreExclusive) {
  ThreadPool pool(4, 0us);
  std::array<std::atomic<int>, 4> inside{};
  std::atomic<int> clashes{0};
  for (int job = 0; job < 200; ++job) {
    pool.run(50, [&](int64_t, int thread) {
      auto& mine = inside[static_cast<size_t>(thread)];
      if (mine.fetch_add(1) != 0) ++clashes;
      std::this_thread::yield();
      mine.fetch_sub(1);
    });
  }
  EXPECT_EQ(clashes, 0);
}

TEST(ThreadPool, AllThreadsHelp) {
  ThreadPool pool(3);
  std::array<std::atomic<int>, 3> tasks{};
  // Tasks that wait for each other: they end only if three threads run them at once.
  std::atomic<int> arrived{0};
  pool.run(3, [&](int64_t, int thread) {
    ++tasks[static_cast<size_t>(thread)];
    ++arrived;
    while (arrived < 3) std::this_thread::yield();
  });
  for (const auto& count : tasks) EXPECT_EQ(count, 1);
}

TEST(ThreadPool, DenormalsAreFlushed) {
  ThreadPool pool(3);
  std::array<std::atomic<bool>, 3> flushed{};
  std::atomic<int> arrived{0};
  pool.run(3, [&](int64_t, int thread) {
    volatile float tiny = std::numeric_limits<float>::min();
    volatile float smaller = tiny * 0.5f;
    flushed[static_cast<size_t>(thread)] = smaller == 0.0f;
    ++arrived;
    while (arrived < 3) std::this_thread::yield();
  });
  for (const auto& zero : flushed) EXPECT_TRUE(zero);
}

TEST(ThreadPool, PinsToCoresThatExist) {
  cpu_set_t allowed;
  ASSERT_EQ(::sched_getaffinity(0, sizeof allowed, &allowed), 0);
  int core = 0;
  while (!CPU_ISSET(static_cast<size_t>(core), &allowed)) ++core;
  std::thread([&] {  // a thread of its own: pinning the caller lasts
    ThreadPool pool(2);
    ASSERT_TRUE(pool.pin(std::array{core}).has_value());
    std::atomic<int> elsewhere{0};
    std::atomic<int> arrived{0};
    pool.run(2, [&](int64_t, int) {
      if (::sched_getcpu() != core) ++elsewhere;
      ++arrived;
      while (arrived < 2) std::this_thread::yield();
    });
    EXPECT_EQ(elsewhere, 0);
    for (int bad : {-1, 100'000, CPU_SETSIZE - 1}) {
      const auto pinned = pool.pin(std::array{bad});
      ASSERT_FALSE(pinned.has_value());
      EXPECT_EQ(pinned.error().code, ErrorCode::kInvalidArgument);
      EXPECT_EQ(pinned.error().field, "cores");
    }
  })
      .join();
}

TEST(ThreadPool, RunInsideABodyDies) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        ThreadPool pool(2);
        pool.run(2, [&](int64_t, int) { pool.run(2, [](int64_t, int) {}); });
      },
      "CHECK failed");
}

}  // namespace
}  // namespace weft::worker
