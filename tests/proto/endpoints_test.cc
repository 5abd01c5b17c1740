// Socket paths from the environment, and the versions that travel beside them.
#include "proto/endpoints.h"

#include <gtest/gtest.h>

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "proto/version.h"

namespace weft {
namespace {

TEST(Endpoints, FollowTheEnvironment) {
  EXPECT_EQ(run_folder({"/run/user/7", nullptr, nullptr, 7}), "/run/user/7/weft");
  EXPECT_EQ(run_folder({"", nullptr, nullptr, 7}), "/tmp/weft-7");
  EXPECT_EQ(state_folder({nullptr, "/s", "/h", 7}), "/s/weft");
  EXPECT_EQ(state_folder({nullptr, "", "/h", 7}), "/h/.local/state/weft");
  EXPECT_EQ(state_folder({nullptr, nullptr, nullptr, 7}), "/tmp/weft-7");
  EXPECT_EQ(client_endpoint_in("/s"), "ipc:///s/client.sock");
  EXPECT_EQ(control_socket_in("/s"), "/s/control.sock");
}

TEST(Endpoints, TheProcessHasAnEnvironment) {
  ASSERT_EQ(::setenv("XDG_RUNTIME_DIR", "/run/user/of-a-test", 1), 0);
  ASSERT_EQ(::setenv("XDG_STATE_HOME", "/state/of-a-test", 1), 0);
  EXPECT_EQ(default_run_folder(), "/run/user/of-a-test/weft");
  EXPECT_EQ(default_state_folder(), "/state/of-a-test/weft");
}

TEST(Endpoints, ASocketPathHasALimit) {
  EXPECT_TRUE(check_socket_path(std::string(107, 'x')));
  const auto longer = check_socket_path(std::string(108, 'x'));
  ASSERT_FALSE(longer);
  EXPECT_EQ(longer.error().code, ErrorCode::kTooLarge);
  EXPECT_NE(longer.error().message.find("108 bytes, limit 107"), std::string::npos) << longer.error().message;
  const auto empty = check_socket_path("");
  ASSERT_FALSE(empty);
  EXPECT_EQ(empty.error().code, ErrorCode::kInvalidArgument);
}

// Three numbers with points between them.
TEST(Version, IsThreeNumbers) {
  const char* at = kVersion;
  const char* const end = kVersion + std::strlen(kVersion);
  for (int part = 0; part < 3; ++part) {
    unsigned value = 0;
    const auto [after, code] = std::from_chars(at, end, value);
    ASSERT_EQ(code, std::errc()) << kVersion;
    at = after;
    if (part < 2) {
      ASSERT_EQ(*at, '.') << kVersion;
      ++at;
    }
  }
  EXPECT_EQ(at, end) << kVersion;
}

}  // namespace
}  // namespace weft
