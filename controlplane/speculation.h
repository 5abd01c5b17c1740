// Speculative decoding: where drafts come from, and which of them hold.
//
// A draft is a guess of the next token. A decode span runs the last known token and then its drafts, one row
// each, and every row draws its token as ever, with the counters of its position. A draft holds while it
// equals what the row before it drew; so the tokens of an answer are the same with and without drafts,
// sampled or greedy, and a wrong guess costs its row. Functions without state; counts are tokens.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "controlplane/lookup_index.h"
#include "proto/vocab/result.h"

namespace weft::controlplane {

inline constexpr int64_t kDraftTokensMax = 16;  // of one request in one step

// kLookup: what followed the latest earlier place that reads like the end of the text. kMtp: what the model's
// draft layers guessed in the step before. kForced: a script, for tests of what depends on how many drafts
// hold.
enum class DraftSource : uint8_t { kOff, kLookup, kMtp, kForced };
const char* draft_source_name(DraftSource source);  // "off", "lookup", "mtp", "forced"
Result<DraftSource> parse_draft_source(const std::string& text);

struct Speculation {
  DraftSource source = DraftSource::kOff;
  int64_t draft_tokens = 4;      // at most, in one step
  std::vector<uint32_t> forced;  // kForced: guesses of the answer's tokens, from the first on
  bool on() const { return source != DraftSource::kOff; }
  friend bool operator==(const Speculation&, const Speculation&) = default;
};

// At most `limit` guesses of what follows; may be none. `text`: prompt and answer so far, where drafts are
// looked up; `index`: of it, what is new is taken in. `answered`: tokens of the answer. `guessed`: by the
// draft layers.
std::vector<uint32_t> draft(const Speculation& speculation, std::span<const uint32_t> text, int64_t answered,
                            std::span<const uint32_t> guessed, LookupIndex& index, int64_t limit);

// What followed the longest match of the last 2 … 8 tokens further up; of equally long ones the latest.
std::vector<uint32_t> look_up(std::span<const uint32_t> tokens, LookupIndex& index, int64_t limit);

}  // namespace weft::controlplane
