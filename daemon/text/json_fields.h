// Typed reads of tokenizer.json, with errors that name the part: internal to daemon/text.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "proto/vocab/result.h"

namespace weft::daemon {

inline Error bad_part(const std::string& part, const std::string& what) {
  return error(ErrorCode::kBadCheckpoint, what, "tokenizer.json: " + part);
}
inline Error unsupported_part(const std::string& what, const std::string& name) {
  return error(ErrorCode::kUnsupported, what + " " + name + " is not served", "tokenizer.json: " + name);
}

inline Result<std::string> string_field(const nlohmann::json& object, const char* name,
                                        const std::string& part) {
  if (!object.is_object()) return bad_part(part, "must be an object");
  const auto at = object.find(name);
  if (at == object.end() || !at->is_string()) return bad_part(part, std::string(name) + " must be a string");
  return at->get<std::string>();
}

// Absent or null: the default.
inline Result<bool> bool_field(const nlohmann::json& object, const char* name, bool absent,
                               const std::string& part) {
  if (!object.is_object()) return bad_part(part, "must be an object");
  const auto at = object.find(name);
  if (at == object.end() || at->is_null()) return absent;
  if (!at->is_boolean()) return bad_part(part, std::string(name) + " must be true or false");
  return at->get<bool>();
}

inline Result<const nlohmann::json*> array_field(const nlohmann::json& object, const char* name,
                                                 const std::string& part) {
  if (!object.is_object()) return bad_part(part, "must be an object");
  const auto at = object.find(name);
  if (at == object.end() || !at->is_array()) return bad_part(part, std::string(name) + " must be a list");
  return &*at;
}

// Token ids size tables: a file that names token 2^31 must not allocate them.
inline constexpr int64_t kTokenIdLimit = int64_t{1} << 22;
inline Result<uint32_t> token_id_value(const nlohmann::json& value, const std::string& part) {
  if (!value.is_number_integer() || value.get<int64_t>() < 0 || value.get<int64_t>() >= kTokenIdLimit) {
    return bad_part(part, "a token id must be a whole number below 2^22");
  }
  return static_cast<uint32_t>(value.get<int64_t>());
}

}  // namespace weft::daemon
