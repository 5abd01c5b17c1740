#include "tests/bench/rounds.h"

#include <algorithm>

#include "tests/bench/ceilings.h"

namespace weft::bench {
namespace {

double seconds_of(const Contender& contender, int runs, int threads) {
  const auto now = threads == 1 ? thread_seconds : wall_seconds;
  const double before = now();
  for (int i = 0; i < runs; ++i) contender.run();
  return std::max(now() - before, 1e-9);
}

}  // namespace

std::vector<std::vector<double>> take_turns(std::span<const Contender> contenders, int rounds, int threads,
                                            double seconds) {
  std::vector<std::vector<double>> rates(contenders.size());
  std::vector<int> runs(contenders.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      contenders[i].run();
      if (round == 0) {
        const double once = seconds_of(contenders[i], 1, threads);
        runs[i] = static_cast<int>(std::clamp(seconds / once, 1.0, 1e6));
      }
      const double time = seconds_of(contenders[i], runs[i], threads);
      rates[i].push_back(contenders[i].work * runs[i] / time * 1e-9);
    }
  }
  return rates;
}

}  // namespace weft::bench
