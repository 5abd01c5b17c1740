// The "pre_tokenizer" part of tokenizer.json: cuts text into the pieces that BPE works on.
//
// Read here: ByteLevel (with and without its regex), Split (regex or literal, all five behaviors, invert),
// Digits and Sequence of these, ByteLevel last. What is not read is kUnsupported by name. Immutable; cut() is
// thread-safe.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/text/regex.h"
#include "proto/vocab/result.h"

namespace weft::daemon {

// What becomes of the matches of a pattern, and of the text between them.
enum class SplitBehavior : uint8_t { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

class PreTokenizer {
 public:
  // `part` is the value of "pre_tokenizer". Byte-level BPE needs a ByteLevel in it.
  static Result<PreTokenizer> parse(const nlohmann::json& part);

  // Replaces `pieces` by the pieces of `text` (valid UTF-8), in order; they are views into it.
  Result<void> cut(std::string_view text, std::vector<std::string_view>& pieces) const;

 private:
  struct Splitter {
    std::optional<Regex> regex;  // else `literal`
    std::string literal;
    SplitBehavior behavior = SplitBehavior::kIsolated;
    bool invert = false;  // the matches are what lies between

    Result<void> split(std::string_view text, std::vector<std::string_view>& pieces) const;
    Result<void> find_matches(std::string_view text, std::vector<TextRange>& matches) const;
  };

  Result<void> add(const nlohmann::json& part, int depth);
  Result<void> add_split(const nlohmann::json& part);
  Result<void> add_regex(std::string_view pattern, SplitBehavior behavior, bool invert);

  std::vector<Splitter> splitters_;
  bool byte_level_ = false;  // seen; nothing may follow it
};

}  // namespace weft::daemon
