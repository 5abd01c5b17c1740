// CUDA kernels against the CPU's, bit by bit. The CPU kernels are held to their written order by
// elementwise_test, so equal bits mean the same order on the device.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/cuda/devices.h"
#include "kernels/cuda/rms_norm.h"
#include "kernels/elementwise.h"
#include "kernels/parallel.h"
#include "proto/vocab/random.h"

namespace weft::kernels {
namespace {

void must(cudaError_t code) { ASSERT_EQ(code, cudaSuccess) << cudaGetErrorString(code); }

// A copy of `values` on the device.
class DeviceFloats {
 public:
  explicit DeviceFloats(const std::vector<float>& values) : count_(values.size()) {
    must(cudaMalloc(reinterpret_cast<void**>(&data_), count_ * sizeof(float)));
    must(cudaMemcpy(data_, values.data(), count_ * sizeof(float), cudaMemcpyHostToDevice));
  }
  ~DeviceFloats() { cudaFree(data_); }
  DeviceFloats(const DeviceFloats&) = delete;
  DeviceFloats& operator=(const DeviceFloats&) = delete;
  float* data() { return data_; }
  // Waits for what was queued on the default stream.
  std::vector<float> read() const {
    std::vector<float> values(count_);
    must(cudaMemcpy(values.data(), data_, count_ * sizeof(float), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  size_t count_;
  float* data_ = nullptr;
};

class CudaKernels : public testing::Test {
 protected:
  // Takes the first device that this program has code for (its kernels are built for 9.0 and up).
  void SetUp() override {
    const cuda::DeviceList list = cuda::list_devices();
    if (list.devices.empty()) GTEST_SKIP() << "SKIPPED: no CUDA device here: " << list.reason;
    set_flush_to_zero();
    for (const cuda::Device& device : list.devices) {
      if (device.capability_major < 9) continue;
      must(cudaSetDevice(device.ordinal));
      return;
    }
    GTEST_SKIP() << "SKIPPED: no CUDA device of compute capability 9.0 or more here";
  }
};

struct Norm {
  int64_t rows, width, x_stride, out_stride;
};

// What a row is made of. Squares are flushed to zero, or not, only in the third; inputs in the last.
struct Input {
  const char* name;
  float (*draw)(SplitMix64&);
  float eps;
};
template <int kExponent>
float uniform(SplitMix64& random) {
  return std::ldexp(static_cast<float>(random.uniform() - 0.5), kExponent);
}
// By its bits: arithmetic would flush it here.
float denormal(SplitMix64& random) {
  return std::bit_cast<float>(static_cast<uint32_t>(random.next()) & 0x807fffffu);
}
constexpr Input kInputs[] = {{"around one", uniform<1>, 1e-6f},
                             {"large", uniform<20>, 1e-6f},
                             {"squares near the least normal number", uniform<-61>, 0.0f},
                             {"denormal", denormal, 1e-6f}};

std::vector<float> values(int64_t count, uint64_t seed, float (*draw)(SplitMix64&)) {
  SplitMix64 random(seed);
  std::vector<float> out(static_cast<size_t>(count));
  for (float& v : out) v = draw(random);
  return out;
}

void expect_bits(const std::vector<float>& got, const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::bit_cast<uint32_t>(got[i]), std::bit_cast<uint32_t>(want[i]))
        << "at " << i << ": " << got[i] << " against " << want[i];
  }
}

void compare(const Norm& norm, const Input& input) {
  const auto seed = static_cast<uint64_t>(norm.rows * 10000 + norm.width);
  SCOPED_TRACE(std::string(input.name) + ", rows " + std::to_string(norm.rows) + ", width " +
               std::to_string(norm.width) + ", seed " + std::to_string(seed));
  const std::vector<float> x = values(norm.rows * norm.x_stride, seed, input.draw);
  const std::vector<float> weight = values(norm.width, seed + 1, uniform<1>);
  std::vector<float> want(static_cast<size_t>(norm.rows * norm.out_stride), 9.0f);
  DeviceFloats on_device(x), weight_on_device(weight), out(want);

  rms_norm(x.data(), norm.x_stride, weight.data(), input.eps, norm.rows, norm.width, want.data(),
           norm.out_stride);
  cuda::rms_norm(on_device.data(), norm.x_stride, weight_on_device.data(), input.eps, norm.rows, norm.width,
                 out.data(), norm.out_stride, nullptr);
  expect_bits(out.read(), want);  // what lies between the rows stays 9, too

  std::vector<float> in_place = x;
  rms_norm(x.data(), norm.x_stride, weight.data(), input.eps, norm.rows, norm.width, in_place.data(),
           norm.x_stride);
  cuda::rms_norm(on_device.data(), norm.x_stride, weight_on_device.data(), input.eps, norm.rows, norm.width,
                 on_device.data(), norm.x_stride, nullptr);
  expect_bits(on_device.read(), in_place);
}

TEST_F(CudaKernels, RmsNormHasTheBitsOfTheCpu) {
  for (int64_t width : {1, 2, 7, 15, 16, 17, 31, 32, 40, 191, 512, 1000, 7168}) {
    for (int64_t rows : {1, 2, 7, 8, 9, 33}) {
      for (const Input& input : kInputs) {
        compare({rows, width, width, width}, input);
        compare({rows, width, width + 5, width + 3}, input);
      }
    }
  }
}

TEST_F(CudaKernels, NoRowsIsNoWork) {
  DeviceFloats out({9.0f});
  cuda::rms_norm(out.data(), 1, out.data(), 1e-6f, 0, 1, out.data(), 1, nullptr);
  expect_bits(out.read(), {9.0f});
}

}  // namespace
}  // namespace weft::kernels
