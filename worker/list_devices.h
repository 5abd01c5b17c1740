// What `weft-worker --list-devices` prints: one line of JSON, for weftd (which holds no device itself) to
// show.
//
//   {"schema": 1,
//    "cpu": {"nodes": [{"node", "cores": [n, …], "memory_bytes"}]},
//    "cuda": {"presence", "reason", "runtime_version", "driver_version", "devices": [{"ordinal", "name",
//             "pci_address", "memory_bytes", "compute_capability", "multiprocessors", "unified_addressing",
//             "shareable_memory", "peers": [n, …]}]}}
#pragma once

#include <string>
#include <vector>

#include "kernels/cuda/devices.h"
#include "proto/vocab/result.h"
#include "worker/cpu_nodes.h"

namespace weft::worker {

std::string devices_json(const std::vector<CpuNode>& nodes, const kernels::cuda::DeviceList& cuda);

// Of this machine and process, with a newline. kIo from cpu_nodes().
Result<std::string> list_devices();

}  // namespace weft::worker
