#include "tests/bench/exchange_measure.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "kv/control_arena.h"
#include "proto/vocab/check.h"
#include "tests/bench/ceilings.h"
#include "worker/comm/exchange.h"

namespace weft::bench {
namespace {

// Arenas that all forked ranks inherit, mapped once.
struct World {
  World(int ranks, size_t outbox) : rank_count(ranks), mailbox(worker::mailbox_bytes(outbox)) {
    kv::ControlLimits limits;
    limits.rank_count = ranks;
    limits.block_tokens = 64;
    limits.parts = limits.table_count = limits.table_blocks = limits.max_samples = 1;
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
double run_ranks(const World& world, const std::function<void(worker::Exchange&)>& work, int repeats) {
  const kv::Mapping shared = World::map(4096);
  auto* begin = reinterpret_cast<double*>(shared.data());
  double* end = begin + kMaxRanks;
  const pid_t parent = ::getpid();
  std::vector<pid_t> children;
  for (int rank = 0; rank < world.rank_count; ++rank) {
    const pid_t child = ::fork();
    CHECK_GE(child, 0);
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      worker::Exchange exchange(*world.control, world.bases, world.mailbox, rank);
      exchange.begin_epoch(Epoch{1});
      exchange.pass(worker::ExchangePoint::kCopies, 0).value();
      begin[rank] = wall_seconds();
      for (int repeat = 0; repeat < repeats; ++repeat) work(exchange);
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

}  // namespace

double exchange_microseconds(int ranks, int repeats) {
  const World world(ranks, 0);
  return run_ranks(world, pass, repeats) / repeats * 1e6;
}

AllGather all_gather(int ranks, size_t bytes, int repeats) {
  const World world(ranks, bytes);
  std::vector<std::byte> source(bytes, std::byte{1}), target(bytes * static_cast<size_t>(ranks));
  const double gather = run_ranks(
      world,
      [&](worker::Exchange& exchange) {
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
      [&](worker::Exchange& exchange) {
        for (int from = 0; from < ranks; ++from) {
          std::memcpy(target.data() + static_cast<size_t>(from) * bytes,
                      world.bases[static_cast<size_t>(exchange.rank())], bytes);
        }
      },
      repeats);
  const double copied = static_cast<double>(bytes) * ranks * ranks * repeats;
  return {copied / gather * 1e-9, copied / plain * 1e-9};
}

int all_gather_repeats(int ranks, size_t bytes, size_t volume) {
  return static_cast<int>(std::clamp<size_t>(volume / (bytes * static_cast<size_t>(ranks)), 2, 5000));
}

}  // namespace weft::bench
