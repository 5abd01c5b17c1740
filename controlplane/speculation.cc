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

std::vector<uint32_t> draft(const Speculation& speculation, std::span<const uint32_t> text, int64_t answered,
                            std::span<const uint32_t> guessed, LookupIndex& index, int64_t limit) {
  limit = std::min(limit, speculation.draft_tokens);
  if (limit <= 0) return {};
  switch (speculation.source) {
    case DraftSource::kOff:
      return {};
    case DraftSource::kLookup:
      return look_up(text, index, limit);
    case DraftSource::kMtp:
      return first_of(guessed, limit);
    case DraftSource::kForced: {
      const auto known = std::min(answered, std::ssize(speculation.forced));
      return first_of(std::span(speculation.forced).subspan(static_cast<size_t>(known)), limit);
    }
  }
  return {};
}

std::vector<uint32_t> look_up(std::span<const uint32_t> tokens, LookupIndex& index, int64_t limit) {
  index.extend(tokens);
  const int64_t next = index.find(tokens);
  if (next == 0) return {};
  return first_of(tokens.subspan(static_cast<size_t>(next)), limit);
}

}  // namespace weft::controlplane
