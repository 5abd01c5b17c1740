#include "controlplane/speculation.h"

#include <algorithm>

namespace weft::controlplane {
namespace {

constexpr DraftSource kSources[] = {DraftSource::kOff, DraftSource::kLookup, DraftSource::kMtp,
                                    DraftSource::kForced};

std::vector<uint32_t> first_of(std::span<const uint32_t> tokens, int64_t limit) {
  const auto count = std::min(std::ssize(tokens), limit);
  return {tokens.begin(), tokens.begin() + count};
}

}  // namespace

const char* draft_source_name(DraftSource source) {
  switch (source) {
    case DraftSource::kOff:
      return "off";
    case DraftSource::kLookup:
      return "lookup";
    case DraftSource::kMtp:
      return "mtp";
    case DraftSource::kForced:
      return "forced";
  }
  return "?";
}

Result<DraftSource> parse_draft_source(const std::string& text) {
  for (const DraftSource source : kSources) {
    if (text == draft_source_name(source)) return source;
  }
  return error(ErrorCode::kInvalidArgument, "must be off, lookup, mtp or forced, not '" + text + "'");
}

std::vector<uint32_t> draft(const Speculation& speculation, std::span<const uint32_t> tokens, int64_t prompt,
                            std::span<const uint32_t> guessed, int64_t limit) {
  limit = std::min(limit, speculation.draft_tokens);
  if (limit <= 0) return {};
  switch (speculation.source) {
    case DraftSource::kOff:
      return {};
    case DraftSource::kLookup:
      return look_up(tokens, limit);
    case DraftSource::kMtp:
      return first_of(guessed, limit);
    case DraftSource::kForced: {
      const auto answered = std::min(std::ssize(tokens) - prompt, std::ssize(speculation.forced));
      return first_of(std::span(speculation.forced).subspan(static_cast<size_t>(answered)), limit);
    }
  }
  return {};
}

std::vector<uint32_t> look_up(std::span<const uint32_t> tokens, int64_t limit) {
  constexpr int64_t kShortest = 2, kLongest = 8;
  const auto count = std::ssize(tokens);
  const auto at = [&](int64_t i) { return tokens[static_cast<size_t>(i)]; };
  int64_t best = kShortest - 1, next = 0;
  // `end`: where a match would end, so what follows it is there.
  for (int64_t end = count - 1; end >= kShortest && best < kLongest; --end) {
    int64_t length = 0;
    while (length < std::min(kLongest, end) && at(end - 1 - length) == at(count - 1 - length)) ++length;
    if (length <= best) continue;
    best = length;
    next = end;
  }
  if (next == 0) return {};
  return first_of(tokens.subspan(static_cast<size_t>(next)), limit);
}

}  // namespace weft::controlplane
