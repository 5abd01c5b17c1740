#include "worker/model/json_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "proto/vocab/units.h"

namespace weft::worker {

namespace {

// The deepest nesting of brackets outside strings: known before the parser builds anything.
int nesting_of(std::string_view text) {
  int depth = 0;
  int deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      deepest = std::max(deepest, ++depth);
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return deepest;
}

}  // namespace

std::string file_name(const std::string& path) { return std::filesystem::path(path).filename().string(); }

Result<std::string> read_text_file(const std::string& path, int64_t bytes_max) {
  std::error_code failure;
  const auto status = std::filesystem::status(path, failure);
  if (!std::filesystem::exists(status)) {
    return error(ErrorCode::kNotFound, "there is no file " + path, file_name(path));
  }
  if (!std::filesystem::is_regular_file(status)) {
    return error(ErrorCode::kIo, path + " is not a regular file", file_name(path));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file)
    return error(ErrorCode::kIo, "cannot open " + path + ": " + std::strerror(errno), file_name(path));
  const uintmax_t bytes = std::filesystem::file_size(path, failure);
  if (failure)
    return error(ErrorCode::kIo, "cannot read " + path + ": " + failure.message(), file_name(path));
  std::string text(static_cast<size_t>(std::min<uintmax_t>(bytes, static_cast<uintmax_t>(bytes_max) + 1)),
                   '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) return error(ErrorCode::kIo, "cannot read " + path, file_name(path));
  text.resize(static_cast<size_t>(file.gcount()));
  if (static_cast<int64_t>(text.size()) > bytes_max) {
    return error(ErrorCode::kBadCheckpoint, "larger than " + human_bytes(bytes_max), file_name(path));
  }
  return text;
}

Result<void> parse_json(std::string_view text, int nesting_max, const std::string& name,
                        nlohmann::json& out) {
  if (nesting_of(text) > nesting_max) {
    return error(ErrorCode::kBadCheckpoint, "JSON nested deeper than " + std::to_string(nesting_max), name);
  }
  std::vector<std::set<std::string>> open_objects;
  std::string repeated;
  const auto watch = [&](int /*depth*/, nlohmann::json::parse_event_t event, nlohmann::json& value) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) open_objects.emplace_back();
    if (event == Event::object_end && !open_objects.empty()) open_objects.pop_back();
    if (event == Event::key && !open_objects.back().insert(value.get<std::string>()).second &&
        repeated.empty()) {
      repeated = value.get<std::string>();
    }
    return true;
  };
  try {
    out = nlohmann::json::parse(text, watch);
  } catch (const nlohmann::json::exception& failure) {
    return error(ErrorCode::kBadCheckpoint, std::string("not JSON: ") + failure.what(), name);
  }
  if (!repeated.empty()) {
    return error(ErrorCode::kBadCheckpoint, "the key '" + repeated + "' appears twice in one object", name);
  }
  return {};
}

}  // namespace weft::worker
