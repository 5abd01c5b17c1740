#include "proto/utf8.h"

#include <algorithm>

namespace weft {
namespace {

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0u) == 0x80u; }

// Length of the character at the front, 0 if it is malformed.
size_t front_length(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const size_t length = first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0;
  if (length == 0 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if (!is_continuation(text[i])) return 0;
  }
  const unsigned second = byte(1);
  const bool overlong = (first == 0xE0 && second < 0xA0) || (first == 0xF0 && second < 0x90);
  const bool surrogate = first == 0xED && second >= 0xA0;
  const bool beyond = first == 0xF4 && second >= 0x90;
  return overlong || surrogate || beyond ? 0 : length;
}

}  // namespace

bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t length = front_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

size_t character_boundary(std::string_view text, size_t limit) {
  size_t n = std::min(limit, text.size());
  while (n > 0 && n < text.size() && is_continuation(text[n])) --n;
  return n;
}

std::string as_utf8(std::string_view text, size_t limit) {
  std::string out;
  while (!text.empty() && out.size() < limit) {
    const size_t length = front_length(text);
    if (out.size() + length > limit) break;
    out += length == 0 ? std::string_view("?") : text.substr(0, length);
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return out;
}

}  // namespace weft
