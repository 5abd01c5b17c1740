// The indexer and attention beside the plain float32 multiply-add loop, the bf16 dot loop and, where it is
// installed, oneDNN's bf16 matrix product, all taking turns. One line each: shape, time, GFLOP/s (least ..
// most), shares of the loops and of oneDNN. What is counted: kernel_measure.h. `--quick` runs tiny sizes.
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/features.h"
#include "tests/bench/ceilings.h"
#include "tests/bench/figures.h"
#include "tests/bench/kernel_measure.h"
#include "tests/bench/onednn.h"
#include "worker/thread_pool.h"

namespace weft::bench {
namespace {

void add_kernels(std::vector<Contender>& out, CacheDType cache, bool quick, kernels::Parallel& parallel) {
  const int64_t scale = quick ? 16 : 1;
  if (cache != CacheDType::kFp8DsMla) {  // no layout of index keys, nor of keys and values
    for (const IndexShape& shape :
         {IndexShape{2, 64, 32768 / scale, 512 / scale, 512},
          IndexShape{2, 64, 32768 / scale, 512 / scale, 2048},
          IndexShape{2, 64, 131072 / scale, 512 / scale, 512},
          IndexShape{32, 128, 32768 / scale, 64 / scale, 2048}, IndexShape{2, 64, 131072 / scale, 1, 512}}) {
      out.push_back(indexer(shape, cache, parallel));
    }
    for (const int64_t width : {64, 128}) {
      for (const int64_t heads : {3, 4, 8}) {
        for (const int64_t rows : {64, 1}) {
          out.push_back(grouped({heads, width, 8192 / scale, rows}, cache, parallel));
        }
      }
    }
  }
  out.push_back(attention({16, 128, 32, 512, 32768 / scale}, cache, parallel));
  out.push_back(attention({16, 128, 32, 64, 32768 / scale}, cache, parallel));
  if (quick) return;
  for (const int64_t heads : {64, 8})
    out.push_back(attention({heads, 512, 64, 2048, 32768}, cache, parallel));
}

void run(bool quick, int threads) {
  worker::ThreadPool parallel(threads);
  std::vector<Contender> contenders = {fma_loop(parallel), bf16_dot_loop(parallel)};
  const int64_t width = quick ? 256 : 4096;
  if (auto rival = onednn_bf16(512, width, width, threads)) contenders.push_back(*rival);
  const size_t ceilings = contenders.size();
  for (const CacheDType cache : kAllCacheDTypes) add_kernels(contenders, cache, quick, parallel);
  const auto rates = take_turns(contenders, quick ? 2 : 7, threads, quick ? 0.0 : 0.05);
  std::vector<double> medians;
  for (size_t i = 0; i < contenders.size(); ++i) {
    const Summary rate = summarize(rates[i]);
    medians.push_back(rate.median);
    std::printf("%-76s %d thread%s  %9.3f ms  %7.1f GFLOP/s (%.1f .. %.1f)", contenders[i].what.c_str(),
                threads, threads == 1 ? " " : "s", contenders[i].work / rate.median * 1e-6, rate.median,
                rate.min, rate.max);
    for (size_t c = 0; i >= ceilings && c < ceilings; ++c) {
      std::printf("  %.2f of %s", rate.median / medians[c], contenders[c].what.c_str());
    }
    std::printf("\n");
  }
  std::fflush(stdout);
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  weft::kernels::set_flush_to_zero();
  std::printf("instruction set %s\n", weft::kernels::instruction_set());
  for (const int threads : {1, 2}) weft::bench::run(quick, threads);
  return 0;
}
