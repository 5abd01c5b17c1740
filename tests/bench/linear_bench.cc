// Matrix products beside what the machine can do, in one run: GEMM GFLOP/s next to the plain FMA (bf16: dot)
// loop, GEMV GB/s next to a stream read. Quantised weights are multiplied with bf16. `--quick` runs tiny
// sizes, to keep the program alive.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/features.h"
#include "kernels/gemm.h"
#include "kernels/quantised.h"
#include "proto/vocab/random.h"
#include "tests/bench/ceilings.h"
#include "tests/support/thread_parallel.h"

namespace {

using weft::DType;
using weft::SplitMix64;
namespace kernels = weft::kernels;

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<void, FreeDeleter>;
Buffer allocate(size_t bytes) { return Buffer(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)); }

struct Settings {
  bool quick = false;
  double seconds() const { return quick ? 0.0 : 1.0; }
};

struct Kind {
  const char* name;
  DType dtype;
  kernels::PanelFormat format = kernels::PanelFormat::kDense;
};
constexpr Kind kKinds[] = {{"f32", DType::kF32},
                           {"bf16", DType::kBF16},
                           {"fp8", DType::kBF16, kernels::PanelFormat::kFp8},
                           {"fp4", DType::kBF16, kernels::PanelFormat::kFp4}};

// Rotates over enough copies of the weights that none is in a cache when its turn comes (cold), or uses one
// (warm).
struct Product {
  Product(const Kind& kind, int64_t rows, int64_t outputs, int64_t k, size_t rotate_bytes)
      : kind(kind), rows(rows), outputs(outputs), k(k) {
    const size_t bytes = packed_bytes();
    const size_t copies = std::max<size_t>(1, rotate_bytes / bytes);
    SplitMix64 random(7);
    std::vector<float> source(static_cast<size_t>(std::max(outputs, rows) * k));
    for (float& v : source) v = static_cast<float>(random.uniform() - 0.5);
    std::vector<uint8_t> codes(static_cast<size_t>(outputs * k));
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random.below(0x70));
    for (size_t c = 0; c < copies; ++c) {
      packed.push_back(allocate(bytes));
      pack(source, codes, packed.back().get());
    }
    x = allocate(static_cast<size_t>(rows * k) * 4);
    kernels::convert(source.data(), rows * k, kind.dtype, x.get());
    y.resize(static_cast<size_t>(rows * outputs));
  }
  size_t packed_bytes() const { return kernels::packed_bytes(kind.dtype, 1, outputs, k, kind.format); }
  void pack(const std::vector<float>& source, const std::vector<uint8_t>& codes, void* out) const {
    switch (kind.format) {
      case kernels::PanelFormat::kDense:
        return kernels::pack_matrix(kind.dtype, 1, outputs, k, {.data = source.data(), .output_stride = k},
                                    out, 0, 1);
      case kernels::PanelFormat::kFp8:
        return kernels::pack_fp8(1, outputs, k, {codes.data(), source.data()}, out);
      case kernels::PanelFormat::kFp4:
        return kernels::pack_fp4(1, outputs, k, {codes.data(), codes.data(), 0.5f}, out);
    }
  }
  double seconds(kernels::Parallel& parallel, double budget) {
    size_t turn = 0;
    return weft::bench::best_seconds(
        budget,
        [&] {
          kernels::Gemm gemm;
          gemm.weights = {kind.dtype, 1, outputs, k, packed[turn++ % packed.size()].get(), kind.format};
          gemm.rows = rows;
          gemm.x = x.get();
          gemm.x_stride = k;
          gemm.y = y.data();
          gemm.y_stride = outputs;
          kernels::gemm(gemm, parallel);
        },
        parallel.thread_count());
  }
  // Printed, so that nobody optimises the work away.
  double checksum() const {
    double sum = 0;
    for (float v : y) sum += v;
    return sum;
  }

  Kind kind;
  int64_t rows, outputs, k;
  std::vector<Buffer> packed;
  Buffer x;
  std::vector<float> y;
};

void bench_gemm(const Settings& settings, int threads, int64_t rows, int64_t outputs, int64_t k,
                double f32_peak, double bf16_peak) {
  weft::test::ThreadParallel many(threads);
  kernels::Parallel& parallel = threads == 1 ? kernels::serial() : static_cast<kernels::Parallel&>(many);
  for (const Kind& kind : kKinds) {
    Product product(kind, rows, outputs, k, 0);
    const double seconds = product.seconds(parallel, settings.seconds());
    const double gflops = 2e-9 * static_cast<double>(rows * outputs * k) / seconds;
    const double peak = kind.dtype == DType::kF32 ? f32_peak : bf16_peak;
    std::printf(
        "gemm %-4s %d thread%s %5lld x %5lld x %5lld  %10.1f us %8.1f GFLOP/s  %5.2f of the %s loop  (%g)\n",
        kind.name, threads, threads == 1 ? " " : "s", static_cast<long long>(rows),
        static_cast<long long>(outputs), static_cast<long long>(k), seconds * 1e6, gflops, gflops / peak,
        kind.dtype == DType::kF32 ? "FMA" : "dot", product.checksum());
  }
}

void bench_gemv(const Settings& settings, int threads, int64_t rows, int64_t outputs, int64_t k,
                double stream) {
  weft::test::ThreadParallel many(threads);
  kernels::Parallel& parallel = threads == 1 ? kernels::serial() : static_cast<kernels::Parallel&>(many);
  for (const Kind& kind : kKinds) {
    Product product(kind, rows, outputs, k, settings.quick ? 0 : size_t{256} << 20);
    const double seconds = product.seconds(parallel, settings.seconds());
    const double gbs = static_cast<double>(product.packed_bytes()) / seconds * 1e-9;
    std::printf(
        "gemv %-4s %d thread%s %5lld x %5lld x %5lld  %10.1f us %8.1f GB/s     %5.2f of a stream read  "
        "(%g)\n",
        kind.name, threads, threads == 1 ? " " : "s", static_cast<long long>(rows),
        static_cast<long long>(outputs), static_cast<long long>(k), seconds * 1e6, gbs, gbs / stream,
        product.checksum());
  }
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  settings.quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  kernels::set_flush_to_zero();
  std::printf("instruction set %s\n", kernels::instruction_set());
  for (int threads : {1, 2}) {
    const double f32_peak = weft::bench::fma_gflops(threads, settings.seconds());
    const double bf16_peak = weft::bench::bf16_dot_gflops(threads, settings.seconds());
    const double stream = weft::bench::stream_read_gbs(
        threads, settings.quick ? size_t{4} << 20 : size_t{256} << 20, settings.seconds());
    std::printf("%d thread%s: FMA loop %.1f GFLOP/s, bf16 dot loop %.1f GFLOP/s, stream read %.1f GB/s\n",
                threads, threads == 1 ? "" : "s", f32_peak, bf16_peak, stream);
    if (settings.quick) {
      bench_gemm(settings, threads, 16, 64, 64, f32_peak, bf16_peak);
      bench_gemv(settings, threads, 1, 64, 64, stream);
      continue;
    }
    bench_gemm(settings, threads, 512, 4096, 4096, f32_peak, bf16_peak);
    bench_gemm(settings, threads, 512, 192, 192, f32_peak, bf16_peak);
    bench_gemm(settings, threads, 512, 512, 192, f32_peak, bf16_peak);
    bench_gemm(settings, threads, 64, 192, 512, f32_peak, bf16_peak);
    bench_gemm(settings, threads, 7, 192, 192, f32_peak, bf16_peak);
    for (int64_t rows : {1, 2, 4, 8, 15}) bench_gemv(settings, threads, rows, 4096, 4096, stream);
  }
  return 0;
}
