// What --list-devices reads and prints, from folders and lists of the test's own making, and of this machine.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "worker/cpu_nodes.h"
#include "worker/list_devices.h"

namespace weft::worker {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using Json = nlohmann::json;

// A folder laid out as the kernel's, removed at the end.
class NodeFolder {
 public:
  NodeFolder() {
    std::string pattern = (fs::temp_directory_path() / "weft-nodes-XXXXXX").string();
    CHECK(::mkdtemp(pattern.data()) != nullptr);
    root_ = pattern;
  }
  ~NodeFolder() { fs::remove_all(root_); }
  NodeFolder(const NodeFolder&) = delete;
  NodeFolder& operator=(const NodeFolder&) = delete;

  void write(const std::string& name, const std::string& text) const {
    fs::create_directories(fs::path(root_ / name).parent_path());
    std::ofstream(root_ / name) << text;
  }
  void node(int number, const std::string& cores, int64_t kilobytes) const {
    const std::string folder = "node" + std::to_string(number);
    const std::string line = "Node " + std::to_string(number) + " ";
    write(folder + "/cpulist", cores + "\n");
    write(folder + "/meminfo",
          line + "MemTotal:    " + std::to_string(kilobytes) + " kB\n" + line + "MemFree:     1 kB\n");
  }
  std::string path() const { return root_.string(); }

 private:
  fs::path root_;
};

TEST(NumberList, AsTheKernelWritesThem) {
  EXPECT_THAT(*parse_number_list("0-3,8\n"), ElementsAre(0, 1, 2, 3, 8));
  EXPECT_THAT(*parse_number_list("7"), ElementsAre(7));
  EXPECT_THAT(*parse_number_list("\n"), IsEmpty());
  EXPECT_THAT(*parse_number_list(""), IsEmpty());
  for (const char* bad : {"x", "1-", "-1", "3-1", "1,", ",1", "1;2", "1 2", "0-99999999", "4294967296"}) {
    EXPECT_FALSE(parse_number_list(bad).has_value()) << bad;
  }
}

TEST(CpuNodes, OnlyWhereThisProcessMayRun) {
  const NodeFolder folder;
  folder.write("online", "0-2,4\n");
  folder.node(0, "0-3,16-19", 1000);
  folder.node(1, "4-7,20-23", 2000);
  folder.node(2, "", 3000);  // memory without cores
  folder.node(4, "8-9", 4000);
  const auto nodes = cpu_nodes(folder.path(), {2, 3, 8, 16});
  ASSERT_TRUE(nodes.has_value()) << nodes.error().text();
  ASSERT_EQ(nodes->size(), 2u);
  EXPECT_EQ((*nodes)[0].number, 0);
  EXPECT_THAT((*nodes)[0].cores, ElementsAre(2, 3, 16));
  EXPECT_EQ((*nodes)[0].memory_bytes, 1000 * 1024);
  EXPECT_EQ((*nodes)[1].number, 4);
  EXPECT_THAT((*nodes)[1].cores, ElementsAre(8));
  EXPECT_EQ((*nodes)[1].memory_bytes, 4000 * 1024);
}

TEST(CpuNodes, ABrokenFileIsNamed) {
  const NodeFolder folder;
  folder.write("online", "0\n");
  auto missing = cpu_nodes(folder.path(), {0});
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code, ErrorCode::kIo);
  EXPECT_THAT(missing.error().field, HasSubstr("node0/cpulist"));
  folder.node(0, "zero", 1000);
  EXPECT_THAT(cpu_nodes(folder.path(), {0}).error().text(), HasSubstr("node0/cpulist: 'zero'"));
  folder.write("node0/cpulist", "0\n");
  for (const char* meminfo : {"", "Node 0 MemTotal:", "Node 0 MemTotal: many kB", "Node 0 MemTotal: 12 MB"}) {
    folder.write("node0/meminfo", meminfo);
    EXPECT_THAT(cpu_nodes(folder.path(), {0}).error().text(), HasSubstr("node0/meminfo")) << meminfo;
  }
}

TEST(CpuNodes, WithoutTheFolderThereIsOneNode) {
  const auto nodes = cpu_nodes("/nowhere", {1, 5});
  ASSERT_TRUE(nodes.has_value());
  ASSERT_EQ(nodes->size(), 1u);
  EXPECT_THAT((*nodes)[0].cores, ElementsAre(1, 5));
  EXPECT_GT((*nodes)[0].memory_bytes, 0);
}

// The nodes of this machine share out exactly the cores of the affinity mask.
TEST(CpuNodes, OfThisMachine) {
  const auto available = available_cores();
  ASSERT_TRUE(available.has_value()) << available.error().text();
  EXPECT_FALSE(available->empty());
  const auto nodes = cpu_nodes(kNodeFolder, *available);
  ASSERT_TRUE(nodes.has_value()) << nodes.error().text();
  std::vector<uint32_t> cores;
  for (const CpuNode& node : *nodes) {
    cores.insert(cores.end(), node.cores.begin(), node.cores.end());
    EXPECT_GT(node.memory_bytes, 0);
  }
  std::sort(cores.begin(), cores.end());
  EXPECT_EQ(cores, *available);
}

TEST(DevicesJson, SaysEverything) {
  kernels::cuda::DeviceList cuda;
  cuda.presence = kernels::cuda::Presence::kPresent;
  cuda.runtime_version = 13000;
  cuda.driver_version = 13010;
  cuda.devices.resize(2);
  cuda.devices[1] = {1, "Some \xff device", "0000:1b:00.0", int64_t{1} << 37, 9, 0, 132, true, true, {0}};
  const std::string text = devices_json({{3, {4, 5}, 1 << 20}}, cuda);
  EXPECT_EQ(text.find('\n'), std::string::npos);
  const Json all = Json::parse(text);
  EXPECT_EQ(all["schema"], 1);
  EXPECT_EQ(all["cpu"]["nodes"], Json::parse(R"([{"node": 3, "cores": [4, 5], "memory_bytes": 1048576}])"));
  EXPECT_EQ(all["cuda"]["presence"], "present");
  EXPECT_EQ(all["cuda"]["reason"], "");
  EXPECT_EQ(all["cuda"]["driver_version"], 13010);
  Json device = all["cuda"]["devices"][1];
  EXPECT_THAT(device["name"].get<std::string>(), HasSubstr("device"));
  device.erase("name");
  EXPECT_EQ(device, Json::parse(R"({"ordinal": 1, "pci_address": "0000:1b:00.0", "memory_bytes": 137438953472,
      "compute_capability": "9.0", "multiprocessors": 132, "unified_addressing": true, "shareable_memory": true,
      "peers": [0]})"));
}

TEST(DevicesJson, OfThisMachine) {
  const auto text = list_devices();
  ASSERT_TRUE(text.has_value()) << text.error().text();
  const Json all = Json::parse(*text);
  EXPECT_FALSE(all["cpu"]["nodes"].empty());
  EXPECT_EQ(all["cuda"]["devices"].empty(), all["cuda"]["presence"] != "present");
}

}  // namespace
}  // namespace weft::worker
