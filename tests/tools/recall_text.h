// Text for tests of the recall model: facts in words that hold plenty of short matches and no long ones.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/vocab/random.h"

namespace weft::test {

inline std::vector<uint32_t> tokens_of(const std::string& text) {
  std::vector<uint32_t> out;
  for (const char c : text) out.push_back(static_cast<uint8_t>(c));
  return out;
}

inline std::string babble(size_t bytes, uint64_t seed) {
  static const char* kWords[] = {"the ",     "station ", "of ",     "a passkey ", "is ",       "and ",
                                 "2058",     "copies, ", "may ",    "license; ",  "Program\n", "distribute ",
                                 "derived ", "(c) ",     "source ", "in "};
  SplitMix64 random(seed);
  std::string out;
  while (out.size() < bytes) out += kWords[random.below(std::size(kWords))];
  return out.substr(0, bytes);
}

struct RecallQuestion {
  std::string text;    // facts, then the question and its answer: exactly the bytes asked for
  std::string answer;  // the last bytes of the text
  std::string prompt() const { return text.substr(0, text.size() - answer.size()); }
};

// Three facts that differ in a few letters, one in each quarter of the text, and the question for one of them
// in the last.
inline RecallQuestion recall_question(size_t bytes, size_t asked) {
  const std::string stations[] = {"Vega-7c41", "Vega-7c40", "Lyra-09be"};
  const std::string answers[] = {" 20586.", " 77310.", " 41975."};
  std::string text;
  for (size_t i = 0; i < 3; ++i) {
    text += babble(bytes / 4, 10 + i) + "\nThe passkey of station " + stations[i] + " is" + answers[i] + "\n";
  }
  const std::string end = "\n\nThe passkey of station " + stations[asked] + " is" + answers[asked];
  text += babble(bytes - text.size() - end.size(), 20);
  return {text + end, answers[asked]};
}

}  // namespace weft::test
