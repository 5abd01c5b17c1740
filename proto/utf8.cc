#include "proto/utf8.h"

#include <algorithm>

#include "proto/vocab/check.h"

namespace weft {
namespace {

bool is_continuation(char byte) { return (static_cast<unsigned char>(byte) & 0xC0u) == 0x80u; }

// The range that the second byte must lie in (Unicode 15, table 3-7): excludes overlong forms and surrogates.
struct Lead {
  size_t length = 0;
  uint8_t second_min = 0x80, second_max = 0xBF;
};
Lead lead_of(uint8_t byte) {
  if (byte < 0x80) return {1};
  if (byte >= 0xC2 && byte <= 0xDF) return {2};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte >= 0xE1 && byte <= 0xEF) return {3};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  if (byte >= 0xF1 && byte <= 0xF3) return {4};
  return {0};
}

}  // namespace

Utf8Step utf8_step(std::string_view text) {
  CHECK(!text.empty());
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const Lead lead = lead_of(byte(0));
  if (lead.length == 0) return {0, 1, false, false};
  if (lead.length == 1) return {byte(0), 1, true, false};
  uint32_t code_point = byte(0) & (0x7Fu >> lead.length);
  for (size_t i = 1; i < lead.length; ++i) {
    if (i == text.size()) return {0, i, false, true};
    const uint8_t low = i == 1 ? lead.second_min : 0x80, high = i == 1 ? lead.second_max : 0xBF;
    if (byte(i) < low || byte(i) > high) return {0, i, false, false};
    code_point = code_point << 6 | (byte(i) & 0x3Fu);
  }
  return {code_point, lead.length, true, false};
}

size_t utf8_valid_prefix(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    if (static_cast<uint8_t>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    const Utf8Step step = utf8_step(text.substr(at));
    if (!step.valid) return at;
    at += step.length;
  }
  return at;
}

void append_utf8(uint32_t code_point, std::string& out) {
  const auto put = [&](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | code_point >> 6);
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | code_point >> 12);
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | code_point >> 18);
    put(0x80 | (code_point >> 12 & 0x3F));
    put(0x80 | (code_point >> 6 & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

bool is_utf8(std::string_view text) { return utf8_valid_prefix(text) == text.size(); }

size_t character_boundary(std::string_view text, size_t limit) {
  size_t n = std::min(limit, text.size());
  while (n > 0 && n < text.size() && is_continuation(text[n])) --n;
  return n;
}

std::string as_utf8(std::string_view text, size_t limit) {
  std::string out;
  while (!text.empty() && out.size() < limit) {
    const Utf8Step step = utf8_step(text);
    const size_t length = step.valid ? step.length : 1;
    if (out.size() + length > limit) break;
    out += step.valid ? text.substr(0, length) : std::string_view("?");
    text.remove_prefix(length);
  }
  return out;
}

}  // namespace weft
