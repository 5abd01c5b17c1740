// Whether bytes are UTF-8 (RFC 3629: no surrogates, no overlong forms, nothing beyond U+10FFFF).
#pragma once

#include <cstddef>
#include <string_view>

namespace weft::client {

bool is_utf8(std::string_view text);
// The largest n <= limit such that no character crosses byte n of a UTF-8 text.
size_t character_boundary(std::string_view text, size_t limit);

}  // namespace weft::client
