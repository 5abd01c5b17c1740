#include "tests/bench/kernel_figures.h"

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/bench/ceilings.h"
#include "tests/bench/kernel_measure.h"
#include "tests/bench/linear_measure.h"
#include "tests/bench/onednn.h"
#include "worker/thread_pool.h"

namespace weft::bench {
namespace {

std::string with_threads(const std::string& what, int threads) {
  return what + (threads == 1 ? "" : ", " + std::to_string(threads) + " threads");
}

std::string share_text(double rate, const Ceiling& of) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f of the %s", rate / of.value, of.name.c_str());
  return text;
}

// What takes turns on some threads: ceilings, and kernels that stand beside one of them.
class Rounds {
 public:
  Rounds(const Settings& settings, int threads) : settings_(settings), parallel_(threads) {}
  kernels::Parallel& parallel() { return parallel_; }
  int threads() const { return parallel_.thread_count(); }

  size_t add_ceiling(Contender contender) {
    ceilings_.push_back(std::move(contender));
    return ceilings_.size() - 1;
  }
  // Its share is of `ceiling`; of `also`, too, it is noted.
  void add(Contender contender, size_t ceiling, std::optional<size_t> also = {}) {
    kernels_.push_back(std::move(contender));
    beside_.push_back({ceiling, also});
  }

  void report(const char* unit, Report& report) {
    std::vector<Contender> all = ceilings_;
    all.insert(all.end(), kernels_.begin(), kernels_.end());
    const auto rates = take_turns(all, settings_.rounds, threads(), settings_.quick ? 0.0 : 0.05);
    std::vector<Ceiling> ceilings;
    for (size_t i = 0; i < ceilings_.size(); ++i) {
      ceilings.push_back({ceilings_[i].what, summarize(rates[i]).median});
    }
    for (size_t i = 0; i < kernels_.size(); ++i) {
      const Summary rate = summarize(rates[ceilings_.size() + i]);
      const auto& [ceiling, also] = beside_[i];
      report.add({.group = "kernel",
                  .name = with_threads(kernels_[i].what, threads()),
                  .unit = unit,
                  .summary = rate,
                  .ceiling = ceilings[ceiling],
                  .note = also ? share_text(rate.median, ceilings[*also]) : ""});
    }
  }

 private:
  struct Beside {
    size_t ceiling;
    std::optional<size_t> also;
  };
  const Settings& settings_;
  worker::ThreadPool parallel_;
  std::vector<Contender> ceilings_, kernels_;
  std::vector<Beside> beside_;
};

// The loops and, where there is one, the rival that computes as much: float32 stands beside the FMA loop,
// bf16 and FP8 beside oneDNN, noting the dot loop.
class ComputeRounds {
 public:
  ComputeRounds(const Settings& settings, int threads)
      : rounds_(settings, threads),
        fma_(rounds_.add_ceiling(fma_loop(rounds_.parallel()))),
        dot_(rounds_.add_ceiling(bf16_dot_loop(rounds_.parallel()))) {
    const int64_t width = settings.quick ? 256 : 4096;
    if (auto rival = onednn_bf16(512, width, width, threads))
      onednn_ = rounds_.add_ceiling(std::move(*rival));
  }
  kernels::Parallel& parallel() { return rounds_.parallel(); }
  int threads() const { return rounds_.threads(); }

  void add(Contender contender, DType computed_with) {
    if (computed_with == DType::kF32) return rounds_.add(std::move(contender), fma_);
    onednn_ ? rounds_.add(std::move(contender), *onednn_, dot_)
            : rounds_.add(std::move(contender), dot_, fma_);
  }
  void report(Report& report) { rounds_.report("GFLOP/s", report); }

 private:
  Rounds rounds_;
  size_t fma_, dot_;
  std::optional<size_t> onednn_;
};

void measure_products(const Settings& settings, int threads, Report& report) {
  const int64_t width = settings.quick ? 256 : 4096;
  ComputeRounds gemms(settings, threads);
  for (const Weights& weights : kWeights) {
    gemms.add(gemm(weights, {512, width, width}, gemms.parallel()), weights.x);
  }
  gemms.report(report);
  const size_t bytes = settings.quick ? size_t{4} << 20 : size_t{256} << 20;
  Rounds gemvs(settings, threads);
  const size_t stream = gemvs.add_ceiling(stream_read(gemvs.parallel(), bytes));
  for (const Weights& weights : kWeights) {
    gemvs.add(gemv(weights, {1, width, width}, gemvs.parallel(), bytes), stream);
  }
  gemvs.report("GB/s", report);
}

void measure_caches(const Settings& settings, int threads, Report& report) {
  const int64_t scale = settings.quick ? 16 : 1;
  ComputeRounds rounds(settings, threads);
  for (const CacheDType cache : kAllCacheDTypes) {
    const auto add = [&](Contender contender) { rounds.add(std::move(contender), compute_dtype(cache)); };
    const bool has_index = cache != CacheDType::kFp8DsMla;
    if (cache == CacheDType::kF32 || cache == CacheDType::kBF16) {  // the recall model's shapes
      add(indexer({2, 32, 131072 / scale, 512 / scale, 256}, cache, rounds.parallel()));
      add(attention({16, 144, 16, 256, 32768 / scale}, cache, rounds.parallel()));
    }
    if (threads > 1) continue;
    if (has_index) {
      add(indexer({2, 64, 131072 / scale, 512 / scale, 512}, cache, rounds.parallel()));
      add(indexer({2, 64, 131072 / scale, 1, 512}, cache, rounds.parallel()));
      for (const int64_t rows : {64, 1}) add(grouped({4, 128, 8192 / scale, rows}, cache, rounds.parallel()));
    }
    if (settings.quick) continue;
    if (has_index) add(indexer({32, 128, 32768, 64, 2048}, cache, rounds.parallel()));
    for (const int64_t heads : {64, 8})
      add(attention({heads, 512, 64, 2048, 32768}, cache, rounds.parallel()));
  }
  rounds.report(report);
}

}  // namespace

void measure_kernels(const Settings& settings, Report& report) {
  for (const int threads : {1, 2}) {
    measure_products(settings, threads, report);
    measure_caches(settings, threads, report);
  }
}

}  // namespace weft::bench
