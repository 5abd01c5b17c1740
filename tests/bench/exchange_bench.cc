// Exchange points between real processes: latency of an empty one, and an all-gather's bandwidth beside
// memcpy.
//
// Latency is the wall time of one pass() with nothing to copy. In the all-gather every rank copies `bytes`
// into its outbox and the other ranks' outboxes out; its rate counts the bytes that all ranks copy. The
// memcpy beside it is the same number of processes copying as much with no exchange point, so a ratio of 1
// means that waiting is free.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kv/control_arena.h"
#include "proto/vocab/check.h"
#include "tests/bench/ceilings.h"
#include "worker/comm/exchange.h"
#include "worker/spin.h"

namespace weft::bench {
namespace {

// Arenas that all forked ranks inherit, mapped once.
struct World {
  World(int ranks, size_t outbox) : rank_count(ranks), mailbox(worker::mailbox_bytes(outbox)) {
    kv::ControlLimits limits;
    limits.rank_count = ranks;
    limits.block_tokens = 64;
    limits.table_count = limits.table_blocks = limits.max_samples = 1;
    limits.plan_bytes_max = limits.result_bytes_max = 64;
    auto memory = map(kv::control_arena_bytes(limits));
    control = std::make_unique<kv::ControlArena>(kv::ControlArena::format(std::move(memory), limits).value());
    for (int rank = 0; rank < ranks; ++rank) {
      mailboxes.push_back(map(mailbox));
      bases.push_back(mailboxes.back().data());
      if (mailbox > 0) kv::touch_pages(bases.back(), mailbox).value();
    }
  }
  static kv::Mapping map(size_t bytes) {
    const kv::Descriptor memory = kv::create_memory("bench", bytes).value();
    return kv::Mapping::map(memory.get(), bytes).value();
  }
  int rank_count;
  size_t mailbox;
  std::unique_ptr<kv::ControlArena> control;
  std::vector<kv::Mapping> mailboxes;
  std::vector<std::byte*> bases;
};

// Seconds from the first rank's start to the last one's end: one process each, begun together.
double run_ranks(const World& world, const std::function<void(worker::Exchange&, int repeat)>& work,
                 int repeats) {
  const kv::Mapping shared = World::map(4096);
  auto* begin = reinterpret_cast<double*>(shared.data());
  double* end = begin + kMaxRanks;
  std::vector<pid_t> children;
  for (int rank = 0; rank < world.rank_count; ++rank) {
    const pid_t child = ::fork();
    CHECK_GE(child, 0);
    if (child == 0) {
      worker::Exchange exchange(*world.control, world.bases, world.mailbox, rank);
      exchange.begin_epoch(Epoch{1});
      exchange.pass(worker::ExchangePoint::kCopies, 0).value();
      begin[rank] = wall_seconds();
      for (int repeat = 0; repeat < repeats; ++repeat) work(exchange, repeat);
      end[rank] = wall_seconds();
      ::_exit(0);
    }
    children.push_back(child);
  }
  for (pid_t child : children) {
    int status = -1;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
  }
  return *std::max_element(end, end + world.rank_count) - *std::min_element(begin, begin + world.rank_count);
}

void pass(worker::Exchange& exchange) { exchange.pass(worker::ExchangePoint::kEntries, 0).value(); }

void latency(int ranks, int repeats) {
  const World world(ranks, 0);
  const double seconds = run_ranks(
      world, [](worker::Exchange& exchange, int) { pass(exchange); }, repeats);
  std::printf("exchange ranks=%d cores=%d spin_us=%lld latency_us=%.2f\n", ranks, worker::usable_cores(),
              static_cast<long long>(worker::spin_time(ranks).count() / 1000), seconds / repeats * 1e6);
}

void all_gather(int ranks, size_t bytes, int repeats) {
  const World world(ranks, bytes);
  std::vector<std::byte> source(bytes, std::byte{1}), target(bytes * static_cast<size_t>(ranks));
  const auto copies = static_cast<double>(bytes) * ranks * ranks * repeats;
  const double gather = run_ranks(
      world,
      [&](worker::Exchange& exchange, int) {
        std::memcpy(exchange.outbox().data(), source.data(), bytes);
        pass(exchange);
        for (int from = 0; from < ranks; ++from) {
          if (from == exchange.rank()) continue;
          std::memcpy(target.data() + static_cast<size_t>(from) * bytes, exchange.inbox(from).data(), bytes);
        }
      },
      repeats);
  const double plain = run_ranks(
      world,
      [&](worker::Exchange& exchange, int) {
        for (int from = 0; from < ranks; ++from) {
          std::memcpy(target.data() + static_cast<size_t>(from) * bytes,
                      world.bases[static_cast<size_t>(exchange.rank())], bytes);
        }
      },
      repeats);
  std::printf("all_gather ranks=%d bytes=%zu gbs=%.2f memcpy_gbs=%.2f ratio=%.2f\n", ranks, bytes,
              copies / gather * 1e-9, copies / plain * 1e-9, plain / gather);
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::string(argv[1]) == "--quick";
  for (int ranks : {2, 4, 8}) weft::bench::latency(ranks, quick ? 200 : 20'000);
  for (int ranks : {2, 4, 8}) {
    for (size_t bytes : {size_t{4} << 10, size_t{256} << 10, size_t{4} << 20}) {
      const auto volume = static_cast<size_t>(quick ? 1 << 20 : 256 << 20);
      const auto repeats = std::max<size_t>(2, volume / (bytes * static_cast<size_t>(ranks)));
      weft::bench::all_gather(ranks, bytes, static_cast<int>(std::min<size_t>(repeats, 5000)));
    }
  }
}
