// Who may include whom: the table in docs/architecture.md, proved by reading every #include of ours.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace weft {
namespace {

namespace fs = std::filesystem;

// What a folder's files may include, as prefixes; a folder always sees itself. The first matching rule
// counts.
struct Rule {
  std::string folder;
  std::vector<std::string> allowed;
};

const std::vector<Rule>& rules() {
  static const std::vector<Rule> table = {
      {"proto/vocab/", {}},
      {"proto/", {"proto/vocab/"}},
      {"kv/", {"proto/vocab/"}},
      {"controlplane/",
       {"proto/vocab/", "kv/layout.h", "kv/topology.h", "kv/mechanisms.h", "kv/cost.h", "kv/meter.h",
        "kv/block_hash.h"}},
      {"kernels/", {"proto/vocab/check.h", "proto/vocab/ids.h", "proto/vocab/random.h"}},
      {"worker/", {"kv/", "kernels/", "proto/"}},
      {"daemon/", {"controlplane/", "kv/", "proto/"}},
      {"tools/", {"proto/"}},
  };
  return table;
}

bool starts_with(const std::string& text, const std::string& prefix) { return text.rfind(prefix, 0) == 0; }

const Rule* rule_of(const std::string& file) {
  for (const Rule& rule : rules()) {
    if (starts_with(file, rule.folder)) return &rule;
  }
  return nullptr;
}

bool may_include(const std::string& file, const std::string& included) {
  const Rule& rule = *rule_of(file);
  if (starts_with(included, rule.folder)) return true;
  for (const std::string& prefix : rule.allowed) {
    if (starts_with(included, prefix)) return true;
  }
  return false;
}

std::vector<std::string> quoted_includes(const fs::path& path) {
  std::vector<std::string> out;
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    const size_t hash = line.find_first_not_of(" \t");
    if (hash == std::string::npos || line.compare(hash, 8, "#include") != 0) continue;
    const size_t open = line.find('"');
    const size_t close = line.find('"', open + 1);
    if (open != std::string::npos && close != std::string::npos)
      out.push_back(line.substr(open + 1, close - open - 1));
  }
  return out;
}

TEST(IncludeRules, TheTableItself) {
  EXPECT_TRUE(may_include("daemon/engine.cc", "controlplane/plan.h"));
  EXPECT_TRUE(may_include("worker/model/head.cc", "worker/model/head.h"));
  EXPECT_FALSE(may_include("worker/main.cc", "daemon/engine.h"));
  EXPECT_FALSE(may_include("daemon/main.cc", "worker/step_runner.h"));
  EXPECT_FALSE(may_include("daemon/main.cc", "kernels/gemm.h"));
  EXPECT_FALSE(may_include("daemon/list_devices.cc", "kernels/cuda/devices.h"));
  EXPECT_FALSE(may_include("kernels/cuda/rms_norm.cu", "kv/layout.h"));
  EXPECT_FALSE(may_include("controlplane/plan.cc", "kv/page_pool.h"));
  EXPECT_FALSE(may_include("proto/vocab/result.h", "proto/client.pb.h"));
  EXPECT_FALSE(may_include("tools/ctl/run.cc", "kv/layout.h"));
}

TEST(IncludeRules, EveryFileKeepsThem) {
  const fs::path root = WEFT_SOURCE_DIR;
  std::map<std::string, int> files;
  for (const Rule& rule : rules()) {
    for (const auto& entry : fs::recursive_directory_iterator(root / rule.folder)) {
      const std::string extension = entry.path().extension();
      if (extension != ".h" && extension != ".cc" && extension != ".cu") continue;
      const std::string file = fs::relative(entry.path(), root);
      if (rule_of(file) != &rule) continue;
      ++files[rule.folder];
      for (const std::string& included : quoted_includes(entry.path())) {
        EXPECT_NE(included.front(), '.') << file << ": includes are written from the root";
        if (rule_of(included) == nullptr) continue;  // a library's
        EXPECT_TRUE(may_include(file, included)) << file << " includes " << included;
      }
    }
  }
  for (const Rule& rule : rules()) EXPECT_GT(files[rule.folder], 0) << rule.folder << " was not read";
}

}  // namespace
}  // namespace weft
