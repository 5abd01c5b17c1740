// Exchange points between real processes: an empty one, with what its waits cost in the kernel; an
// all-gather beside memcpy; and the exchange of partials under dcp beside three collectives.
#include <cstdio>
#include <cstring>

#include "proto/vocab/units.h"
#include "tests/bench/dcp_exchange.h"
#include "tests/bench/exchange_measure.h"
#include "tests/bench/figures.h"
#include "worker/spin.h"

namespace weft::bench {
namespace {

double median(const std::vector<double>& values) { return summarize(values).median; }

std::string time_text(const Turns& turns) {
  const Summary time = summarize(turns.microseconds);
  char text[64];
  std::snprintf(text, sizeof text, "%9.2f (%.2f .. %.2f)", time.median, time.min, time.max);
  return text;
}

void empty(int rounds, double seconds) {
  std::printf("Empty exchange point, by processes; per point, of all processes together\n");
  std::printf("%5s %8s  %-30s %7s %15s %15s\n", "ranks", "spin us", "us", "sleeps", "switches: slept",
              "or was put off");
  for (int ranks : {2, 4, 8}) {
    const Turns turns = empty_exchange(ranks, rounds, seconds);
    std::printf("%5d %8.0f  %-30s %7.2f %15.2f %15.2f\n", ranks,
                static_cast<double>(worker::spin_time(ranks).count()) / 1000, time_text(turns).c_str(),
                median(turns.sleeps), median(turns.voluntary), median(turns.involuntary));
    std::fflush(stdout);
  }
}

void gathers(int rounds, double seconds) {
  std::printf("\nAll-gather beside memcpy by as many processes, GB/s copied\n");
  std::printf("%5s %10s %10s %10s %7s\n", "ranks", "each", "gather", "memcpy", "share");
  for (int ranks : {2, 4, 8}) {
    for (size_t bytes : {size_t{4} << 10, size_t{256} << 10, size_t{4} << 20}) {
      const AllGather rates = all_gather(ranks, bytes, rounds, seconds);
      std::printf("%5d %10s %10.2f %10.2f %7.2f\n", ranks, human_bytes(static_cast<int64_t>(bytes)).c_str(),
                  median(rates.gbs), median(rates.memcpy_gbs), median(ratios(rates.gbs, rates.memcpy_gbs)));
      std::fflush(stdout);
    }
  }
}

void dcp(bool quick, int rounds, double seconds) {
  std::printf(
      "\nPartials of a decode step's layer under dcp(ranks), 64 heads of 512 + 64: from what attention wrote "
      "to\n"
      "the values of each rank's own heads. one-shot: packed partials at one exchange point, queries "
      "projected\n"
      "by every rank. gathered: queries of own heads gathered first. three: queries, log-sum-exps gathered,\n"
      "outputs scaled and reduce-scattered. writing: what attention writes, alone (it is part of the "
      "others).\n"
      "x: three / one-shot, by rounds; net: both without the writing. KiB that one rank reads of the "
      "others.\n");
  std::printf("%5s %5s  %-27s %10s %-27s %9s %6s %6s  %26s  %23s\n", "ranks", "batch", "one-shot us",
              "gathered", "    three us", "writing", "x", "net", "KiB one-shot gathrd. three",
              "sleeps one-shot   three");
  for (int ranks : {2, 4, 8}) {
    for (int64_t batch : {1, 8, 64}) {
      if (quick && batch > 8) continue;
      const DcpExchange d = measure_dcp({ranks, batch}, rounds, seconds);
      const auto kib = [](int64_t bytes) { return static_cast<double>(bytes) / 1024; };
      std::printf("%5d %5lld  %-27s %10.2f %-27s %9.2f %6.2f %6.2f  %10.0f %7.0f %7.0f  %15.1f %7.1f\n",
                  ranks, (long long)batch, time_text(d.one_shot).c_str(), median(d.gathered.microseconds),
                  time_text(d.three).c_str(), median(d.writing.microseconds),
                  median(d.over_one_shot(d.three)), median(d.over_one_shot_net(d.three)),
                  kib(d.one_shot_bytes), kib(d.gathered_bytes), kib(d.three_bytes), median(d.one_shot.sleeps),
                  median(d.three.sleeps));
      std::fflush(stdout);
    }
  }
  std::printf(
      "\nExchange points of a decode step, 78 layers of which 21 have an indexer (counted; what dcp adds to "
      "tp)\n");
  std::printf("%5s %5s %22s %22s %28s\n", "ranks", "tp", "dcp, replicated", "dcp, gathered",
              "dcp, replicated, split index");
  for (int ranks : {2, 4, 8}) {
    const StepPoints points = step_points(ranks);
    const auto added = [&](int64_t of) {
      return std::to_string(of) + " (+" + std::to_string(of - points.tp) + ")";
    };
    std::printf("%5d %5lld %22s %22s %28s\n", ranks, (long long)points.tp, added(points.replicated).c_str(),
                added(points.gathered).c_str(), added(points.replicated_split_index).c_str());
  }
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  const int rounds = quick ? 2 : 7;
  const double seconds = quick ? 1e-3 : 0.05;
  weft::bench::empty(rounds, seconds);
  weft::bench::gathers(rounds, seconds);
  weft::bench::dcp(quick, rounds, seconds);
#ifdef WEFT_WITH_OPENMPI
  std::printf("\nBeside Open MPI: exchange_mpi_bench\n");
#else
  std::printf("\nNot beside Open MPI: it was not found when this was configured (docs/benchmarks.md)\n");
#endif
  return 0;
}
