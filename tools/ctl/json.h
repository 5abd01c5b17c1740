// Wire messages as JSON, for -o json.
//
// Every field of a message appears, also at its default, under its name in the .proto file; numbers are JSON
// numbers (64-bit ones too), bytes are lower-case hex, an absent sub-message is null. A document is
// {"schema": 1, "<command>": …}; an error is {"schema": 1, "error": {code, message, field, hint, exit}}.
#pragma once

#include <google/protobuf/message.h>

#include <nlohmann/json.hpp>
#include <string>

#include "proto/vocab/result.h"

namespace weft::ctl {

using Json = nlohmann::ordered_json;

inline constexpr int kJsonSchema = 1;

Json to_json(const google::protobuf::Message& message);
Json error_fields(const Error& error);  // code, message, field
Json error_document(const Error& error, const std::string& hint, int exit_code);
Json document(const std::string& command, Json content);
std::string hex(const std::string& bytes);
// One line; bytes that are not UTF-8 are replaced, so this cannot fail.
std::string dump(const Json& json);

}  // namespace weft::ctl
