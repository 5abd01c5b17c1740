#include "worker/cpu_nodes.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace weft::worker {
namespace {

constexpr uint32_t kMostNumbers = 1 << 16;  // no list of nodes or cores is longer

Result<std::string> read_text(const std::string& path) {
  std::ifstream file(path);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file.is_open() || file.bad()) return error(ErrorCode::kIo, "cannot be read", path);
  return text;
}

// The number of kB in the line that holds `key`: "Node 0 MemTotal:  17262804 kB".
Result<int64_t> read_kilobytes(const std::string& path, const std::string& key) {
  TRY(const std::string text, read_text(path));
  const Error malformed = error(ErrorCode::kIo, "has no line '" + key + " … kB'", path);
  const size_t at = text.find(key);
  if (at == std::string::npos) return malformed;
  const size_t digits = text.find_first_not_of(' ', at + key.size());
  if (digits == std::string::npos) return malformed;
  int64_t kilobytes = 0;
  const auto [end, code] = std::from_chars(text.data() + digits, text.data() + text.size(), kilobytes);
  if (code != std::errc() || std::strncmp(end, " kB", 3) != 0) return malformed;
  return kilobytes * 1024;
}

Result<std::vector<uint32_t>> read_number_list(const std::string& path) {
  TRY(const std::string text, read_text(path));
  auto numbers = parse_number_list(text);
  if (!numbers) return error(ErrorCode::kIo, numbers.error().message, path);
  return numbers;
}

std::vector<CpuNode> one_node(const std::vector<uint32_t>& available) {
  return {{0, available, int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE)}};
}

}  // namespace

Result<std::vector<uint32_t>> parse_number_list(const std::string& text) {
  std::vector<uint32_t> numbers;
  const char* at = text.data();
  const char* end = at + text.find_last_not_of(" \n") + 1;  // npos + 1 is 0: blank
  const Error malformed = error(ErrorCode::kIo, "'" + std::string(at, end) + "' is not a list such as 0-3,8");
  while (at != end) {
    uint32_t first = 0;
    auto read = std::from_chars(at, end, first);
    uint32_t last = first;
    if (read.ec == std::errc() && read.ptr != end && *read.ptr == '-') {
      read = std::from_chars(read.ptr + 1, end, last);
    }
    if (read.ec != std::errc() || last < first || last >= kMostNumbers) return malformed;
    for (uint32_t number = first; number <= last; ++number) numbers.push_back(number);
    at = read.ptr;
    if (at != end && (*at++ != ',' || at == end)) return malformed;
  }
  return numbers;
}

Result<std::vector<uint32_t>> available_cores() {
  std::array<cpu_set_t, 64> sets;  // 65,536 cores, far more than any kernel is built for
  CPU_ZERO_S(sizeof sets, sets.data());
  if (::sched_getaffinity(0, sizeof sets, sets.data()) != 0) {
    return error(ErrorCode::kIo, std::string("cannot read the affinity mask: ") + std::strerror(errno));
  }
  std::vector<uint32_t> cores;
  for (uint32_t core = 0; core < kMostNumbers; ++core) {
    if (CPU_ISSET_S(core, sizeof sets, sets.data())) cores.push_back(core);
  }
  return cores;
}

Result<std::vector<CpuNode>> cpu_nodes(const std::string& folder, const std::vector<uint32_t>& available) {
  if (!std::filesystem::exists(folder + "/online")) return one_node(available);
  TRY(const std::vector<uint32_t> numbers, read_number_list(folder + "/online"));
  std::vector<CpuNode> nodes;
  for (const uint32_t number : numbers) {
    const std::string of_node = folder + "/node" + std::to_string(number);
    CpuNode node;
    node.number = static_cast<int>(number);
    TRY(const std::vector<uint32_t> cores, read_number_list(of_node + "/cpulist"));
    std::set_intersection(cores.begin(), cores.end(), available.begin(), available.end(),
                          std::back_inserter(node.cores));
    if (node.cores.empty()) continue;
    TRY(node.memory_bytes, read_kilobytes(of_node + "/meminfo", "MemTotal:"));
    nodes.push_back(std::move(node));
  }
  return nodes;
}

}  // namespace weft::worker
