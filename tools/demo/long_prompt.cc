#include "tools/demo/long_prompt.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "proto/utf8.h"
#include "proto/vocab/random.h"
#include "tools/demo/source_text.h"

namespace weft::demo {
namespace {

constexpr std::array<double, 3> kPlaces = {0.15, 0.50, 0.85};  // of the whole prompt
constexpr const char* kStars[] = {"Vega",   "Altair",  "Rigel",  "Deneb", "Spica",   "Castor",
                                  "Mimosa", "Capella", "Adhara", "Izar",  "Antares", "Pollux"};

Fact random_fact(SplitMix64& random) {
  char suffix[8], number[8];
  std::snprintf(suffix, sizeof suffix, "%04x", static_cast<unsigned>(random.below(0x10000)));
  std::snprintf(number, sizeof number, "%u", static_cast<unsigned>(10000 + random.below(90000)));
  Fact fact;
  fact.station = std::string(kStars[random.below(std::size(kStars))]) + "-" + suffix;
  fact.stem = "The passkey of station " + fact.station + " is";
  fact.answer = std::string(" ") + number + ".";
  return fact;
}

std::string line_of(const Fact& fact) { return "\n" + fact.stem + fact.answer + "\n"; }

// Exactly `bytes` of the source, continued by made text; the last character is never cut.
std::string base_text(const PromptOptions& options, size_t bytes, LongPrompt& prompt) {
  std::string out = options.source.substr(0, character_boundary(options.source, bytes));
  prompt.source_bytes = out.size();
  if (options.source.size() < bytes) {
    out += made_text(mix64(options.seed), bytes - out.size());
    out.resize(bytes);  // made text is ASCII
    prompt.made_bytes = bytes - prompt.source_bytes;
  }
  out.resize(bytes, ' ');
  return out;
}

// The end of the line that holds byte `wanted`, if it is near; else a character boundary there.
size_t place_near(const std::string& text, size_t wanted) {
  constexpr size_t kNear = 200;
  const size_t end = text.find('\n', wanted);
  if (end != std::string::npos && end - wanted <= kNear) return end;
  return character_boundary(text, wanted);
}

// From the last place to the first, so that earlier places stay where they are.
void plant(std::string& text, std::vector<Fact>& facts, size_t tokens) {
  for (size_t i = facts.size(); i-- > 0;) {
    const size_t wanted = static_cast<size_t>(kPlaces[i] * static_cast<double>(tokens));
    const size_t place = place_near(text, std::min(wanted, text.size()));
    const std::string line = line_of(facts[i]);
    text.insert(place, line);
    facts[i].offset = place + 1;
    for (size_t later = i + 1; later < facts.size(); ++later) facts[later].offset += line.size();
  }
}

bool is_unique(const LongPrompt& prompt, const Fact& fact) {
  const std::string whole = fact.stem + fact.answer;
  for (size_t end = fact.stem.size(); end < whole.size(); ++end) {
    if (occurrences(prompt.document, whole.substr(end - kUniqueSuffix, kUniqueSuffix)) != 1) return false;
  }
  return true;
}

}  // namespace

size_t occurrences(const std::string& text, const std::string& needle) {
  size_t count = 0;
  for (size_t at = text.find(needle); at != std::string::npos; at = text.find(needle, at + 1)) ++count;
  return count;
}

Result<LongPrompt> build_prompt(const PromptOptions& options) {
  if (options.tokens < kLeastTokens || options.tokens > kMostTokens) {
    return error(ErrorCode::kInvalidArgument,
                 "must be " + std::to_string(kLeastTokens) + " to " + std::to_string(kMostTokens),
                 "--context");
  }
  SplitMix64 random(options.seed);
  constexpr int kTries = 100;  // a clash is a chance of one in thousands; a text of nothing but clashes ends
  for (int attempt = 0; attempt < kTries; ++attempt) {
    LongPrompt prompt;
    size_t planted = 0;
    for (size_t i = 0; i < kPlaces.size(); ++i) {
      prompt.facts.push_back(random_fact(random));
      planted += line_of(prompt.facts.back()).size();
    }
    const size_t question = prompt.facts[0].question().size();
    prompt.document = base_text(options, options.tokens - planted - question, prompt);
    plant(prompt.document, prompt.facts, options.tokens);
    const bool unique = std::all_of(prompt.facts.begin(), prompt.facts.end(),
                                    [&](const Fact& fact) { return is_unique(prompt, fact); });
    if (unique) return prompt;
  }
  return error(ErrorCode::kInternal, "found no facts that stand out from the text", "--seed");
}

}  // namespace weft::demo
