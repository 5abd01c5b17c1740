// UTF-8 (RFC 3629: no surrogates, no overlong forms, nothing beyond U+10FFFF): what is, what is not, and
// where.
//
// Pure functions. Offsets and lengths are bytes. Nothing here fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace weft {

// One step through a byte string: `length` bytes are a code point if `valid`, else the longest prefix of one
// (at least one byte) that can stand for a single U+FFFD.
struct Utf8Step {
  uint32_t code_point = 0;
  size_t length = 0;
  bool valid = false;
  bool truncated = false;  // not valid only because the bytes end here
};
// `text` is not empty.
Utf8Step utf8_step(std::string_view text);

// Offset of the first byte that is not UTF-8, or text.size().
size_t utf8_valid_prefix(std::string_view text);
bool is_utf8(std::string_view text);

void append_utf8(uint32_t code_point, std::string& out);

// The largest n <= limit such that no character crosses byte n of a UTF-8 text.
size_t character_boundary(std::string_view text, size_t limit);
// The text as a wire string can carry it, at most `limit` bytes: each byte that belongs to no character is a
// '?'. (A protobuf string that is not UTF-8 makes its whole message unreadable.)
std::string as_utf8(std::string_view text, size_t limit);

}  // namespace weft
