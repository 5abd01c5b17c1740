// A long document with three facts in it, and the questions that ask for them.
//
// For a model of one token per byte. Keeps: the document and the first question have exactly `tokens` bytes
// together; they are UTF-8; each fact stands in the document once, on a line of its own; and for every byte
// of an answer, the kUniqueSuffix bytes before it occur nowhere else in the document, so that looking up what
// followed them has one right result. Equal options give an equal prompt.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/vocab/result.h"

namespace weft::demo {

inline constexpr size_t kUniqueSuffix = 16;
inline constexpr size_t kLeastTokens = 2048;
inline constexpr size_t kMostTokens = size_t{1} << 20;  // what the recall model looks back over

struct Fact {
  std::string station;  // "Vega-7c41"
  std::string stem;     // "The passkey of station Vega-7c41 is"
  std::string answer;   // " 20586."
  size_t offset = 0;    // where the stem stands in the document
  std::string question() const { return "\n\n" + stem; }
};

struct LongPrompt {
  std::string document;
  std::vector<Fact> facts;
  size_t source_bytes = 0;  // of real text
  size_t made_bytes = 0;    // of text made where the source ran out
  std::string first() const { return document + facts[0].question(); }
};

struct PromptOptions {
  size_t tokens = 32768;
  uint64_t seed = 1;
  std::string source;  // UTF-8
};

// kInvalidArgument: fewer than kLeastTokens or more than kMostTokens.
Result<LongPrompt> build_prompt(const PromptOptions& options);

// How often `needle` stands in `text`, overlapping occurrences counted.
size_t occurrences(const std::string& text, const std::string& needle);

}  // namespace weft::demo
