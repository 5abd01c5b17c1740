// Real text to make a long prompt of, and made text for where it runs out.
//
// Text is UTF-8 without zero bytes. A named file that is not UTF-8 is refused; in a folder it is skipped.
#pragma once

#include <cstdint>
#include <string>

#include "proto/vocab/result.h"

namespace weft::demo {

inline constexpr char kDefaultFolder[] = "/usr/share/common-licenses";

struct Source {
  std::string text;
  size_t skipped_files = 0;  // of a folder: not UTF-8
};

// A file's text, or that of all files in a folder, by name, each content once (a folder of licences has links
// and copies). kNotFound: no such file, or nothing in it. kInvalidArgument: a file that is not UTF-8, and the
// offset where it is not.
Result<Source> read_source(const std::string& path);
// "2 files skipped: they are not UTF-8"
std::string skipped_text(size_t files);

// At least `bytes` of text of which no line occurs twice. Equal seeds give equal text.
std::string made_text(uint64_t seed, size_t bytes);

}  // namespace weft::demo
