// Scattered pages to and from the host pool, beside one large memcpy of as many bytes in the same run.
//
// Pages of one 64-token part of a model's cache, every page of a pool in random order to a random page of the
// host pool (spill) and back layer by layer (load), by the worker's own mover; pools are shared memory as
// weftd makes it, touched before, far larger than the caches. The three take turns; each spill and load moves
// all pages once. Shown are medians in GB/s, each byte counted once, and the share of the memcpy; with
// several threads each moves a pool of its own, as ranks do. A byte that does not arrive fails the run.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kv/shared_memory.h"
#include "proto/vocab/random.h"
#include "tests/bench/ceilings.h"
#include "worker/page_mover.h"
#include "worker/thread_pool.h"

namespace weft::bench {
namespace {

struct Shape {
  const char* name;
  int64_t layers, bytes_per_token;  // of one part
};

// GLM-5.3 and DeepSeek-V3: latent entries; the others: K and V of one KV head.
constexpr Shape kShapes[] = {
    {"GLM-5.3 fp8, 78 layers of 36 KiB", 78, 576},    {"GLM-5.3 fp8_ds_mla, 78 of 41 KiB", 78, 656},
    {"DeepSeek-V3 bf16, 61 of 72 KiB", 61, 1152},     {"index keys fp8, 21 of 8.25 KiB", 21, 132},
    {"Qwen3-8B bf16, a head, 36 of 32 KiB", 36, 512}, {"SmolLM2-135M bf16, a head, 30 of 16 KiB", 30, 256},
};

kv::Mapping memory(size_t bytes) {
  kv::Mapping mapping = kv::Mapping::map(kv::create_memory("bench", bytes).value().get(), bytes).value();
  kv::touch_pages(mapping.data(), bytes).value();
  return mapping;
}

// One rank: its pool, its part of the host pool, and its mover.
class Side {
 public:
  Side(const Shape& shape, size_t bytes, uint64_t seed) {
    geometry_.streams[0] = {shape.layers, shape.bytes_per_token, 1};
    const int64_t pages = static_cast<int64_t>(bytes) / geometry_.page_bytes(kv::Stream::kEntries);
    bytes_ = static_cast<size_t>(pages * geometry_.page_bytes(kv::Stream::kEntries));
    own_ = memory(bytes_);
    host_ = memory(bytes_);
    SplitMix64 random(seed);
    auto* words = reinterpret_cast<uint64_t*>(own_.data());
    for (size_t i = 0; i < bytes_ / 8; ++i) words[i] = random.next();
    std::memset(host_.data(), 1, bytes_);
    std::vector<uint32_t> own(static_cast<size_t>(pages)), host(own.size());
    std::iota(own.begin(), own.end(), 0u);
    std::iota(host.begin(), host.end(), 0u);
    for (size_t i = own.size(); i > 1; --i) {
      std::swap(own[i - 1], own[random.below(i)]);
      std::swap(host[i - 1], host[random.below(i)]);
    }
    for (size_t i = 0; i < own.size(); ++i)
      moves_.push_back({kv::Stream::kEntries, PageId{own[i]}, PageId{host[i]}});
    worker::MoverSetup setup;
    setup.pools = {kv::PagePool(own_.data(), geometry_, {pages, 0})};
    setup.host = kv::PagePool(host_.data(), geometry_, {pages, 0});
    setup.keeps_index.assign(static_cast<size_t>(shape.layers), 0);
    mover_ = std::make_unique<worker::PageMover>(setup);
  }
  void start(bool load) {
    const std::vector<worker::HostMove> none;
    mover_->start(load ? moves_ : none, load ? none : moves_, [] { return false; });
  }
  void finish() { mover_->finish(std::chrono::seconds(600)).value(); }
  void copy_large() {
    std::memcpy(host_.data(), own_.data(), bytes_);
    asm volatile("" : : "r"(host_.data()) : "memory");  // somebody may read it
  }
  size_t bytes() const { return bytes_; }

  // Out and back again.
  void check() {
    const std::vector<std::byte> truth(own_.data(), own_.data() + bytes_);
    start(false);
    finish();
    std::memset(own_.data(), 0xff, bytes_);
    start(true);
    finish();
    if (std::memcmp(truth.data(), own_.data(), bytes_) == 0) return;
    std::printf("bytes were lost on the way\n");
    std::exit(1);
  }

 private:
  kv::CacheGeometry geometry_;
  size_t bytes_ = 0;
  kv::Mapping own_, host_;
  std::vector<worker::HostMove> moves_;
  std::unique_ptr<worker::PageMover> mover_;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void measure(const Shape& shape, int threads, size_t bytes, int rounds) {
  std::vector<std::unique_ptr<Side>> sides;
  for (int i = 0; i < threads; ++i) {
    sides.push_back(std::make_unique<Side>(shape, bytes, static_cast<uint64_t>(i) + 1));
    sides.back()->check();
  }
  worker::ThreadPool pool(threads);
  const auto moved = [&](bool load) {
    for (auto& side : sides) side->start(load);
    for (auto& side : sides) side->finish();
  };
  const auto large = [&] {
    pool.run(threads, [&](int64_t i, int) { sides[static_cast<size_t>(i)]->copy_large(); });
  };
  const double work = static_cast<double>(sides[0]->bytes()) * threads * 1e-9;
  std::vector<double> copies, spills, loads;
  for (int round = 0; round < rounds; ++round) {
    const auto rate = [&](const auto& run, std::vector<double>& rates) {
      const double before = wall_seconds();
      run();
      rates.push_back(work / (wall_seconds() - before));
    };
    rate(large, copies);
    rate([&] { moved(false); }, spills);
    rate([&] { moved(true); }, loads);
  }
  const double whole = median(copies), spill = median(spills), load = median(loads);
  std::printf("%-42s %7d %10.2f %10.2f %6.2f %10.2f %6.2f\n", shape.name, threads, whole, spill,
              spill / whole, load, load / whole);
  std::fflush(stdout);
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  const size_t bytes = size_t{quick ? 16u : 512u} << 20;
  std::printf(
      "Pages of 64 tokens between a rank's pool and the host pool, %zu MiB each way and thread, GB/s\n",
      bytes >> 20);
  std::printf("%-42s %7s %10s %10s %6s %10s %6s\n", "a part of", "threads", "memcpy", "spill", "ratio",
              "load", "ratio");
  for (const auto& shape : weft::bench::kShapes) {
    for (const int threads : {1, 2}) weft::bench::measure(shape, threads, bytes, quick ? 1 : 9);
  }
  return 0;
}
