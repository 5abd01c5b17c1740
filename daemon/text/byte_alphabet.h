// The printable alphabet in which byte-level tokenizers spell bytes.
//
// '!'…'~', '¡'…'¬' and '®'…'ÿ' stand for themselves; the other bytes, ascending, are U+0100 upwards. Pure
// functions.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "proto/utf8.h"

namespace weft::daemon {

constexpr bool spells_itself(uint32_t byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || (byte >= 0xAE && byte <= 0xFF);
}

constexpr std::array<uint16_t, 256> byte_alphabet() {
  std::array<uint16_t, 256> code_points{};
  uint16_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    code_points[byte] = spells_itself(byte) ? static_cast<uint16_t>(byte) : next++;
  }
  return code_points;
}

// The bytes that `spelled` (valid UTF-8) stands for; nothing if a character is not in the alphabet.
inline std::optional<std::string> bytes_of_spelling(std::string_view spelled) {
  static constexpr std::array<uint16_t, 256> alphabet = byte_alphabet();
  static constexpr auto inverse = [] {
    std::array<int16_t, 0x100 + 256> bytes{};
    bytes.fill(-1);
    for (int16_t byte = 0; byte < 256; ++byte) bytes[alphabet[static_cast<size_t>(byte)]] = byte;
    return bytes;
  }();
  std::string out;
  while (!spelled.empty()) {
    const Utf8Step step = utf8_step(spelled);
    if (!step.valid || step.code_point >= inverse.size() || inverse[step.code_point] < 0) return std::nullopt;
    out.push_back(static_cast<char>(inverse[step.code_point]));
    spelled.remove_prefix(step.length);
  }
  return out;
}

}  // namespace weft::daemon
