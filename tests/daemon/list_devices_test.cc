// weftd --list-devices: with the real worker, and with programs that are none.
#include "daemon/list_devices.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace weft::daemon {
namespace {

using testing::HasSubstr;

// An executable shell script, removed at the end.
class Script {
 public:
  explicit Script(const std::string& body) {
    std::string pattern = (std::filesystem::temp_directory_path() / "weft-script-XXXXXX").string();
    CHECK(::mkdtemp(pattern.data()) != nullptr);
    folder_ = pattern;
    std::ofstream(path()) << "#!/bin/sh\n" << body << "\n";
    CHECK_EQ(::chmod(path().c_str(), 0700), 0);
  }
  ~Script() { std::filesystem::remove_all(folder_); }
  Script(const Script&) = delete;
  Script& operator=(const Script&) = delete;
  std::string path() const { return folder_ / "worker"; }

 private:
  std::filesystem::path folder_;
};

Error failure_of(const std::string& body, Duration deadline = std::chrono::seconds(60)) {
  const Script script(body);
  auto listed = list_devices({script.path(), false, deadline});
  CHECK(!listed.has_value(), *listed);
  // Whatever happened, the child is reaped.
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
  return listed.error();
}

TEST(ListDevices, TheRealWorkerAnswers) {
  const auto text = list_devices({WEFT_WORKER_BINARY, true});
  ASSERT_TRUE(text.has_value()) << text.error().text();
  const auto all = nlohmann::json::parse(*text);
  EXPECT_EQ(all["schema"], 1);
  EXPECT_FALSE(all["cpu"]["nodes"].empty());
  const auto table = list_devices({WEFT_WORKER_BINARY, false});
  ASSERT_TRUE(table.has_value()) << table.error().text();
  EXPECT_THAT(*table, HasSubstr("NUMA node"));
  EXPECT_THAT(*table, HasSubstr("CUDA devices"));
}

TEST(ListDevices, AnswersThatAreNone) {
  EXPECT_EQ(failure_of("exit 0").code, ErrorCode::kBadMessage);
  EXPECT_EQ(failure_of("echo '{\"cpu\": 3}'").code, ErrorCode::kBadMessage);
  EXPECT_EQ(failure_of("yes '{}'").code, ErrorCode::kBadMessage);
  const Error failed = failure_of("echo the driver is broken; exit 1");
  EXPECT_EQ(failed.code, ErrorCode::kIo);
  EXPECT_THAT(failed.message, HasSubstr("exit 1: the driver is broken"));
  EXPECT_THAT(failure_of("kill -9 $$").message, HasSubstr("signal 9"));
  EXPECT_EQ(list_devices({"/nowhere/weft-worker"}).error().code, ErrorCode::kIo);
}

TEST(ListDevices, AHungDriverIsGivenUp) {
  EXPECT_EQ(failure_of("exec sleep 1000", std::chrono::milliseconds(50)).code, ErrorCode::kDeadlineExceeded);
}

TEST(DevicesTable, ForPeople) {
  const auto table = devices_table(R"({"schema": 1,
      "cpu": {"nodes": [{"node": 0, "cores": [0, 1, 2, 3, 16, 17], "memory_bytes": 1073741824},
                        {"node": 1, "cores": [5], "memory_bytes": 536870912}]},
      "cuda": {"presence": "present", "reason": "", "runtime_version": 13000, "driver_version": 13000, "devices": [
        {"ordinal": 0, "name": "NVIDIA H200", "pci_address": "0000:1b:00.0", "memory_bytes": 150754820096,
         "compute_capability": "9.0", "multiprocessors": 132, "unified_addressing": true, "shareable_memory": false,
         "peers": [1, 2, 3]}]}})");
  ASSERT_TRUE(table.has_value()) << table.error().text();
  EXPECT_EQ(*table,
            "DEVICE  WHAT         MEMORY     MORE\n"
            "cpu     NUMA node 0  1.0 GiB    cores 0-3,16-17\n"
            "cpu     NUMA node 1  512.0 MiB  cores 5\n"
            "cuda:0  NVIDIA H200  140.4 GiB  compute capability 9.0, 132 multiprocessors, peers 1-3, "
            "no shareable memory\n"
            "Workers compute on CPUs; CUDA devices are listed but not served yet.\n");
}

TEST(DevicesTable, WithoutCuda) {
  const auto table =
      devices_table(R"({"cpu": {"nodes": []}, "cuda": {"reason": "no driver", "devices": []}})");
  ASSERT_TRUE(table.has_value()) << table.error().text();
  EXPECT_THAT(*table, HasSubstr("No CUDA devices: no driver\n"));
}

}  // namespace
}  // namespace weft::daemon
