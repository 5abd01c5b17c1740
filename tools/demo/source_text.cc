#include "tools/demo/source_text.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "proto/utf8.h"
#include "proto/vocab/random.h"

namespace weft::demo {
namespace {

namespace fs = std::filesystem;

std::string file_bytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string without_zeros(std::string text) {
  text.erase(std::remove(text.begin(), text.end(), '\0'), text.end());
  return text;
}

Source folder_text(const fs::path& folder) {
  std::vector<fs::path> paths;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (entry.is_regular_file(ignored)) paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::set<std::string> seen;
  Source out;
  for (const fs::path& path : paths) {
    std::string text = file_bytes(path);
    if (!is_utf8(text)) {
      ++out.skipped_files;
      continue;
    }
    text = without_zeros(std::move(text));
    if (text.empty() || !seen.insert(text).second) continue;
    out.text += text + "\n\n";
  }
  return out;
}

template <size_t kCount>
const char* pick(SplitMix64& random, const char* const (&words)[kCount]) {
  return words[random.below(kCount)];
}

}  // namespace

Result<Source> read_source(const std::string& path) {
  std::error_code ignored;
  Source source;
  if (fs::is_directory(path, ignored)) {
    source = folder_text(path);
  } else {
    source.text = file_bytes(path);
    const size_t valid = utf8_valid_prefix(source.text);
    if (valid < source.text.size()) {
      return error(ErrorCode::kInvalidArgument,
                   path + " is not UTF-8: byte " + std::to_string(valid) + " begins no character", "--file");
    }
    source.text = without_zeros(std::move(source.text));
  }
  if (source.text.empty()) {
    const std::string skipped =
        source.skipped_files == 0 ? "" : " (" + skipped_text(source.skipped_files) + ")";
    return error(ErrorCode::kNotFound, "no text in " + path + skipped, "--file");
  }
  return source;
}

std::string skipped_text(size_t files) {
  return files == 1 ? "1 file skipped: it is not UTF-8"
                    : std::to_string(files) + " files skipped: they are not UTF-8";
}

std::string made_text(uint64_t seed, size_t bytes) {
  static constexpr const char* kWho[] = {"keeper", "pilot",  "surveyor", "weaver", "gardener", "cartographer",
                                         "smith",  "sailor", "baker",    "tutor",  "mason",    "ferryman"};
  static constexpr const char* kDid[] = {"counted",  "painted",   "repaired", "carried",
                                         "measured", "described", "gathered", "polished",
                                         "traded",   "sorted",    "buried",   "drew"};
  static constexpr const char* kHow[] = {"amber", "copper", "narrow", "silent", "northern", "crooked",
                                         "early", "hollow", "bright", "worn",   "second",   "painted"};
  static constexpr const char* kWhat[] = {"lanterns", "bridges", "barrels",  "maps",    "ladders", "orchards",
                                          "bells",    "looms",   "harbours", "kettles", "gates",   "wheels"};
  static constexpr const char* kWhere[] = {"by the river",      "behind the mill", "under the arches",
                                           "at low tide",       "in the valley",   "above the quarry",
                                           "near the old wall", "after the rain"};
  SplitMix64 random(seed);
  std::string out;
  for (uint64_t number = 1; out.size() < bytes; ++number) {
    out += "Entry " + std::to_string(number) + ": the " + pick(random, kWho) + " " + pick(random, kDid) +
           " " + std::to_string(2 + random.below(997)) + " " + pick(random, kHow) + " " +
           pick(random, kWhat) + " " + pick(random, kWhere) + ", and the " + pick(random, kHow) + " " +
           pick(random, kWho) + " " + pick(random, kDid) + " the " + pick(random, kWhat) + ".\n";
  }
  return out;
}

}  // namespace weft::demo
