// Wire values and ours: each comes back as it went, and a number that nobody knows is refused.
#include "proto/convert.h"

#include <gtest/gtest.h>

namespace weft {
namespace {

TEST(Convert, DTypes) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    EXPECT_EQ(from_wire(to_wire(type), "weight_dtype").value(), type);
  }
  for (const int unknown : {0, 3, 200, -1}) {
    const auto refused = from_wire(static_cast<wire::WireDType>(unknown), "weight_dtype");
    ASSERT_FALSE(refused.has_value()) << unknown;
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(refused.error().field, "weight_dtype");
    EXPECT_EQ(refused.error().message, std::to_string(unknown) + " is no known dtype");
  }
}

TEST(Convert, Errors) {
  const Error whole = error(ErrorCode::kTooLarge, "too many", "tokens");
  wire::WireError message;
  fill_error(whole, &message);
  EXPECT_EQ(from_wire(message).text(), whole.text());
  EXPECT_EQ(from_wire(message).field, "tokens");
  message.set_code(static_cast<wire::WireErrorCode>(99));
  EXPECT_EQ(from_wire(message).code, ErrorCode::kInternal);
  message.set_code(wire::ERROR_OK);
  EXPECT_EQ(from_wire(message).code, ErrorCode::kInternal);
}

// As bytes: a field that was a plain number keeps its encoding, and unknown numbers survive the parser.
TEST(Convert, AnUnknownDTypeArrivesAsItWasSent) {
  wire::Describe sent, received;
  sent.set_cache_dtype(static_cast<wire::WireCacheDType>(7));
  ASSERT_TRUE(received.ParseFromString(sent.SerializeAsString()));
  EXPECT_FALSE(from_wire(received.cache_dtype(), "cache_dtype").has_value());
}

}  // namespace
}  // namespace weft
