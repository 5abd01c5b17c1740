#include "worker/model/checkpoint.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "proto/vocab/units.h"
#include "worker/model/json_file.h"

namespace weft::worker {

namespace {

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr int64_t kIndexBytesMax = 256 * kMiB;
constexpr int kIndexNestingMax = 8;

// Tensor name → shard file, as the index says.
Result<std::map<std::string, std::string>> read_index(const std::string& folder) {
  TRY(const std::string text, read_text_file(folder + "/" + kIndex, kIndexBytesMax));
  nlohmann::json index;
  TRY_VOID(parse_json(text, kIndexNestingMax, kIndex, index));
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object()) {
    return error(ErrorCode::kBadCheckpoint, "must be an object", std::string(kIndex) + ": weight_map");
  }
  std::map<std::string, std::string> out;
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    // A shard is a plain file of the same folder: a name that leads elsewhere is not followed.
    if (!file.is_string() || file_name(file.get<std::string>()) != file.get<std::string>() ||
        !file.get<std::string>().ends_with(".safetensors")) {
      return error(ErrorCode::kBadCheckpoint, "does not name a .safetensors file of this folder",
                   std::string(kIndex) + ": " + tensor);
    }
    out.emplace(tensor, file.get<std::string>());
  }
  return out;
}

bool exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

}  // namespace

Result<Checkpoint> Checkpoint::open(const std::string& folder) {
  Checkpoint out;
  if (exists(folder + "/" + kSingle)) {
    TRY(SafetensorsFile file, SafetensorsFile::open(folder + "/" + kSingle));
    out.files_.push_back(std::move(file));
    for (const auto& [name, tensor] : out.files_.back().tensors())
      out.items_.emplace(name, Item{&tensor, kSingle});
    return out;
  }
  if (!exists(folder + "/" + kIndex)) {
    return error(ErrorCode::kNotFound, folder + " holds neither " + kSingle + " nor " + kIndex, kSingle);
  }
  TRY_VOID(out.open_shards(folder));
  return out;
}

Result<void> Checkpoint::open_shards(const std::string& folder) {
  TRY(const auto shard_of, read_index(folder));
  std::map<std::string, const SafetensorsFile*> open;
  for (const auto& [tensor, shard] : shard_of) {
    const SafetensorsFile*& file = open[shard];
    if (file == nullptr) {
      Result<SafetensorsFile> opened = SafetensorsFile::open(folder + "/" + shard);
      if (!opened.has_value()) {
        if (opened.error().code != ErrorCode::kNotFound) return opened.error();
        return error(ErrorCode::kBadCheckpoint,
                     std::string("listed in ") + kIndex + ", but there is no such file", shard);
      }
      files_.push_back(std::move(opened).value());
      file = &files_.back();
    }
    const Tensor* found = file->find(tensor);
    if (found == nullptr) {
      return error(ErrorCode::kBadCheckpoint, std::string(kIndex) + " says it is in this file, but it is not",
                   shard + ": " + tensor);
    }
    items_.emplace(tensor, Item{found, shard});
  }
  for (const auto& [shard, file] : open) {
    for (const auto& [tensor, view] : file->tensors()) {
      const auto listed = shard_of.find(tensor);
      if (listed == shard_of.end() || listed->second != shard) {
        const std::string where =
            listed == shard_of.end() ? "does not list it" : "says it is in " + listed->second;
        return error(ErrorCode::kBadCheckpoint, std::string(kIndex) + " " + where, shard + ": " + tensor);
      }
    }
  }
  return {};
}

const Checkpoint::Item* Checkpoint::find(std::string_view name) const {
  const auto found = items_.find(name);
  return found == items_.end() ? nullptr : &found->second;
}

}  // namespace weft::worker
