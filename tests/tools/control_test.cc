// The control client: frames in pieces, broken frames, silence, a socket that is another user's.
#include "tools/client/control.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "tests/tools/fake_daemon.h"

namespace weft::client {
namespace {

using test::FakeDaemon;
using namespace std::chrono_literals;

constexpr Duration kPatience = 30s;

void no_client(const wire::ClientRequest&, const FakeDaemon::Send&) {}

wire::ControlRequest status_request() {
  wire::ControlRequest request;
  request.mutable_status();
  return request;
}

std::string ready(const wire::ControlRequest& request) {
  EXPECT_EQ(request.version(), 1u);
  wire::ControlReply reply;
  reply.mutable_status()->set_state("ready");
  return test::framed(reply);
}

TEST(Control, SaysThatNobodyListens) {
  const auto client = ControlClient::connect("/tmp/weft-no-such-folder/control.sock");
  ASSERT_FALSE(client);
  EXPECT_EQ(client.error().code, ErrorCode::kUnavailable);
}

TEST(Control, RefusesAPathThatNoSocketCanHave) {
  const auto client = ControlClient::connect("/tmp/" + std::string(200, 'x'));
  ASSERT_FALSE(client);
  EXPECT_EQ(client.error().code, ErrorCode::kTooLarge);
}

TEST(Control, AnswersSeveralCallsOnOneConnection) {
  FakeDaemon daemon(no_client, ready);
  auto client = ControlClient::connect(daemon.control_socket());
  ASSERT_TRUE(client) << client.error().text();
  for (int i = 0; i < 3; ++i) {
    const auto reply = client->call(status_request(), kPatience);
    ASSERT_TRUE(reply) << reply.error().text();
    EXPECT_EQ(reply->status().state(), "ready");
  }
  const auto pid = client->daemon_pid();
  ASSERT_TRUE(pid);
  EXPECT_EQ(*pid, ::getpid());
}

TEST(Control, TurnsAnErrorReplyIntoAnError) {
  FakeDaemon daemon(no_client, [](const wire::ControlRequest&) {
    wire::ControlReply reply;
    reply.mutable_error()->set_code(wire::ERROR_FAILED_PRECONDITION);
    reply.mutable_error()->set_message("not ready");
    return test::framed(reply);
  });
  auto client = ControlClient::connect(daemon.control_socket());
  ASSERT_TRUE(client);
  const auto reply = client->call(status_request(), kPatience);
  ASSERT_FALSE(reply);
  EXPECT_EQ(reply.error().text(), "failed_precondition: not ready");
}

struct Broken {
  const char* name;
  std::string bytes;
  bool close;
  ErrorCode expected;
};

TEST(Control, BrokenRepliesAreTypedErrorsAndFinal) {
  wire::ControlReply good;
  good.mutable_status()->set_state("ready");
  const std::string whole = test::framed(good);
  const Broken cases[] = {
      {"closed without an answer", "", true, ErrorCode::kUnavailable},
      {"closed inside the header", whole.substr(0, 2), true, ErrorCode::kUnavailable},
      {"closed inside the body", whole.substr(0, whole.size() - 1), true, ErrorCode::kUnavailable},
      {"absurd length", "\xff\xff\xff\xff", false, ErrorCode::kBadMessage},
      {"garbage", test::frame_of("\xff\xff\xff"), false, ErrorCode::kBadMessage},
      {"silence", "", false, ErrorCode::kDeadlineExceeded},
      {"half an answer", whole.substr(0, 5), false, ErrorCode::kDeadlineExceeded},
  };
  for (const Broken& broken : cases) {
    FakeDaemon daemon(no_client, [&](const wire::ControlRequest&) { return broken.bytes; });
    if (broken.close) daemon.close_after_reply();
    auto client = ControlClient::connect(daemon.control_socket());
    ASSERT_TRUE(client);
    const bool waits = broken.expected == ErrorCode::kDeadlineExceeded;
    const auto reply = client->call(status_request(), waits ? Duration(100ms) : kPatience);
    ASSERT_FALSE(reply) << broken.name;
    EXPECT_EQ(reply.error().code, broken.expected) << broken.name << ": " << reply.error().text();
    const auto again = client->call(status_request(), kPatience);
    ASSERT_FALSE(again) << broken.name;
    EXPECT_EQ(again.error().code, ErrorCode::kUnavailable) << broken.name;
  }
}

TEST(Control, RefusesAnotherVersion) {
  FakeDaemon daemon(no_client, [](const wire::ControlRequest&) {
    wire::ControlReply reply;
    reply.set_version(9);
    reply.mutable_status();
    return test::frame_of(reply.SerializeAsString());
  });
  auto client = ControlClient::connect(daemon.control_socket());
  ASSERT_TRUE(client);
  const auto reply = client->call(status_request(), kPatience);
  ASSERT_FALSE(reply);
  EXPECT_EQ(reply.error().code, ErrorCode::kUnsupported);
}

TEST(Control, ASocketOfAnotherUserIsNotPermitted) {
  FakeDaemon daemon(no_client, ready);
  std::filesystem::permissions(daemon.control_socket(), std::filesystem::perms::none);
  // Root may do anything; as somebody else, it may not.
  const bool root = ::geteuid() == 0;
  if (root) {
    std::filesystem::permissions(daemon.folder(), std::filesystem::perms::all);
    ASSERT_EQ(::seteuid(65534), 0);
  }
  const auto client = ControlClient::connect(daemon.control_socket());
  if (root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  ASSERT_FALSE(client);
  EXPECT_EQ(client.error().code, ErrorCode::kNotPermitted) << client.error().text();
}

TEST(WaitForExit, SeesAProcessEnd) {
  int hold[2];
  ASSERT_EQ(::pipe(hold), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    char byte;
    ::close(hold[1]);
    const ssize_t ended = ::read(hold[0], &byte, 1);  // until the parent closes its end
    ::_exit(static_cast<int>(ended));
  }
  const auto early = wait_for_exit(child, 20ms);
  ASSERT_FALSE(early);
  EXPECT_EQ(early.error().code, ErrorCode::kDeadlineExceeded);
  ::close(hold[1]);
  EXPECT_TRUE(wait_for_exit(child, kPatience));
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(wait_for_exit(child, kPatience));  // gone is gone
  ::close(hold[0]);
}

}  // namespace
}  // namespace weft::client
