// Matrix products beside what the machine can do, taking turns with it: GEMM GFLOP/s next to the plain FMA
// loop, the bf16 dot loop and, where it is installed, oneDNN's bf16 product of the same shape; GEMV GB/s next
// to a stream read. `--quick` runs tiny sizes, to keep the program alive.
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/features.h"
#include "tests/bench/ceilings.h"
#include "tests/bench/figures.h"
#include "tests/bench/linear_measure.h"
#include "tests/bench/onednn.h"
#include "worker/thread_pool.h"

namespace weft::bench {
namespace {

struct Settings {
  bool quick = false;
  int rounds() const { return quick ? 2 : 7; }
  double seconds() const { return quick ? 0.0 : 0.05; }
  size_t bytes() const { return quick ? size_t{4} << 20 : size_t{256} << 20; }
};

// The contenders' rates, the first `ceilings` of them as what the others are shares of.
void compare(const Settings& settings, const std::vector<Contender>& contenders, size_t ceilings, int threads,
             const char* unit) {
  const auto rates = take_turns(contenders, settings.rounds(), threads, settings.seconds());
  std::vector<double> medians;
  for (size_t i = 0; i < contenders.size(); ++i) {
    const Summary rate = summarize(rates[i]);
    medians.push_back(rate.median);
    std::printf("%-32s %d thread%s %10.2f us %8.2f %-8s (%.2f .. %.2f)", contenders[i].what.c_str(), threads,
                threads == 1 ? " " : "s", contenders[i].work / rate.median * 1e-3, rate.median, unit,
                rate.min, rate.max);
    for (size_t c = 0; i >= ceilings && c < ceilings; ++c) {
      std::printf("  %.2f of %s", rate.median / medians[c], contenders[c].what.c_str());
    }
    std::printf("\n");
  }
  std::fflush(stdout);
}

void compare_gemm(const Settings& settings, const LinearShape& shape, kernels::Parallel& parallel) {
  const int threads = parallel.thread_count();
  std::vector<Contender> contenders = {fma_loop(parallel), bf16_dot_loop(parallel)};
  if (auto rival = onednn_bf16(shape.rows, shape.outputs, shape.k, threads)) contenders.push_back(*rival);
  const size_t ceilings = contenders.size();
  for (const Weights& weights : kWeights) contenders.push_back(gemm(weights, shape, parallel));
  compare(settings, contenders, ceilings, threads, "GFLOP/s");
}

void compare_gemv(const Settings& settings, const LinearShape& shape, kernels::Parallel& parallel) {
  std::vector<Contender> contenders = {stream_read(parallel, settings.bytes())};
  for (const Weights& weights : kWeights) {
    contenders.push_back(gemv(weights, shape, parallel, settings.quick ? 0 : settings.bytes()));
  }
  compare(settings, contenders, 1, parallel.thread_count(), "GB/s");
}

void run(const Settings& settings) {
  std::printf("instruction set %s\n", kernels::instruction_set());
  for (const int threads : {1, 2}) {
    worker::ThreadPool parallel(threads);
    if (settings.quick) {
      compare_gemm(settings, {16, 64, 64}, parallel);
      compare_gemv(settings, {1, 64, 64}, parallel);
      continue;
    }
    for (const LinearShape& shape :
         {LinearShape{512, 4096, 4096}, {512, 192, 192}, {512, 512, 192}, {64, 192, 512}, {7, 192, 192}}) {
      compare_gemm(settings, shape, parallel);
    }
    for (const int64_t rows : {1, 2, 4, 5, 6, 8, 15}) compare_gemv(settings, {rows, 4096, 4096}, parallel);
  }
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::kernels::set_flush_to_zero();
  weft::bench::run({.quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0});
  return 0;
}
