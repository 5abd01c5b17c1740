#include "proto/vocab/result.h"

namespace weft {

const char* error_code_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOk:
      return "ok";
    case ErrorCode::kInvalidArgument:
      return "invalid_argument";
    case ErrorCode::kNotFound:
      return "not_found";
    case ErrorCode::kTooLarge:
      return "too_large";
    case ErrorCode::kResourceExhausted:
      return "resource_exhausted";
    case ErrorCode::kFailedPrecondition:
      return "failed_precondition";
    case ErrorCode::kUnavailable:
      return "unavailable";
    case ErrorCode::kDeadlineExceeded:
      return "deadline_exceeded";
    case ErrorCode::kCancelled:
      return "cancelled";
    case ErrorCode::kBadCheckpoint:
      return "bad_checkpoint";
    case ErrorCode::kIo:
      return "io";
    case ErrorCode::kBadMessage:
      return "bad_message";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kNumerical:
      return "numerical";
    case ErrorCode::kInternal:
      return "internal";
    case ErrorCode::kNotPermitted:
      return "not_permitted";
  }
  return "internal";
}

std::string Error::text() const {
  std::string out = error_code_name(code);
  if (!field.empty()) out += ": " + field;
  if (!message.empty()) out += ": " + message;
  return out;
}

}  // namespace weft
