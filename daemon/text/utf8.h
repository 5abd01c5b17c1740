// UTF-8 at the edges of the tokenizer: checking text that comes in, mending bytes that go out.
//
// Pure functions and one small value type. Offsets and lengths are bytes. Nothing here fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace weft::daemon {

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

void append_utf8(uint32_t code_point, std::string& out);

// Turns the bytes of successive tokens into valid UTF-8: an incomplete code point at the end is held back
// until later bytes complete it; what can never be UTF-8 becomes U+FFFD. The concatenation of all push() and
// the final finish() does not depend on where the bytes were cut. One per stream; not thread-safe.
class StreamDecoder {
 public:
  std::string push(std::string_view bytes);
  std::string finish();

 private:
  std::string held_;  // fewer than 4 bytes
};

}  // namespace weft::daemon
