// The CUDA devices of this machine, or why there are none.
//
// A snapshot, made anew by every call; it makes no context on any device, but the first call starts the
// driver in this process (a second or more where there are several devices), so it belongs in a process of
// its own or in a worker. Memory in bytes. Thread-safe. Built without CUDA, list_devices() says so
// (devices_none.cc); nothing here needs CUDA headers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft::kernels::cuda {

struct Device {
  int ordinal = 0;  // the N of cuda:N
  std::string name;
  std::string pci_address;  // "0000:1b:00.0"
  int64_t memory_bytes = 0;
  int capability_major = 0, capability_minor = 0;
  int multiprocessors = 0;
  bool unified_addressing = false;  // one address space with the host
  // Virtual memory management, and allocations that can be exported as descriptors: what an arena on a device
  // needs.
  bool shareable_memory = false;
  std::vector<int> peers;  // ordinals whose memory this device can map
};

enum class Presence : uint8_t { kPresent, kNotBuilt, kNoDriver, kDriverTooOld, kNoDevice, kFailed };
// "present", "not_built", …: stable, for JSON.
const char* presence_name(Presence presence);

struct DeviceList {
  Presence presence = Presence::kNotBuilt;
  std::string reason;           // a sentence for a person; empty exactly if present
  int runtime_version = 0;      // 13000 is 13.0; 0 if not built
  int driver_version = 0;       // the newest CUDA that the driver serves, likewise; 0 without one
  std::vector<Device> devices;  // by ordinal; empty exactly unless present
};

DeviceList list_devices();

}  // namespace weft::kernels::cuda
