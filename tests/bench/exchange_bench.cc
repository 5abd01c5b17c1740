// Exchange points between real processes: one line each for the latency of an empty one, and for an
// all-gather's bandwidth beside memcpy (exchange_measure.h).
#include <cstdio>
#include <string>

#include "tests/bench/exchange_measure.h"
#include "worker/spin.h"

int main(int argc, char** argv) {
  using namespace weft;
  const bool quick = argc > 1 && std::string(argv[1]) == "--quick";
  for (int ranks : {2, 4, 8}) {
    std::printf("exchange ranks=%d cores=%d spin_us=%lld latency_us=%.2f\n", ranks, worker::usable_cores(),
                static_cast<long long>(worker::spin_time(ranks).count() / 1000),
                bench::exchange_microseconds(ranks, quick ? 200 : 20'000));
  }
  for (int ranks : {2, 4, 8}) {
    for (size_t bytes : {size_t{4} << 10, size_t{256} << 10, size_t{4} << 20}) {
      const int repeats = bench::all_gather_repeats(ranks, bytes, size_t{quick ? 1u : 256u} << 20);
      const bench::AllGather rate = bench::all_gather(ranks, bytes, repeats);
      std::printf("all_gather ranks=%d bytes=%zu gbs=%.2f memcpy_gbs=%.2f ratio=%.2f\n", ranks, bytes,
                  rate.gbs, rate.memcpy_gbs, rate.gbs / rate.memcpy_gbs);
    }
  }
}
