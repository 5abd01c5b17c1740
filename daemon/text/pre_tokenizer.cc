#include "daemon/text/pre_tokenizer.h"

#include <nlohmann/json.hpp>

#include "daemon/text/json_fields.h"

namespace weft::daemon {

namespace {

constexpr int kDepthLimit = 8;
constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

struct Cut {
  TextRange range;
  bool match = false;
};

// The matches and what lies between them: covers [0, size) without gaps.
std::vector<Cut> cover(const std::vector<TextRange>& matches, size_t size, bool invert) {
  std::vector<Cut> cuts;
  size_t end = 0;
  for (const TextRange& m : matches) {
    if (m.begin > end) cuts.push_back({{end, m.begin}, invert});
    cuts.push_back({m, !invert});
    end = m.end;
  }
  if (end < size) cuts.push_back({{end, size}, invert});
  return cuts;
}

std::vector<TextRange> arrange(const std::vector<Cut>& cuts, SplitBehavior behavior) {
  std::vector<TextRange> out;
  for (size_t i = 0; i < cuts.size(); ++i) {
    const Cut& cut = cuts[i];
    const bool after_match = i > 0 && cuts[i - 1].match;
    bool join = false;  // with the range before
    switch (behavior) {
      case SplitBehavior::kRemoved:
        if (cut.match) continue;
        break;
      case SplitBehavior::kIsolated:
        break;
      case SplitBehavior::kContiguous:
        join = i > 0 && cut.match == cuts[i - 1].match;
        break;
      case SplitBehavior::kMergedWithPrevious:
        join = i > 0 && cut.match && !after_match;
        break;
      // Only the last match of a run has a neighbour to join.
      case SplitBehavior::kMergedWithNext:
        join = after_match && !cut.match;
        break;
    }
    if (join) {
      out.back().end = cut.range.end;
    } else {
      out.push_back(cut.range);
    }
  }
  return out;
}

Result<SplitBehavior> parse_behavior(const std::string& name) {
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  return unsupported_part("Split behavior", name);
}

}  // namespace

Result<PreTokenizer> PreTokenizer::parse(const nlohmann::json& part) {
  PreTokenizer out;
  if (!part.is_null()) TRY_VOID(out.add(part, 0));
  if (!out.byte_level_) {
    return error(ErrorCode::kUnsupported, "the pre_tokenizer has no ByteLevel: only byte-level BPE is served",
                 "tokenizer.json: pre_tokenizer");
  }
  return out;
}

Result<void> PreTokenizer::add(const nlohmann::json& part, int depth) {
  if (depth > kDepthLimit) return bad_part("pre_tokenizer", "is nested too deeply");
  // Not TRY: moving the string out makes GCC 12 see an uninitialised read (-Wmaybe-uninitialized) where there
  // is none.
  const Result<std::string> type_field = string_field(part, "type", "pre_tokenizer");
  if (!type_field) return type_field.error();
  const std::string& type = *type_field;
  if (type == "Sequence") {
    TRY(const nlohmann::json* parts, array_field(part, "pretokenizers", "pre_tokenizer"));
    for (const nlohmann::json& inner : *parts) TRY_VOID(add(inner, depth + 1));
    return {};
  }
  if (byte_level_) return unsupported_part("pre_tokenizer after ByteLevel", type);
  if (type == "Split") return add_split(part);
  if (type == "Digits") {
    TRY(const bool individual, bool_field(part, "individual_digits", false, "pre_tokenizer"));
    // Numeric in the sense of the Unicode categories Nd, Nl, No.
    return add_regex(R"(\p{N})", individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous, false);
  }
  if (type == "ByteLevel") {
    byte_level_ = true;
    TRY(const bool prefix_space, bool_field(part, "add_prefix_space", true, "pre_tokenizer"));
    if (prefix_space) return unsupported_part("ByteLevel option", "add_prefix_space");
    TRY(const bool use_regex, bool_field(part, "use_regex", true, "pre_tokenizer"));
    return use_regex ? add_regex(kGpt2Pattern, SplitBehavior::kIsolated, false) : Result<void>();
  }
  return unsupported_part("pre_tokenizer", type);
}

Result<void> PreTokenizer::add_split(const nlohmann::json& part) {
  TRY(const std::string behavior_name, string_field(part, "behavior", "pre_tokenizer"));
  TRY(const SplitBehavior behavior, parse_behavior(behavior_name));
  TRY(const bool invert, bool_field(part, "invert", false, "pre_tokenizer"));
  const auto pattern = part.find("pattern");
  if (pattern == part.end() || !pattern->is_object())
    return bad_part("pre_tokenizer", "Split without a pattern");
  if (pattern->contains("Regex")) {
    TRY(const std::string regex, string_field(*pattern, "Regex", "pre_tokenizer"));
    return add_regex(regex, behavior, invert);
  }
  TRY(std::string literal, string_field(*pattern, "String", "pre_tokenizer"));
  if (literal.empty()) return bad_part("pre_tokenizer", "Split on an empty string");
  splitters_.push_back({std::nullopt, std::move(literal), behavior, invert});
  return {};
}

Result<void> PreTokenizer::add_regex(std::string_view pattern, SplitBehavior behavior, bool invert) {
  TRY(Regex regex, Regex::compile(pattern));
  splitters_.push_back({std::move(regex), {}, behavior, invert});
  return {};
}

Result<void> PreTokenizer::cut(std::string_view text, std::vector<std::string_view>& pieces) const {
  pieces.clear();
  if (!text.empty()) pieces.push_back(text);
  std::vector<std::string_view> finer;
  for (const Splitter& splitter : splitters_) {
    finer.clear();
    for (const std::string_view piece : pieces) TRY_VOID(splitter.split(piece, finer));
    pieces.swap(finer);
  }
  return {};
}

Result<void> PreTokenizer::Splitter::split(std::string_view text,
                                           std::vector<std::string_view>& pieces) const {
  std::vector<TextRange> matches;
  TRY_VOID(find_matches(text, matches));
  for (const TextRange& range : arrange(cover(matches, text.size(), invert), behavior)) {
    if (range.end > range.begin) pieces.push_back(text.substr(range.begin, range.end - range.begin));
  }
  return {};
}

Result<void> PreTokenizer::Splitter::find_matches(std::string_view text,
                                                  std::vector<TextRange>& matches) const {
  if (regex) return regex->find_all(text, matches);
  for (size_t at = text.find(literal); at != std::string_view::npos;
       at = text.find(literal, at + literal.size())) {
    matches.push_back({at, at + literal.size()});
  }
  return {};
}

}  // namespace weft::daemon
