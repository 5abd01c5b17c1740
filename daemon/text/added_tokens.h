// The "added_tokens" of tokenizer.json: strings that become one token before anything else looks at the text.
//
// Leftmost-longest matching with the flags lstrip, rstrip (swallow whitespace beside the match) and
// single_word (no word character beside it). Tokens with normalized = false are matched first, then the
// others in what is left. Immutable after add(); split() is thread-safe and linear in the text for tokens of
// bounded length.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "proto/vocab/result.h"

namespace weft::daemon {

struct AddedToken {
  uint32_t id = 0;
  std::string content;
  bool special = false, normalized = true, lstrip = false, rstrip = false, single_word = false;
};

class AddedTokens {
 public:
  // `token.content` is not empty. The first of equal contents wins.
  void add(AddedToken token);

  struct Segment {
    std::string_view text;
    const AddedToken* token = nullptr;  // null: ordinary text
  };
  // Cuts `text` into ordinary text (not empty) and added tokens, in order.
  std::vector<Segment> split(std::string_view text) const;

  const std::vector<AddedToken>& tokens() const { return tokens_; }

 private:
  struct Trie {
    static constexpr uint32_t kNoToken = UINT32_MAX;
    struct Node {
      uint32_t token = kNoToken;  // index into tokens_
    };
    std::vector<Node> nodes{1};
    std::unordered_map<uint64_t, uint32_t> edges;  // node << 8 | byte → node
    std::array<bool, 256> starts{};

    void add(std::string_view content, uint32_t token);
    // The longest token that starts at text[at]; kNoToken if none.
    uint32_t longest_at(std::string_view text, size_t at) const;
  };

  void split_by(const Trie& trie, std::string_view text, std::vector<Segment>& out) const;

  std::vector<AddedToken> tokens_;
  Trie raw_, normalized_;
};

}  // namespace weft::daemon
