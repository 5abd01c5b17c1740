#include "daemon/text/added_tokens.h"

#include "daemon/text/regex.h"
#include "proto/utf8.h"
#include "proto/vocab/check.h"

namespace weft::daemon {

namespace {

// Unicode White_Space.
bool is_space(uint32_t c) {
  return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

// A word character (letter, mark, digit, connector) at the start of the text?
bool starts_with_word(std::string_view text) {
  static const Regex word = Regex::compile(R"([\p{L}\p{M}\p{N}\p{Pc}\x{200C}\x{200D}])").value();
  std::vector<TextRange> matches;
  word.find_all(text.substr(0, utf8_step(text).length), matches).value();
  return !matches.empty();
}

// The code point that ends just before `end`, and where it starts. `end` > 0.
size_t previous_start(std::string_view text, size_t end) {
  size_t at = end - 1;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xC0) == 0x80) --at;
  return at;
}
uint32_t code_point_at(std::string_view text, size_t at) { return utf8_step(text.substr(at)).code_point; }

}  // namespace

void AddedTokens::Trie::add(std::string_view content, uint32_t token) {
  starts[static_cast<uint8_t>(content[0])] = true;
  uint32_t node = 0;
  for (const char c : content) {
    const auto [edge, fresh] =
        edges.try_emplace(uint64_t{node} << 8 | static_cast<uint8_t>(c), static_cast<uint32_t>(nodes.size()));
    if (fresh) nodes.emplace_back();
    node = edge->second;
  }
  if (nodes[node].token == kNoToken) nodes[node].token = token;
}

uint32_t AddedTokens::Trie::longest_at(std::string_view text, size_t at) const {
  uint32_t node = 0, best = kNoToken;
  for (; at < text.size(); ++at) {
    const auto edge = edges.find(uint64_t{node} << 8 | static_cast<uint8_t>(text[at]));
    if (edge == edges.end()) break;
    node = edge->second;
    if (nodes[node].token != kNoToken) best = nodes[node].token;
  }
  return best;
}

void AddedTokens::add(AddedToken token) {
  CHECK(!token.content.empty());
  (token.normalized ? normalized_ : raw_).add(token.content, static_cast<uint32_t>(tokens_.size()));
  tokens_.push_back(std::move(token));
}

std::vector<AddedTokens::Segment> AddedTokens::split(std::string_view text) const {
  std::vector<Segment> first, out;
  split_by(raw_, text, first);
  for (const Segment& segment : first) {
    if (segment.token != nullptr) {
      out.push_back(segment);
    } else {
      split_by(normalized_, segment.text, out);
    }
  }
  return out;
}

void AddedTokens::split_by(const Trie& trie, std::string_view text, std::vector<Segment>& out) const {
  size_t done = 0;  // text before it is in `out`
  for (size_t at = 0; at < text.size();) {
    if (!trie.starts[static_cast<uint8_t>(text[at])]) {
      ++at;
      continue;
    }
    const uint32_t index = trie.longest_at(text, at);
    if (index == Trie::kNoToken) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[index];
    size_t begin = at, end = at + token.content.size();
    at = end;
    if (token.single_word && ((begin > 0 && starts_with_word(text.substr(previous_start(text, begin)))) ||
                              (end < text.size() && starts_with_word(text.substr(end))))) {
      continue;
    }
    if (begin < done) continue;  // swallowed by the rstrip of the token before
    if (token.lstrip) {
      while (begin > done && is_space(code_point_at(text, previous_start(text, begin)))) {
        begin = previous_start(text, begin);
      }
    }
    if (token.rstrip) {
      while (end < text.size() && is_space(code_point_at(text, end)))
        end += utf8_step(text.substr(end)).length;
    }
    if (begin > done) out.push_back({text.substr(done, begin - done), nullptr});
    out.push_back({text.substr(begin, end - begin), &token});
    done = end;
  }
  if (done < text.size()) out.push_back({text.substr(done), nullptr});
}

}  // namespace weft::daemon
