// The list of CUDA devices, on whatever machine this runs: consistent in itself, and right about the build
// and the driver, which can be seen without CUDA.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/cuda/devices.h"

namespace weft::kernels::cuda {
namespace {

bool driver_is_installed() {
  void* driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver != nullptr) ::dlclose(driver);
  return driver != nullptr;
}

TEST(CudaDevices, AReasonOrDevices) {
  const DeviceList list = list_devices();
  EXPECT_EQ(list.presence == Presence::kPresent, !list.devices.empty());
  EXPECT_EQ(list.presence == Presence::kPresent, list.reason.empty()) << list.reason;
  EXPECT_EQ(list.presence == Presence::kNotBuilt, WEFT_WITH_CUDA == 0) << list.reason;
  EXPECT_EQ(list.runtime_version >= 12000, WEFT_WITH_CUDA == 1);
  if (WEFT_WITH_CUDA == 1) {
    EXPECT_EQ(list.presence == Presence::kNoDriver, !driver_is_installed()) << list.reason;
  }
}

TEST(CudaDevices, EachIsWhole) {
  const DeviceList list = list_devices();
  if (list.devices.empty()) GTEST_SKIP() << "SKIPPED: no CUDA device here: " << list.reason;
  const int count = static_cast<int>(list.devices.size());
  for (int i = 0; i < count; ++i) {
    const Device& device = list.devices[static_cast<size_t>(i)];
    EXPECT_EQ(device.ordinal, i);
    EXPECT_FALSE(device.name.empty());
    EXPECT_NE(device.pci_address.find(':'), std::string::npos) << device.pci_address;
    EXPECT_GT(device.memory_bytes, 0);
    EXPECT_GT(device.capability_major, 0);
    EXPECT_GT(device.multiprocessors, 0);
    EXPECT_TRUE(std::is_sorted(device.peers.begin(), device.peers.end()));
    for (int peer : device.peers) EXPECT_TRUE(peer >= 0 && peer < count && peer != i) << peer;
  }
}

TEST(CudaDevices, PresenceNamesAreApart) {
  std::vector<std::string> names;
  for (Presence presence : {Presence::kPresent, Presence::kNotBuilt, Presence::kNoDriver,
                            Presence::kDriverTooOld, Presence::kNoDevice, Presence::kFailed}) {
    names.emplace_back(presence_name(presence));
  }
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::unique(names.begin(), names.end()), names.end());
}

}  // namespace
}  // namespace weft::kernels::cuda
