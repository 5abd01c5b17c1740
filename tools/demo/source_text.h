// Real text to make a long prompt of, and made text for where it runs out.
//
// Text is UTF-8 without zero bytes; a file that is not UTF-8 has its bytes beyond ASCII replaced by '?'.
#pragma once

#include <cstdint>
#include <string>

#include "proto/vocab/result.h"

namespace weft::demo {

inline constexpr char kDefaultFolder[] = "/usr/share/common-licenses";

// A file's text, or that of all files in a folder, by name, each content once (a folder of licences has links
// and copies). kNotFound: no such file, or nothing in it.
Result<std::string> read_source(const std::string& path);

// At least `bytes` of text of which no line occurs twice. Equal seeds give equal text.
std::string made_text(uint64_t seed, size_t bytes);

}  // namespace weft::demo
