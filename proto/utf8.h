// Whether bytes are UTF-8 (RFC 3629: no surrogates, no overlong forms, nothing beyond U+10FFFF).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace weft {

bool is_utf8(std::string_view text);
// The largest n <= limit such that no character crosses byte n of a UTF-8 text.
size_t character_boundary(std::string_view text, size_t limit);
// The text as a wire string can carry it, at most `limit` bytes: each byte that belongs to no character is a
// '?'. (A protobuf string that is not UTF-8 makes its whole message unreadable.)
std::string as_utf8(std::string_view text, size_t limit);

}  // namespace weft
