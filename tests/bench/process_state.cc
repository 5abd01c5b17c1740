#include "tests/bench/process_state.h"

#include <xxhash.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace weft::bench {
namespace {

namespace fs = std::filesystem;

std::string folder_of(pid_t process) { return "/proc/" + std::to_string(process); }

// "socket:[12345]" is one socket like another.
std::string kind_of(std::string target) {
  const size_t bracket = target.find(":[");
  return bracket == std::string::npos ? target : target.substr(0, bracket);
}

}  // namespace

Result<ProcessState> process_state(pid_t process) {
  ProcessState state;
  std::ifstream maps(folder_of(process) + "/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:") != std::string::npos) state.maps.push_back(line);
  }
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(folder_of(process) + "/fd", code)) {
    std::error_code closed;
    const fs::path target = fs::read_symlink(entry.path(), closed);
    if (!closed) state.descriptors.push_back(kind_of(target.string()));
  }
  if (code) return error(ErrorCode::kIo, "process " + std::to_string(process) + ": " + code.message());
  std::sort(state.maps.begin(), state.maps.end());
  std::sort(state.descriptors.begin(), state.descriptors.end());
  return state;
}

Result<uint64_t> hash_of_memory(pid_t process, const std::string& name) {
  std::error_code code;
  for (const auto& entry : fs::directory_iterator(folder_of(process) + "/fd", code)) {
    std::error_code closed;
    if (fs::read_symlink(entry.path(), closed).string().find("/memfd:" + name + " ") == std::string::npos)
      continue;
    std::ifstream bytes(entry.path(), std::ios::binary);
    if (!bytes) return error(ErrorCode::kIo, "cannot open " + entry.path().string());
    XXH3_state_t* hash = XXH3_createState();
    XXH3_64bits_reset(hash);
    std::vector<char> buffer(size_t{1} << 20);
    while (bytes.read(buffer.data(), std::ssize(buffer)) || bytes.gcount() > 0)
      XXH3_64bits_update(hash, buffer.data(), static_cast<size_t>(bytes.gcount()));
    const uint64_t digest = XXH3_64bits_digest(hash);
    XXH3_freeState(hash);
    return digest;
  }
  return error(ErrorCode::kNotFound, "process " + std::to_string(process) + " holds no " + name);
}

}  // namespace weft::bench
