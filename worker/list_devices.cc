#include "worker/list_devices.h"

#include <nlohmann/json.hpp>

namespace weft::worker {
namespace {

using Json = nlohmann::ordered_json;

Json json_of(const kernels::cuda::Device& device) {
  return {{"ordinal", device.ordinal},
          {"name", device.name},
          {"pci_address", device.pci_address},
          {"memory_bytes", device.memory_bytes},
          {"compute_capability",
           std::to_string(device.capability_major) + "." + std::to_string(device.capability_minor)},
          {"multiprocessors", device.multiprocessors},
          {"unified_addressing", device.unified_addressing},
          {"shareable_memory", device.shareable_memory},
          {"peers", device.peers}};
}

}  // namespace

std::string devices_json(const std::vector<CpuNode>& nodes, const kernels::cuda::DeviceList& cuda) {
  Json cpu = Json::array();
  for (const CpuNode& node : nodes) {
    cpu.push_back({{"node", node.number}, {"cores", node.cores}, {"memory_bytes", node.memory_bytes}});
  }
  Json devices = Json::array();
  for (const kernels::cuda::Device& device : cuda.devices) devices.push_back(json_of(device));
  const Json all = {{"schema", 1},
                    {"cpu", {{"nodes", std::move(cpu)}}},
                    {"cuda",
                     {{"presence", kernels::cuda::presence_name(cuda.presence)},
                      {"reason", cuda.reason},
                      {"runtime_version", cuda.runtime_version},
                      {"driver_version", cuda.driver_version},
                      {"devices", std::move(devices)}}}};
  // A device's name that is not UTF-8 must not throw.
  return all.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Result<std::string> list_devices() {
  TRY(const std::vector<uint32_t> available, available_cores());
  TRY(const std::vector<CpuNode> nodes, cpu_nodes(kNodeFolder, available));
  return devices_json(nodes, kernels::cuda::list_devices()) + "\n";
}

}  // namespace weft::worker
