// One compiled regular expression (PCRE2, UTF-8, Unicode properties), as pre-tokenizers use it.
//
// Bounded: a match that backtracks beyond kMatchLimit steps or kHeapLimitKib of memory is an error, never a
// hang. Immutable after compile(); any number of threads may search at once. Differs from Oniguruma, which
// wrote most tokenizers' test vectors, in \s alone: U+180E counts as a space here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "proto/vocab/result.h"

namespace weft::daemon {

struct TextRange {  // bytes [begin, end)
  size_t begin = 0, end = 0;
};

class Regex {
 public:
  static constexpr uint32_t kMatchLimit = 10'000'000;
  static constexpr uint32_t kHeapLimitKib = 64 * 1024;

  // kUnsupported with PCRE2's own words if the pattern does not compile.
  static Result<Regex> compile(std::string_view pattern);
  Regex(Regex&&) noexcept;
  Regex& operator=(Regex&&) noexcept;
  ~Regex();

  // All matches, left to right, not overlapping; an empty match directly after another match is skipped.
  // `text` must be valid UTF-8. kTooLarge if a limit is hit.
  Result<void> find_all(std::string_view text, std::vector<TextRange>& matches) const;

 private:
  struct State;
  explicit Regex(std::unique_ptr<const State> state);
  std::unique_ptr<const State> state_;
};

}  // namespace weft::daemon
