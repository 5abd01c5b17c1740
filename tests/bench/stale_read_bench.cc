// Looks for stale reads: pages that go from owner to owner as fast as they can, while another process reads
// them through page tables and acknowledges late.
//
// One process plays the daemon and the rank that writes: for each step it takes pages from the real
// allocator, writes their owner into them, writes the page table, publishes the plan in the real control
// arena and gives all pages back behind the plan's fence, two plans in flight. The other plays a reader:
// after a random wait it reads every page of the plan through the table and counts those that do not say the
// plan's owner. Pages suffice for three plans only, and those freed last are taken first, so that every page
// is recycled at once. With --no-fence pages are free when they are given back: then a stale read must come,
// or the test proves nothing, and fails.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>

#include "controlplane/page_allocator.h"
#include "kv/control_arena.h"
#include "proto/command_line.h"
#include "proto/vocab/random.h"
#include "tests/bench/guard.h"

namespace weft::bench {
namespace {

constexpr int64_t kPlanPages = 1024;
constexpr int64_t kPages = 3 * kPlanPages;
constexpr int64_t kTables = 3;
constexpr Epoch kEpoch{1};
constexpr Duration kPatience = std::chrono::seconds(60);

struct PlanBytes {
  uint64_t step = 0;  // 0: the last one
  uint32_t table = 0;
};
struct ResultBytes {
  uint64_t step = 0;
  uint64_t stale = 0;
};
template <typename T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}
template <typename T>
T read_bytes(std::span<const std::byte> bytes) {
  T value;
  CHECK_EQ(bytes.size(), sizeof value);
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

uint64_t owner_of(uint64_t step, int64_t index) { return step * kPlanPages + static_cast<uint64_t>(index); }

// What both processes map: the control arena, and a pool of pages of one word.
struct Shared {
  kv::Descriptor control_memory, pool_memory;
  kv::Mapping pool;
  std::atomic<uint64_t>* page(PageId id) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(pool.data()) + number(id) * 8;  // a cache line each
  }
};

kv::ControlLimits arena_limits() {
  kv::ControlLimits limits;
  limits.rank_count = 1;
  limits.block_tokens = 64;
  limits.parts = 1;
  limits.table_count = kTables;
  limits.table_blocks = kPlanPages;
  limits.max_samples = 1;
  limits.plan_bytes_max = 64;
  limits.result_bytes_max = 64;
  return limits;
}

// The reader: until a plan without a step.
int read_plans(Shared& shared, uint64_t seed) {
  SplitMix64 random(seed);
  kv::ControlArena arena =
      kv::ControlArena::open(
          kv::Mapping::map(shared.control_memory.get(), kv::control_arena_bytes(arena_limits())).value())
          .value();
  const auto linger = [&] {  // mostly not at all, at times for a while or off the processor
    const uint64_t kind = random.below(8);
    for (uint64_t i = kind < 4 ? 0 : random.below(20'000); i > 0; --i) asm volatile("" ::: "memory");
    if (kind == 7) ::sched_yield();
  };
  for (uint32_t sequence = 0;; ++sequence) {
    const auto view = arena.wait_plan(sequence, kEpoch, kPatience);
    if (!view) return 1;
    const auto plan = read_bytes<PlanBytes>(view->bytes);
    if (plan.step == 0) return 0;
    linger();
    ResultBytes result{plan.step, 0};
    for (int64_t block = 0; block < kPlanPages; ++block) {
      const PageId page = arena.pages(TableId{plan.table}, block, 0)[0];
      if (shared.page(page)->load(std::memory_order_relaxed) != owner_of(plan.step, block)) ++result.stale;
    }
    arena.plan_read(0, sequence + 1);
    linger();
    if (!arena.publish_result(0, bytes_of(result), kPatience)) return 1;
  }
}

class Recycler {
 public:
  Recycler(Shared& shared, bool fenced)
      : shared_(shared),
        fenced_(fenced),
        arena_(kv::ControlArena::format(
                   kv::Mapping::map(shared.control_memory.get(), kv::control_arena_bytes(arena_limits()))
                       .value(),
                   arena_limits())
                   .value()),
        limits_(pool_limits()),
        allocator_(limits_) {}

  // Stale reads; without the fence it stops at the first.
  int64_t run(int64_t recycles) {
    for (uint64_t step = 1; recycled_ < recycles; ++step) {
      while (in_flight_.size() == 2) collect();
      if (!fenced_ && stale_ > 0) break;
      publish(step);
    }
    while (!in_flight_.empty()) collect();
    arena_.publish_plan(kEpoch, bytes_of(PlanBytes{}));
    return stale_;
  }
  int64_t recycled() const { return recycled_; }

 private:
  static controlplane::Limits pool_limits() {
    controlplane::Limits limits;
    limits.geometry.streams[0] = {1, 1};
    limits.pool_pages = {{kPages, 0}};
    return limits;
  }

  void publish(uint64_t step) {
    const TableId table{static_cast<uint32_t>(step % kTables)};
    std::array<PageId, kPlanPages> pages;
    for (int64_t i = 0; i < kPlanPages; ++i) {
      const auto page = allocator_.take(kv::Stream::kEntries, 0);
      CHECK(page.has_value(), "three plans' pages, two in flight");
      shared_.page(*page)->store(owner_of(step, i), std::memory_order_relaxed);
      pages[static_cast<size_t>(i)] = *page;
    }
    arena_.write_table(table, 0, pages);
    arena_.publish_plan(kEpoch, bytes_of(PlanBytes{step, number(table)}));
    in_flight_.push_back(step);
    for (const PageId page : pages) {
      allocator_.give_back(kv::Stream::kEntries, 0, page, fenced_ ? StepId{step} : StepId{0});
    }
    recycled_ += kPlanPages;
  }

  void collect() {
    std::optional<std::vector<std::byte>> bytes;
    while (!(bytes = arena_.take_result(0))) ::sched_yield();
    const auto result = read_bytes<ResultBytes>(*bytes);
    CHECK_EQ(result.step, in_flight_.front());
    in_flight_.pop_front();
    stale_ += static_cast<int64_t>(result.stale);
    allocator_.complete(StepId{result.step});
  }

  Shared& shared_;
  const bool fenced_;
  kv::ControlArena arena_;
  const controlplane::Limits limits_;
  controlplane::PageAllocator allocator_;
  std::deque<uint64_t> in_flight_;
  int64_t recycled_ = 0, stale_ = 0;
};

int run(int64_t recycles, bool fenced, uint64_t seed) {
  Shared shared;
  shared.control_memory = kv::create_memory("control", kv::control_arena_bytes(arena_limits())).value();
  shared.pool_memory = kv::create_memory("pool", kPages * 64).value();
  shared.pool = kv::Mapping::map(shared.pool_memory.get(), kPages * 64).value();
  Recycler recycler(shared, fenced);
  const pid_t reader = ::fork();
  if (reader == 0) ::_exit(read_plans(shared, seed));
  const auto begin = std::chrono::steady_clock::now();
  const int64_t stale = recycler.run(recycles);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  int status = 0;
  ::waitpid(reader, &status, 0);
  CHECK_EQ(status, 0);
  std::printf("%s: %lld pages recycled in %.1f s, %lld stale reads (seed %llu)\n",
              fenced ? "fenced" : "no fence", (long long)recycler.recycled(), seconds, (long long)stale,
              (unsigned long long)seed);
  std::fflush(stdout);
  return fenced ? (stale == 0 ? 0 : 1) : (stale > 0 ? 0 : 1);
}

int main_of(int argc, char** argv) {
  int64_t recycles = 1'000'000'000;
  uint64_t seed = 1;
  bool quick = false, no_fence = false;
  CLI::App app("Recycles pages under another process's reads. 0 stale reads, or the exit code is 1.",
               "stale_read_bench");
  app.add_flag("--quick", quick, "a million pages, with and without the fence");
  app.add_flag("--no-fence", no_fence,
               "pages are free when they are given back: within a million a stale read must come");
  app.add_option("--pages", recycles, "pages to recycle")->check(command_line::at_least(1024));
  app.add_option("--seed", seed, "of the reader's waits");
  CLI11_PARSE(app, argc, argv);
  return run_guarded("stale_read_bench", [&](const std::string&) {
    if (quick) return run(1'000'000, true, seed) + run(1'000'000, false, seed);
    return no_fence ? run(1'000'000, false, seed) : run(recycles, true, seed);
  });
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) { return weft::bench::main_of(argc, argv); }
