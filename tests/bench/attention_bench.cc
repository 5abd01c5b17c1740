// The indexer and attention beside the plain float32 multiply-add loop (bf16: also the bf16 dot loop and,
// where it is installed, oneDNN's bf16 matrix product) measured in the same run. One line each: shape, time,
// GFLOP/s, share of the loop. What is counted: kernel_measure.h.
#include <cstdio>
#include <cstring>

#include "kernels/features.h"
#include "tests/bench/ceilings.h"
#include "tests/bench/kernel_measure.h"
#include "tests/bench/onednn.h"

namespace weft::bench {
namespace {

void run(bool quick) {
  const double seconds = quick ? 0.0 : 1.0;
  std::printf("instruction set %s\n", kernels::instruction_set());
  for (int threads : {1, 2}) {
    const char* plural = threads == 1 ? " " : "s";
    const double ceiling = fma_gflops(threads, quick ? 0.0 : 0.5);
    const double bf16_ceiling = bf16_dot_gflops(threads, quick ? 0.0 : 0.5);
    const double onednn = onednn_bf16_gflops(512, quick ? 256 : 4096, quick ? 256 : 4096, threads, seconds);
    std::printf("%d thread%s: float32 multiply-add loop %.1f GFLOP/s, bf16 dot loop %.1f GFLOP/s", threads,
                plural, ceiling, bf16_ceiling);
    if (onednn > 0) std::printf(", oneDNN bf16 512 x 4096 x 4096 %.1f GFLOP/s", onednn);
    std::printf("\n");
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      const auto print = [&](const KernelTime& time) {
        std::printf("%-58s %-4s %d thread%s  %9.3f ms  %7.1f GFLOP/s  %.2f of the multiply-add loop",
                    time.what.c_str(), dtype_name(dtype), threads, plural, time.seconds * 1e3, time.gflops(),
                    time.gflops() / ceiling);
        if (dtype == DType::kBF16) std::printf(", %.2f of the dot loop", time.gflops() / bf16_ceiling);
        if (dtype == DType::kBF16 && onednn > 0) std::printf(", %.2f of oneDNN", time.gflops() / onednn);
        std::printf("\n");
        std::fflush(stdout);
      };
      const int64_t scale = quick ? 16 : 1;
      for (const IndexShape& shape : {IndexShape{2, 64, 32768 / scale, 512 / scale, 512},
                                      IndexShape{2, 64, 32768 / scale, 512 / scale, 2048},
                                      IndexShape{2, 64, 131072 / scale, 512 / scale, 512},
                                      IndexShape{32, 128, 32768 / scale, 64 / scale, 2048},
                                      IndexShape{2, 64, 131072 / scale, 1, 512}}) {
        print(measure_indexer(shape, dtype, threads, seconds));
      }
      print(measure_attention({16, 128, 32, 512, 32768 / scale}, dtype, threads, seconds));
      print(measure_attention({16, 128, 32, 64, 32768 / scale}, dtype, threads, seconds));
      for (const int64_t width : {64, 128}) {
        for (const int64_t heads : {3, 4, 8}) {
          for (const int64_t rows : {64, 1}) {
            print(measure_grouped({heads, width, 8192 / scale, rows}, dtype, threads, seconds));
          }
        }
      }
      if (!quick) print(measure_attention({64, 512, 64, 2048, 32768}, dtype, threads, seconds));
    }
  }
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::bench::run(argc > 1 && std::strcmp(argv[1], "--quick") == 0);
  return 0;
}
