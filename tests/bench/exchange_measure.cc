#include "tests/bench/exchange_measure.h"

#include <cstring>

namespace weft::bench {
namespace {

void pass(worker::Exchange& exchange) { exchange.pass(worker::ExchangePoint::kEntries, 0).value(); }

}  // namespace

Turns empty_exchange(int ranks, int rounds, double seconds) {
  return measure_turns(ranks, 0, {rounds, seconds, 1}, [](RankArenas&, worker::Exchange& exchange) {
    return std::vector<Variant>{{[&exchange] { pass(exchange); }}};
  })[0];
}

AllGather all_gather(int ranks, size_t bytes, int rounds, double seconds) {
  struct Buffers {
    std::vector<std::byte> source, target;
  };
  const auto turns =
      measure_turns(ranks, bytes, {rounds, seconds, 2}, [&](RankArenas& arenas, worker::Exchange& exchange) {
        const auto buffers = std::make_shared<Buffers>(Buffers{
            std::vector<std::byte>(bytes), std::vector<std::byte>(bytes * static_cast<size_t>(ranks))});
        const auto target = [buffers, bytes](int rank) {
          return buffers->target.data() + static_cast<size_t>(rank) * bytes;
        };
        const auto gather = [=, &exchange] {
          std::memcpy(exchange.outbox().data(), buffers->source.data(), bytes);
          pass(exchange);
          for (int from = 0; from < ranks; ++from) {
            if (from != exchange.rank()) std::memcpy(target(from), exchange.inbox(from).data(), bytes);
          }
        };
        const std::byte* mine = arenas.mailboxes()[static_cast<size_t>(exchange.rank())];
        const auto copy = [=] {
          for (int from = 0; from < ranks; ++from) std::memcpy(target(from), mine, bytes);
        };
        return std::vector<Variant>{{gather}, {copy}};
      });
  const double copied = static_cast<double>(bytes) * ranks * ranks;
  AllGather rates;
  for (const double time : turns[0].microseconds) rates.gbs.push_back(copied / time * 1e-3);
  for (const double time : turns[1].microseconds) rates.memcpy_gbs.push_back(copied / time * 1e-3);
  return rates;
}

}  // namespace weft::bench
