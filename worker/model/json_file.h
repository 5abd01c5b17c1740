// Reading small files that other programs wrote: whole, within limits, as text or as JSON.
//
// Limits on size and nesting come before any parsing; a repeated key in an object is an error, because two
// programs would read it differently. No exception leaves these functions. Errors: kNotFound (no such file),
// kIo, kBadCheckpoint with the file's name as field.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

#include "proto/vocab/result.h"

namespace weft::worker {

Result<std::string> read_text_file(const std::string& path, int64_t bytes_max);

// `name` stands in messages for what is parsed.
Result<void> parse_json(std::string_view text, int nesting_max, const std::string& name, nlohmann::json& out);

// The last part of a path.
std::string file_name(const std::string& path);

}  // namespace weft::worker
