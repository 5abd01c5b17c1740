// Goal: an exchange point delivers exactly what every rank wrote, for any number of ranks, any sizes and any
// timing, between threads and between processes; abort, death and lateness end it as the header says.
// Method: a naive model (bytes as a function of seed, epoch, point and route) beside the real thing; every
// rank maps the memory for itself, as a process does.
#include "worker/comm/exchange.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <barrier>
#include <limits>
#include <memory>
#include <thread>

#include "proto/vocab/random.h"

namespace weft::worker {
namespace {

using namespace std::chrono_literals;

constexpr size_t kOutboxBytes = 6000;
constexpr int64_t kRouteBytesMax = 700;  // kMaxRanks routes fit

kv::ControlLimits limits(int ranks) {
  kv::ControlLimits limits;
  limits.rank_count = ranks;
  limits.block_tokens = 8;
  limits.parts = limits.table_count = limits.table_blocks = limits.max_samples = 1;
  limits.plan_bytes_max = limits.result_bytes_max = 64;
  return limits;
}

// The memory of one world, and one rank's view of it.
struct Memory {
  explicit Memory(int ranks) : rank_count(ranks) {
    control = kv::create_memory("control", kv::control_arena_bytes(limits(ranks))).value();
    for (int rank = 0; rank < ranks; ++rank) {
      mailboxes.push_back(kv::create_memory("mailbox", mailbox_bytes(kOutboxBytes)).value());
    }
  }
  kv::Mapping map_control() const {
    return kv::Mapping::map(control.get(), kv::control_arena_bytes(limits(rank_count))).value();
  }
  int rank_count;
  kv::Descriptor control;
  std::vector<kv::Descriptor> mailboxes;
};

struct View {
  View(const Memory& memory, int rank) : control(kv::ControlArena::open(memory.map_control()).value()) {
    std::vector<std::byte*> bases;
    for (const kv::Descriptor& mailbox : memory.mailboxes) {
      mappings.push_back(kv::Mapping::map(mailbox.get(), mailbox_bytes(kOutboxBytes)).value());
      bases.push_back(mappings.back().data());
    }
    exchange = std::make_unique<Exchange>(control, bases, mailbox_bytes(kOutboxBytes), rank);
  }
  kv::ControlArena control;
  std::vector<kv::Mapping> mappings;
  std::unique_ptr<Exchange> exchange;
};

// ---- the naive model: what `from` sends to `to` at a point

struct Route {
  uint64_t seed;
  Epoch epoch;
  uint32_t point;
  int from, to;
  uint64_t key() const {
    return mix64(seed ^ mix64(uint64_t{number(epoch)} << 40 ^ uint64_t{point} << 8 ^
                              static_cast<uint64_t>(from * kMaxRanks + to)));
  }
  // A third of the routes carry nothing; some ranks send nothing at all.
  size_t bytes() const {
    SplitMix64 random(key());
    if (random.below(3) == 0 || mix64(seed ^ point ^ static_cast<uint64_t>(from)) % 5 == 0) return 0;
    return random.below(kRouteBytesMax);
  }
  std::byte byte(size_t index) const { return std::byte(mix64(key() + index) & 0xff); }
};

// One rank's part of `points` exchange points; false if a byte was wrong or a point was not passed. A wrong
// byte does not stop it: the others would wait in vain.
bool run_points(Exchange& exchange, uint64_t seed, Epoch epoch, uint32_t points) {
  SplitMix64 jitter(seed ^ static_cast<uint64_t>(exchange.rank()) ^ 0x777);
  const int ranks = exchange.topology().count(), place = exchange.topology().place(exchange.rank());
  bool right = true;
  for (uint32_t point = 1; point <= points; ++point) {
    std::span<std::byte> outbox = exchange.outbox();
    size_t at = 0;
    for (int to = 0; to < ranks; ++to) {
      const Route route{seed, epoch, point, place, to};
      for (size_t i = 0; i < route.bytes(); ++i) outbox[at++] = route.byte(i);
    }
    if (jitter.below(16) == 0) std::this_thread::yield();
    if (!exchange.pass(ExchangePoint::kEntries, static_cast<int>(point % 7))) return false;
    if (jitter.below(16) == 0) std::this_thread::yield();
    for (int from = 0; from < ranks; ++from) {
      const std::span<const std::byte> inbox = exchange.inbox(from);
      size_t offset = 0;
      for (int to = 0; to < place; ++to) offset += Route{seed, epoch, point, from, to}.bytes();
      const Route mine{seed, epoch, point, from, place};
      for (size_t i = 0; i < mine.bytes(); ++i) {
        right = right && inbox[offset + i] == mine.byte(i);
      }
    }
    right = right && exchange.passed() == point;
  }
  return right;
}

TEST(Exchange, EqualsTheModelBetweenThreads) {
  for (int ranks = 1; ranks <= kMaxRanks; ++ranks) {
    const uint64_t seed = 1000 + static_cast<uint64_t>(ranks);
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Memory memory(ranks);
    kv::ControlArena::format(memory.map_control(), limits(ranks)).value();
    std::atomic<int> good{0};
    std::barrier all_left(ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([&, rank] {
        View view(memory, rank);
        if (rank % 2 == 1) view.exchange->set_spin(20us);  // spinners and sleepers mixed
        for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
          all_left.arrive_and_wait();  // then they begin in any order
          view.exchange->begin_epoch(Epoch{epoch});
          good += run_points(*view.exchange, seed, Epoch{epoch}, 700) ? 1 : 0;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(good, 3 * ranks);
  }
}

TEST(Exchange, WaitsForTheRanksOfTheEpochAndForNobodyElse) {
  constexpr int kRanks = 4;
  const Memory memory(kRanks);
  kv::ControlArena::format(memory.map_control(), limits(kRanks)).value();
  std::vector<std::unique_ptr<View>> views;
  for (int rank = 0; rank < kRanks; ++rank) views.push_back(std::make_unique<View>(memory, rank));
  uint32_t epoch = 0;
  for (const RankMask ranks : {0b1111u, 0b1010u, 0b0111u, 0b0100u, 0b1101u, 0b1111u}) {
    const kv::Topology topology(ranks);
    ++epoch;
    std::atomic<int> good{0};
    std::vector<std::thread> threads;
    for (int place = 0; place < topology.count(); ++place) {
      threads.emplace_back([&, place] {
        Exchange& exchange = *views[static_cast<size_t>(topology.rank(place))]->exchange;
        exchange.begin_epoch(Epoch{epoch}, topology);
        good += run_points(exchange, 31, Epoch{epoch}, 300) ? 1 : 0;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(good, topology.count()) << topology.text();
  }
}

TEST(Exchange, EqualsTheModelInOneMapping) {
  // All ranks see the memory at the same addresses, so that a thread sanitizer sees every access of it.
  constexpr int kRanks = 4;
  const Memory memory(kRanks);
  kv::ControlArena::format(memory.map_control(), limits(kRanks)).value();
  View view(memory, 0);
  std::vector<std::byte*> bases;
  for (const kv::Mapping& mapping : view.mappings) bases.push_back(mapping.data());
  std::atomic<int> good{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      Exchange exchange(view.control, bases, mailbox_bytes(kOutboxBytes), rank);
      exchange.begin_epoch(Epoch{1});
      good += run_points(exchange, 11, Epoch{1}, 500) ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, kRanks);
}

pid_t fork_rank(const Memory& memory, int rank, uint64_t seed, Epoch epoch, uint32_t points) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  View view(memory, rank);
  view.exchange->begin_epoch(epoch);
  ::_exit(run_points(*view.exchange, seed, epoch, points) ? 0 : 1);
}

TEST(Exchange, EqualsTheModelBetweenProcesses) {
  for (int ranks : {2, 3, 8}) {
    const uint64_t seed = 2000 + static_cast<uint64_t>(ranks);
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Memory memory(ranks);
    kv::ControlArena::format(memory.map_control(), limits(ranks)).value();
    std::vector<pid_t> children;
    for (int rank = 0; rank < ranks; ++rank)
      children.push_back(fork_rank(memory, rank, seed, Epoch{1}, 1500));
    for (pid_t child : children) {
      int status = -1;
      ASSERT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_EQ(status, 0);
    }
  }
}

// ---- abort, death, lateness

TEST(Exchange, AbortEndsEveryWaitAndTheNextEpochStartsAtZero) {
  constexpr int kRanks = 4;
  const Memory memory(kRanks);
  kv::ControlArena daemon = kv::ControlArena::format(memory.map_control(), limits(kRanks)).value();
  std::vector<std::unique_ptr<View>> views;
  for (int rank = 0; rank < kRanks; ++rank) views.push_back(std::make_unique<View>(memory, rank));
  for (uint32_t round = 0; round < 200; ++round) {
    const Epoch epoch{round + 1};
    std::vector<std::thread> threads;
    std::atomic<int> cancelled{0};
    for (int rank = 0; rank + 1 < kRanks; ++rank) {  // the last rank never comes
      threads.emplace_back([&, rank] {
        Exchange& exchange = *views[static_cast<size_t>(rank)]->exchange;
        exchange.set_deadline(1h);
        exchange.begin_epoch(epoch);
        const auto passed = exchange.pass(ExchangePoint::kPartials, 3);
        cancelled += !passed && passed.error().code == ErrorCode::kCancelled ? 1 : 0;
      });
    }
    // In even rounds all are surely inside the wait, in odd rounds anywhere.
    for (int rank = 0; rank + 1 < kRanks && round % 2 == 0; ++rank) {
      while (!holds(daemon.rank_state(rank).waiting_for.load(), kRanks - 1)) std::this_thread::yield();
    }
    daemon.abort_epoch(epoch);
    for (std::thread& thread : threads) thread.join();
    ASSERT_EQ(cancelled, kRanks - 1) << "round " << round;
  }
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (auto& view : views) {
    threads.emplace_back([&] {
      view->exchange->begin_epoch(Epoch{1000});
      good += run_points(*view->exchange, 5, Epoch{1000}, 100) ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, kRanks);
}

TEST(Exchange, FlagsOfAnOlderEpochCountForNothing) {
  const Memory memory(2);
  kv::ControlArena::format(memory.map_control(), limits(2)).value();
  View zero(memory, 0);
  View one(memory, 1);
  for (uint32_t epoch = 1; epoch <= 3; ++epoch) {
    zero.exchange->begin_epoch(Epoch{epoch});
    zero.exchange->set_deadline(5ms);
    // Rank 1 has not begun; its flag says that it passed as many points of the epoch before.
    EXPECT_EQ(zero.exchange->pass(ExchangePoint::kEntries, 0).error().code, ErrorCode::kDeadlineExceeded);
    zero.exchange->set_deadline(1h);
    one.exchange->begin_epoch(Epoch{epoch});
    std::thread other([&] { EXPECT_TRUE(one.exchange->pass(ExchangePoint::kEntries, 0).has_value()); });
    EXPECT_TRUE(zero.exchange->pass(ExchangePoint::kEntries, 0).has_value());
    other.join();
  }
}

TEST(Exchange, NamesTheMissingRanks) {
  constexpr int kRanks = 4;
  const Memory memory(kRanks);
  kv::ControlArena daemon = kv::ControlArena::format(memory.map_control(), limits(kRanks)).value();
  std::vector<std::thread> threads;
  std::array<std::string, kRanks> messages;
  for (int rank : {0, 2}) {
    threads.emplace_back([&, rank] {
      View view(memory, rank);
      view.exchange->set_deadline(20ms);
      view.exchange->begin_epoch(Epoch{1});
      const auto passed = view.exchange->pass(ExchangePoint::kAttentionSums, 5);
      ASSERT_FALSE(passed.has_value());
      EXPECT_EQ(passed.error().code, ErrorCode::kDeadlineExceeded);
      EXPECT_GE(view.exchange->waited(), 20ms);
      messages[static_cast<size_t>(rank)] = passed.error().message;
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Both wait 20 ms from when they came, so each has published before the other gives up or names it too.
  for (int rank : {0, 2}) {
    const std::string& message = messages[static_cast<size_t>(rank)];
    EXPECT_NE(message.find("1, "), std::string::npos) << message;
    EXPECT_NE(message.find(
                  "3 did not arrive at exchange point 'attention_sums' of layer 5 (number 1) within 0.02 s"),
              std::string::npos)
        << message;
  }
}

TEST(Exchange, ProgressIsVisible) {
  const Memory memory(1);
  kv::ControlArena daemon = kv::ControlArena::format(memory.map_control(), limits(1)).value();
  View view(memory, 0);
  view.exchange->begin_epoch(Epoch{1});
  for (uint32_t n = 1; n <= 3; ++n) {
    ASSERT_TRUE(view.exchange->pass(ExchangePoint::kLogits, static_cast<int>(10 + n)).has_value());
    EXPECT_EQ(daemon.rank_state(0).exchange.load(), n);
    EXPECT_EQ(daemon.rank_state(0).layer.load(), 10 + n);
    EXPECT_EQ(daemon.rank_state(0).heartbeat.load(), n);
  }
}

TEST(Exchange, CountsWrapAround) {
  // A million steps of a deep model in one epoch pass more points than the flag's count holds.
  constexpr uint32_t kPoints = (1u << 24) + 1000;
  const Memory memory(1);
  kv::ControlArena::format(memory.map_control(), limits(1)).value();
  View view(memory, 0);
  view.exchange->begin_epoch(Epoch{127});
  for (uint32_t n = 0; n < kPoints; ++n)
    ASSERT_TRUE(view.exchange->pass(ExchangePoint::kCopies, 0).has_value());
  EXPECT_EQ(view.exchange->passed(), kPoints);
}

// A rank runs points without end, epoch after epoch, until the last one, which has 1000: what a worker does,
// without the daemon's socket. `left` counts the ranks that have left an epoch because of its abort.
constexpr uint32_t kLastEpoch = 16;
[[noreturn]] void serve_epochs(const Memory& memory, int rank, uint64_t seed, std::atomic<uint32_t>* begun,
                               std::atomic<uint32_t>* left, uint32_t first_epoch) {
  View view(memory, rank);
  for (uint32_t epoch = first_epoch;; ++epoch) {
    while (begun->load() < epoch) kv::futex_wait(*begun, epoch - 1, 1h);
    view.exchange->begin_epoch(Epoch{epoch});
    const uint32_t points = epoch == kLastEpoch ? 1000 : std::numeric_limits<uint32_t>::max();
    if (run_points(*view.exchange, seed, Epoch{epoch}, points)) ::_exit(0);
    if (!view.control.aborted(Epoch{epoch})) ::_exit(1);
    left->fetch_add(1);
    kv::futex_wake(*left);
  }
}

TEST(Exchange, SurvivesTheDeathOfAnyRankAnywhere) {
  constexpr int kRanks = 3;
  const Memory memory(kRanks);
  kv::ControlArena daemon = kv::ControlArena::format(memory.map_control(), limits(kRanks)).value();
  const kv::Descriptor words = kv::create_memory("words", 4096).value();
  const kv::Mapping shared = kv::Mapping::map(words.get(), 4096).value();
  auto* begun = reinterpret_cast<std::atomic<uint32_t>*>(shared.data());
  auto* left = begun + 1;
  SplitMix64 random(4242);
  std::array<pid_t, kRanks> children{};
  auto start = [&](int rank, uint32_t epoch) {
    children[static_cast<size_t>(rank)] = ::fork();
    if (children[static_cast<size_t>(rank)] == 0) serve_epochs(memory, rank, 99, begun, left, epoch);
  };
  for (int rank = 0; rank < kRanks; ++rank) start(rank, 1);
  uint32_t epoch = 1;
  for (; epoch < kLastEpoch; ++epoch) {
    left->store(0);
    begun->store(epoch);
    kv::futex_wake(*begun);
    // Kill somebody when the victim has passed some number of points of this epoch.
    const auto victim = static_cast<int>(random.below(kRanks));
    const auto when = static_cast<uint32_t>(random.below(3000)) + 1;
    while (daemon.rank_state(victim).exchange.load() < when) std::this_thread::yield();
    ASSERT_EQ(::kill(children[static_cast<size_t>(victim)], SIGKILL), 0);
    daemon.abort_epoch(Epoch{epoch});
    ASSERT_EQ(::waitpid(children[static_cast<size_t>(victim)], nullptr, 0),
              children[static_cast<size_t>(victim)]);
    for (uint32_t seen = left->load(); seen < kRanks - 1; seen = left->load())
      kv::futex_wait(*left, seen, 1h);
    start(victim, epoch + 1);
  }
  begun->store(epoch);
  kv::futex_wake(*begun);
  for (pid_t child : children) {
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
}

}  // namespace
}  // namespace weft::worker
