#include "tests/bench/machine.h"

#include <sched.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>

#include "kernels/features.h"
#include "worker/spin.h"

namespace weft::bench {
namespace {

// The cores of one physical core as the kernel lists them, or nothing.
std::string siblings(int core) {
  std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(core) + "/topology/thread_siblings_list");
  std::string line;
  std::getline(file, line);
  return line;
}

bool same_core(int a, int b) { return !siblings(a).empty() && siblings(a) == siblings(b); }

std::string first_line_with(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (line.rfind(key, 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

}  // namespace

Result<CorePair> choose_cores(int first) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return CorePair{};
  const auto usable = [&](int core) { return core >= 0 && core < CPU_SETSIZE && CPU_ISSET(core, &allowed); };
  if (first >= 0) {
    if (usable(first) && usable(first + 1)) return CorePair{first, first + 1};
    return error(
        ErrorCode::kInvalidArgument,
        "cores " + std::to_string(first) + " and " + std::to_string(first + 1) + " cannot both be used",
        "--first-core");
  }
  CorePair found{-1, -1};
  for (int core = 0; core + 1 < CPU_SETSIZE; ++core) {
    if (!usable(core) || !usable(core + 1)) continue;
    if (!same_core(core, core + 1)) return CorePair{core, core + 1};
    if (found.first < 0) found = {core, core + 1};
  }
  if (found.first >= 0) return found;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (usable(core)) return CorePair{core, core};
  }
  return CorePair{};
}

nlohmann::ordered_json describe_run(const Settings& settings, const CorePair& cores) {
  double load = 0;
  ::getloadavg(&load, 1);
  char load_text[32], date[32];
  std::snprintf(load_text, sizeof load_text, "%.2f", load);
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%F %T UTC", std::gmtime(&now));
  std::string pinned = std::to_string(cores.first) + ", " + std::to_string(cores.second);
  if (!cores.distinct()) {
    pinned += " (one core only: ratios mean nothing)";
  } else if (same_core(cores.first, cores.second)) {
    pinned += " (two threads of one core)";
  }
  return {{"date", date},
          {"build", WEFT_BUILD_TYPE},
          {"processor", first_line_with("/proc/cpuinfo", "model name")},
          {"set", kernels::instruction_set()},
          {"cores", worker::usable_cores()},
          {"pinned to", pinned},
          {"load", std::string(load_text) + " when the run began; anything above 0 is somebody else"},
          {"rounds", settings.rounds},
          {"quick", settings.quick}};
}

}  // namespace weft::bench
