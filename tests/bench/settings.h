// What a run of weft-bench was asked for, and the ceilings that it measured first.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace weft::bench {

struct Settings {
  bool quick = false;
  int rounds = 7;
  std::vector<int64_t> prompts = {8192, 32768};   // tokens of a prefill request
  std::vector<int64_t> contexts = {8192, 32768};  // tokens before a decode
  int64_t decode_tokens = 64;
  int64_t block_tokens = 64;
  int first_core = -1;                // the pair is this one and the next; -1: chosen
  std::vector<std::string> sections;  // empty: all
  std::string json;

  double seconds() const { return quick ? 0.0 : 1.0; }  // of one kernel or ceiling
  bool wants(const std::string& section) const {
    return sections.empty() || std::set<std::string>(sections.begin(), sections.end()).count(section) > 0;
  }
};

struct CorePair {
  int first = 0, second = 0;
  bool distinct() const { return first != second; }
};

struct Ceilings {
  double fma[3] = {};       // GFLOP/s, by threads (1, 2)
  double bf16_dot[3] = {};  // GFLOP/s
  double stream[3] = {};    // GB/s
  double memcpy[3] = {};    // GB/s
  double barrier = 0;       // µs, 2 threads
  double exchange = 0;      // µs, an exchange point of 2 processes with nothing to copy
};

}  // namespace weft::bench
