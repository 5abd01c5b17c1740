#include "daemon/list_devices.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "daemon/process.h"
#include "proto/vocab/units.h"

namespace weft::daemon {
namespace {

using nlohmann::json;

constexpr size_t kMostOutput = size_t{1} << 20;

// Appends what is there to read. The descriptor is non-blocking.
void drain(int fd, std::string& output) {
  std::array<char, 4096> buffer;
  while (output.size() <= kMostOutput) {
    const ssize_t got = ::read(fd, buffer.data(), buffer.size());
    if (got > 0) output.append(buffer.data(), static_cast<size_t>(got));
    if (got == 0 || (got < 0 && errno != EINTR)) return;
  }
}

// Waits until the process has ended, at most until `until`; collects its output meanwhile, so that a full
// pipe never stops it.
bool wait_for_end(const Process& process, Time until, std::string& output) {
  while (output.size() <= kMostOutput) {
    const Duration left = until - monotonic_now();
    if (left <= Duration::zero()) return false;
    const auto milliseconds = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    std::array<pollfd, 2> watched{{{process.pidfd.get(), POLLIN, 0}, {process.output.get(), POLLIN, 0}}};
    ::poll(watched.data(), watched.size(), static_cast<int>(std::min<int64_t>(milliseconds, 1 << 30)));
    drain(process.output.get(), output);
    if (watched[0].revents != 0) {
      drain(process.output.get(), output);  // written between the last read and the end
      return true;
    }
  }
  return false;
}

Result<std::string> ask_worker(const DeviceQuery& query) {
  TRY(const Process process, spawn(query.worker_binary, {"--list-devices"}));
  std::string output;
  const bool ended = wait_for_end(process, monotonic_now() + query.deadline, output);
  if (!ended) kill_process(process);
  std::optional<ProcessEnd> end;
  while (!(end = reap(process))) {
    pollfd watched{process.pidfd.get(), POLLIN, 0};
    ::poll(&watched, 1, -1);
  }
  if (output.size() > kMostOutput) {
    return error(ErrorCode::kBadMessage,
                 query.worker_binary + " printed over 1 MiB, which is no list of devices");
  }
  if (!ended) {
    return error(ErrorCode::kDeadlineExceeded, query.worker_binary + " did not list the devices within " +
                                                   std::to_string(seconds(query.deadline)) + " s");
  }
  if (end->text != "exit 0") {
    return error(ErrorCode::kIo, query.worker_binary + " --list-devices: " + end->text + ": " + output);
  }
  return output;
}

// {0, 1, 2, 8} as "0-2,8".
std::string number_list(const std::vector<uint32_t>& numbers) {
  std::string text;
  for (size_t i = 0; i < numbers.size();) {
    size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    text += (text.empty() ? "" : ",") + std::to_string(numbers[i]);
    if (last > i) text += "-" + std::to_string(numbers[last]);
    i = last + 1;
  }
  return text;
}

using Row = std::array<std::string, 4>;

Row cpu_row(const json& node) {
  const auto cores = node.at("cores").get<std::vector<uint32_t>>();
  return {"cpu", "NUMA node " + std::to_string(node.at("node").get<int>()),
          human_bytes(node.at("memory_bytes").get<int64_t>()), "cores " + number_list(cores)};
}

Row cuda_row(const json& device) {
  std::string more = "compute capability " + device.at("compute_capability").get<std::string>() + ", " +
                     std::to_string(device.at("multiprocessors").get<int>()) + " multiprocessors";
  const auto peers = device.at("peers").get<std::vector<uint32_t>>();
  if (!peers.empty()) more += ", peers " + number_list(peers);
  if (!device.at("unified_addressing").get<bool>()) more += ", no unified addressing";
  if (!device.at("shareable_memory").get<bool>()) more += ", no shareable memory";
  return {"cuda:" + std::to_string(device.at("ordinal").get<int>()), device.at("name").get<std::string>(),
          human_bytes(device.at("memory_bytes").get<int64_t>()), more};
}

std::string table_of(const std::vector<Row>& rows) {
  std::array<size_t, 4> widths{};
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    for (size_t i = 0; i + 1 < row.size(); ++i)
      text += row[i] + std::string(widths[i] - row[i].size() + 2, ' ');
    text += row.back() + "\n";
  }
  return text;
}

}  // namespace

Result<std::string> devices_table(const std::string& text) {
  try {
    const json all = json::parse(text);
    std::vector<Row> rows = {{"DEVICE", "WHAT", "MEMORY", "MORE"}};
    for (const json& node : all.at("cpu").at("nodes")) rows.push_back(cpu_row(node));
    const json& cuda = all.at("cuda");
    for (const json& device : cuda.at("devices")) rows.push_back(cuda_row(device));
    std::string table = table_of(rows);
    if (cuda.at("devices").empty())
      return table + "No CUDA devices: " + cuda.at("reason").get<std::string>() + "\n";
    return table + "Workers compute on CPUs; CUDA devices are listed but not served yet.\n";
  } catch (const json::exception& failure) {
    return error(ErrorCode::kBadMessage, std::string("the worker's list of devices: ") + failure.what());
  }
}

Result<std::string> list_devices(const DeviceQuery& query) {
  TRY(std::string text, ask_worker(query));
  auto table = devices_table(text);  // also for JSON: only what is right is passed on
  if (!table || !query.json) return table;
  return text;
}

}  // namespace weft::daemon
