#include "tests/bench/linear_measure.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels/quantised.h"
#include "proto/vocab/random.h"

namespace weft::bench {
namespace {

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<void, FreeDeleter>;
Buffer allocate(size_t bytes) { return Buffer(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)); }

class Product {
 public:
  Product(const Weights& weights, const LinearShape& shape, size_t bytes_wanted)
      : weights_(weights),
        shape_(shape),
        bytes_(kernels::packed_bytes(weights.x, 1, shape.outputs, shape.k, weights.format)),
        x_(allocate(static_cast<size_t>(shape.rows * shape.k) * 4)),
        y_(static_cast<size_t>(shape.rows * shape.outputs)) {
    SplitMix64 random(7);
    std::vector<float> values(static_cast<size_t>(std::max(shape.outputs, shape.rows) * shape.k));
    for (float& v : values) v = static_cast<float>(random.uniform() - 0.5);
    std::vector<uint8_t> codes(static_cast<size_t>(shape.outputs * shape.k));
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random.below(0x70));
    kernels::convert(values.data(), shape.rows * shape.k, weights.x, x_.get());
    do {
      packed_.push_back(allocate(bytes_));
      pack(values, codes, packed_.back().get());
    } while ((packed_.size() + 1) * bytes_ <= bytes_wanted);
  }

  size_t bytes() const { return bytes_; }

  void run(kernels::Parallel& parallel) {
    kernels::Gemm gemm;
    const void* matrix = packed_[turn_++ % packed_.size()].get();
    gemm.weights = {weights_.x, 1, shape_.outputs, shape_.k, matrix, weights_.format};
    gemm.rows = shape_.rows;
    gemm.x = x_.get();
    gemm.x_stride = shape_.k;
    gemm.y = y_.data();
    gemm.y_stride = shape_.outputs;
    kernels::gemm(gemm, parallel);
  }

 private:
  void pack(const std::vector<float>& values, const std::vector<uint8_t>& codes, void* out) const {
    switch (weights_.format) {
      case kernels::PanelFormat::kDense:
        return kernels::pack_matrix(weights_.x, 1, shape_.outputs, shape_.k,
                                    {.data = values.data(), .output_stride = shape_.k}, out, 0, 1);
      case kernels::PanelFormat::kFp8:
        return kernels::pack_fp8(1, shape_.outputs, shape_.k, {codes.data(), values.data()}, out);
      case kernels::PanelFormat::kFp4:
        return kernels::pack_fp4(1, shape_.outputs, shape_.k, {codes.data(), codes.data(), 0.5f}, out);
    }
  }

  Weights weights_;
  LinearShape shape_;
  size_t bytes_;
  Buffer x_;
  std::vector<Buffer> packed_;
  std::vector<float> y_;
  size_t turn_ = 0;
};

std::string text(const char* what, const Weights& weights, const LinearShape& shape) {
  char out[80];
  std::snprintf(out, sizeof out, "%s %lld x %lld x %lld, %s", what, static_cast<long long>(shape.rows),
                static_cast<long long>(shape.outputs), static_cast<long long>(shape.k), weights.name);
  return out;
}

}  // namespace

Contender gemm(const Weights& weights, const LinearShape& shape, kernels::Parallel& parallel) {
  auto product = std::make_shared<Product>(weights, shape, 0);  // shared: a std::function is copied
  return {text("GEMM", weights, shape), 2.0 * static_cast<double>(shape.rows * shape.outputs * shape.k),
          [product, &parallel] { product->run(parallel); }};
}

Contender gemv(const Weights& weights, const LinearShape& shape, kernels::Parallel& parallel, size_t bytes) {
  auto product = std::make_shared<Product>(weights, shape, bytes);
  return {text("GEMV", weights, shape), static_cast<double>(product->bytes()),
          [product, &parallel] { product->run(parallel); }};
}

}  // namespace weft::bench
