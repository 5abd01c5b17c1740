// The NUMA nodes of this machine on which this process may run: what "cpu" devices are made of.
//
// Read from a folder laid out as /sys/devices/system/node, so that tests bring their own. A node none of
// whose cores is available (another process's share, memory without cores) is left out. Memory is the node's,
// in bytes, as the kernel tells it: a container's memory limit is not applied. A kernel without that folder
// counts as one node.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/vocab/result.h"

namespace weft::worker {

struct CpuNode {
  int number = 0;
  std::vector<uint32_t> cores;  // available ones, ascending
  int64_t memory_bytes = 0;
};

inline constexpr const char* kNodeFolder = "/sys/devices/system/node";

// The cores that the calling thread may run on, ascending.
Result<std::vector<uint32_t>> available_cores();

// By number. kIo names a file that cannot be read or understood.
Result<std::vector<CpuNode>> cpu_nodes(const std::string& folder, const std::vector<uint32_t>& available);

// "0-3,8" as the kernel writes lists of numbers; blank is empty. kIo if it is not one.
Result<std::vector<uint32_t>> parse_number_list(const std::string& text);

}  // namespace weft::worker
