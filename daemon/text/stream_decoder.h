// Tokens to text, piece by piece: bytes that go out become UTF-8.
//
// One small value type; one per stream; not thread-safe. Nothing here fails.
#pragma once

#include <string>
#include <string_view>

namespace weft::daemon {

// Turns the bytes of successive tokens into valid UTF-8: an incomplete code point at the end is held back
// until later bytes complete it; what can never be UTF-8 becomes U+FFFD. The concatenation of all push() and
// the final finish() does not depend on where the bytes were cut.
class StreamDecoder {
 public:
  std::string push(std::string_view bytes);
  std::string finish();

 private:
  std::string held_;  // fewer than 4 bytes
};

}  // namespace weft::daemon
