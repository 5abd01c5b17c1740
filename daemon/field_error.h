// Errors that name the field they are about: of a message, or an option of the command line.
#pragma once

#include <string>
#include <utility>

#include "proto/vocab/result.h"

namespace weft::daemon {

inline Error bad_field(std::string field, std::string message) {
  return error(ErrorCode::kInvalidArgument, std::move(message), std::move(field));
}
inline Error bad_option(const std::string& option, std::string message) {
  return bad_field("--" + option, std::move(message));
}

// The same failure, told of this field.
inline Error with_field(Error failure, std::string field) {
  failure.field = std::move(field);
  return failure;
}

}  // namespace weft::daemon
