#include "proto/convert.h"

namespace weft {

#define SAME(wire_name, name) \
  static_assert(static_cast<int>(wire::wire_name) == static_cast<int>(ErrorCode::name))
SAME(ERROR_OK, kOk);
SAME(ERROR_INVALID_ARGUMENT, kInvalidArgument);
SAME(ERROR_NOT_FOUND, kNotFound);
SAME(ERROR_TOO_LARGE, kTooLarge);
SAME(ERROR_RESOURCE_EXHAUSTED, kResourceExhausted);
SAME(ERROR_FAILED_PRECONDITION, kFailedPrecondition);
SAME(ERROR_UNAVAILABLE, kUnavailable);
SAME(ERROR_DEADLINE_EXCEEDED, kDeadlineExceeded);
SAME(ERROR_CANCELLED, kCancelled);
SAME(ERROR_BAD_CHECKPOINT, kBadCheckpoint);
SAME(ERROR_IO, kIo);
SAME(ERROR_BAD_MESSAGE, kBadMessage);
SAME(ERROR_UNSUPPORTED, kUnsupported);
SAME(ERROR_NUMERICAL, kNumerical);
SAME(ERROR_INTERNAL, kInternal);
SAME(ERROR_NOT_PERMITTED, kNotPermitted);
#undef SAME

void fill_error(const Error& from, wire::WireError* to) {
  to->set_code(static_cast<wire::WireErrorCode>(from.code));
  to->set_message(from.message);
  to->set_field(from.field);
}

Error from_wire(const wire::WireError& error) {
  const bool known = error.code() > wire::ERROR_OK && wire::WireErrorCode_IsValid(error.code());
  return Error{known ? static_cast<ErrorCode>(error.code()) : ErrorCode::kInternal, error.message(),
               error.field()};
}

static_assert(static_cast<int>(CacheDType::kF32) + 1 == wire::CACHE_DTYPE_F32);
static_assert(static_cast<int>(CacheDType::kBF16) + 1 == wire::CACHE_DTYPE_BF16);
static_assert(static_cast<int>(CacheDType::kFp8) + 1 == wire::CACHE_DTYPE_FP8);
static_assert(static_cast<int>(CacheDType::kFp8DsMla) + 1 == wire::CACHE_DTYPE_FP8_DS_MLA);

wire::WireDType to_wire(DType type) { return type == DType::kF32 ? wire::DTYPE_F32 : wire::DTYPE_BF16; }

Result<DType> from_wire(wire::WireDType type, const char* field) {
  if (type == wire::DTYPE_F32) return DType::kF32;
  if (type == wire::DTYPE_BF16) return DType::kBF16;
  return error(ErrorCode::kInvalidArgument, std::to_string(static_cast<int>(type)) + " is no known dtype",
               field);
}

wire::WireCacheDType to_wire(CacheDType type) {
  return static_cast<wire::WireCacheDType>(static_cast<int>(type) + 1);
}

Result<CacheDType> from_wire(wire::WireCacheDType type, const char* field) {
  for (const CacheDType known : kAllCacheDTypes) {
    if (to_wire(known) == type) return known;
  }
  return error(ErrorCode::kInvalidArgument,
               std::to_string(static_cast<int>(type)) + " is no known cache dtype", field);
}

}  // namespace weft
