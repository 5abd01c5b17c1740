// Result<T>: the value, or an expected failure (bad input, a full pool, a dead peer).
//
// A subset of std::expected, so that it can become an alias of it. An Error carries a code whose
// numbers are those of the wire enum (client.proto, asserted equal in proto/convert.cc), one
// sentence for a person, and the input field it is about, if any.
#pragma once

#include <string>
#include <utility>
#include <variant>

#include "proto/vocab/check.h"

namespace weft {

enum class ErrorCode : int {
  kOk = 0,
  kInvalidArgument = 1,     // the request can never be right as written
  kNotFound = 2,            // no such request, model, file, field
  kTooLarge = 3,            // beyond a limit: prompt, frame, model context
  kResourceExhausted = 4,   // no room now; may be right later
  kFailedPrecondition = 5,  // refused by the present state
  kUnavailable = 6,         // the other side is not there
  kDeadlineExceeded = 7,
  kCancelled = 8,
  kBadCheckpoint = 9,  // config.json, safetensors or tokenizer.json is broken or inconsistent
  kIo = 10,            // the operating system said no
  kBadMessage = 11,    // a frame that does not parse
  kUnsupported = 12,   // well-formed, known, not served by this build or model
  kNumerical = 13,     // logits held NaN or infinity
  kInternal = 14,      // our bug, contained
  kNotPermitted = 15,  // the caller is not the owner
};

// "invalid_argument", …: the stable name used in JSON and logs.
const char* error_code_name(ErrorCode code);

struct [[nodiscard]] Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
  std::string field;  // "max_tokens", "config.json: kv_lora_rank"; empty if none

  // "invalid_argument: max_tokens: must be at least 1"
  std::string text() const;
};

inline Error error(ErrorCode code, std::string message, std::string field = {}) {
  return Error{code, std::move(message), std::move(field)};
}

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}      // NOLINT: implicit, as std::expected
  Result(Error error) : state_(std::move(error)) {}  // NOLINT
  bool has_value() const { return state_.index() == 0; }
  explicit operator bool() const { return has_value(); }
  T& value() & {
    CHECK(has_value(), std::get<1>(state_).text());
    return std::get<0>(state_);
  }
  const T& value() const& {
    CHECK(has_value(), std::get<1>(state_).text());
    return std::get<0>(state_);
  }
  T&& value() && {
    CHECK(has_value(), std::get<1>(state_).text());
    return std::get<0>(std::move(state_));
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  const Error& error() const& {
    CHECK(!has_value());
    return std::get<1>(state_);
  }
  Error&& error() && {
    CHECK(!has_value());
    return std::get<1>(std::move(state_));
  }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : failed_(true), error_(std::move(error)) {}  // NOLINT
  bool has_value() const { return !failed_; }
  explicit operator bool() const { return has_value(); }
  void value() const { CHECK(has_value(), error_.text()); }
  const Error& error() const& {
    CHECK(failed_);
    return error_;
  }
  Error&& error() && {
    CHECK(failed_);
    return std::move(error_);
  }

 private:
  bool failed_ = false;
  Error error_;
};

}  // namespace weft

#define WEFT_CONCAT_(a, b) a##b
#define WEFT_CONCAT(a, b) WEFT_CONCAT_(a, b)
// TRY(auto x, f()): x is the value of f(), or the enclosing function returns its error.
// TRY_VOID(f()) for Result<void>.
#define TRY(declaration, call) TRY_(declaration, call, WEFT_CONCAT(try_result_, __LINE__))
#define TRY_(declaration, call, name)                    \
  auto name = (call);                                    \
  if (!name.has_value()) return std::move(name).error(); \
  declaration = std::move(name).value()
#define TRY_VOID(call)                                                           \
  do {                                                                           \
    auto try_void_result = (call);                                               \
    if (!try_void_result.has_value()) return std::move(try_void_result).error(); \
  } while (false)
