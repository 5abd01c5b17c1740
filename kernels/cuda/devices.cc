#include "kernels/cuda/devices.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

namespace weft::kernels::cuda {
namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The runtime does not tell these two attributes, and the driver's library is only on machines that have a
// driver, so its two functions are looked up instead of linked.
bool has_shareable_memory(int ordinal) {
  void* driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return false;
  const auto get_device = reinterpret_cast<decltype(&::cuDeviceGet)>(::dlsym(driver, "cuDeviceGet"));
  const auto get_attribute =
      reinterpret_cast<decltype(&::cuDeviceGetAttribute)>(::dlsym(driver, "cuDeviceGetAttribute"));
  CUdevice device = 0;
  int managed = 0, exported = 0;
  const bool known =
      get_device != nullptr && get_attribute != nullptr && get_device(&device, ordinal) == CUDA_SUCCESS &&
      get_attribute(&managed, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device) ==
          CUDA_SUCCESS &&
      get_attribute(&exported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device) ==
          CUDA_SUCCESS;
  ::dlclose(driver);  // the runtime keeps its own hold on it
  return known && managed != 0 && exported != 0;
}

cudaError_t describe(int ordinal, int count, Device& device) {
  cudaDeviceProp properties{};
  if (const cudaError_t code = cudaGetDeviceProperties(&properties, ordinal); code != cudaSuccess)
    return code;
  char pci_address[32] = "";
  if (const cudaError_t code = cudaDeviceGetPCIBusId(pci_address, sizeof pci_address, ordinal);
      code != cudaSuccess) {
    return code;
  }
  device.ordinal = ordinal;
  device.name = properties.name;
  device.pci_address = pci_address;
  device.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  device.capability_major = properties.major;
  device.capability_minor = properties.minor;
  device.multiprocessors = properties.multiProcessorCount;
  device.unified_addressing = properties.unifiedAddressing != 0;
  device.shareable_memory = has_shareable_memory(ordinal);
  for (int other = 0; other < count; ++other) {
    if (other == ordinal) continue;
    int can = 0;
    if (const cudaError_t code = cudaDeviceCanAccessPeer(&can, ordinal, other); code != cudaSuccess)
      return code;
    if (can != 0) device.peers.push_back(other);
  }
  return cudaSuccess;
}

DeviceList absent(DeviceList list, Presence presence, std::string reason) {
  list.presence = presence;
  list.reason = std::move(reason);
  list.devices.clear();
  return list;
}

DeviceList failed(DeviceList list, cudaError_t code) {
  return absent(std::move(list), Presence::kFailed,
                std::string("the CUDA runtime failed: ") + cudaGetErrorString(code));
}

}  // namespace

DeviceList list_devices() {
  DeviceList list;
  if (const cudaError_t code = cudaRuntimeGetVersion(&list.runtime_version); code != cudaSuccess) {
    return failed(std::move(list), code);
  }
  // Succeeds with version 0 where no driver is installed.
  if (cudaDriverGetVersion(&list.driver_version) != cudaSuccess || list.driver_version == 0) {
    return absent(std::move(list), Presence::kNoDriver, "no NVIDIA driver is installed");
  }
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaErrorInsufficientDriver) {
    const std::string reason = "the driver serves CUDA " + version_text(list.driver_version) +
                               ", this program needs " + version_text(list.runtime_version);
    return absent(std::move(list), Presence::kDriverTooOld, reason);
  }
  if (code == cudaErrorNoDevice || (code == cudaSuccess && count == 0)) {
    return absent(std::move(list), Presence::kNoDevice, "a driver is installed, but no device is visible");
  }
  if (code != cudaSuccess) return failed(std::move(list), code);
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    if (const cudaError_t error = describe(ordinal, count, list.devices.emplace_back());
        error != cudaSuccess) {
      return failed(std::move(list), error);
    }
  }
  list.presence = Presence::kPresent;
  return list;
}

}  // namespace weft::kernels::cuda
