#include "daemon/text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "proto/utf8.h"
#include "proto/vocab/check.h"

namespace weft::daemon {

namespace {

struct Free {
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
  void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
};

std::string pcre2_message(int code) {
  PCRE2_UCHAR buffer[256];
  const int length = pcre2_get_error_message(code, buffer, sizeof buffer);
  return length < 0 ? "PCRE2 error " + std::to_string(code)
                    : std::string(reinterpret_cast<const char*>(buffer), static_cast<size_t>(length));
}

}  // namespace

struct Regex::State {
  std::unique_ptr<pcre2_code, Free> code;
  std::unique_ptr<pcre2_match_context, Free> context;
};

Regex::Regex(std::unique_ptr<const State> state) : state_(std::move(state)) {}
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;
Regex::~Regex() = default;

Result<Regex> Regex::compile(std::string_view pattern) {
  int code = 0;
  PCRE2_SIZE offset = 0;
  auto state = std::make_unique<State>();
  state->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                  PCRE2_UTF | PCRE2_UCP, &code, &offset, nullptr));
  if (!state->code) {
    return error(ErrorCode::kUnsupported, "regular expression " + std::string(pattern) + " at byte " +
                                              std::to_string(offset) + ": " + pcre2_message(code));
  }
  pcre2_jit_compile(state->code.get(),
                    PCRE2_JIT_COMPLETE);  // without it the interpreter gives the same matches
  state->context.reset(pcre2_match_context_create(nullptr));
  CHECK(state->context != nullptr);
  pcre2_set_match_limit(state->context.get(), kMatchLimit);
  pcre2_set_heap_limit(state->context.get(), kHeapLimitKib);
  return Regex(std::move(state));
}

Result<void> Regex::find_all(std::string_view text, std::vector<TextRange>& matches) const {
  const std::unique_ptr<pcre2_match_data, Free> data(pcre2_match_data_create(1, nullptr));
  CHECK(data != nullptr);
  const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(data.get());
  const auto match = [&](size_t from, uint32_t options) {
    return pcre2_match(state_->code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), from,
                       PCRE2_NO_UTF_CHECK | options, data.get(), state_->context.get());
  };
  size_t at = 0, last_end = SIZE_MAX;
  while (at <= text.size()) {
    int found = match(at, 0);
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) found = match(at, PCRE2_NO_JIT);
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0) {
      return error(ErrorCode::kTooLarge, "a pre-tokenizer expression gave up at byte " + std::to_string(at) +
                                             ": " + pcre2_message(found));
    }
    const TextRange range{ends[0], ends[1]};
    if (range.end > range.begin) {
      matches.push_back(range);
      at = last_end = range.end;
      continue;
    }
    if (range.begin != last_end) matches.push_back(range);
    if (range.begin >= text.size()) break;
    at = range.begin + utf8_step(text.substr(range.begin)).length;
  }
  return {};
}

}  // namespace weft::daemon
