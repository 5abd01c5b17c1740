// Whatever is sent: a typed error that names the field, and a daemon that serves on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <zmq.h>

#include <cmath>
#include <cstring>

#include "proto/convert.h"
#include "tests/integration/harness.h"

namespace weft::integration {
namespace {

using testing::HasSubstr;

class BadInput : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    daemon_ = new Daemon({"--workers", "2", "--max-step-rows", "128", "--pool-tokens", "4096"});
    ASSERT_TRUE(daemon_->wait_ready());
  }
  static void TearDownTestSuite() {
    delete daemon_;
    daemon_ = nullptr;
  }
  void TearDown() override {
    auto client = daemon_->client();
    EXPECT_EQ(run_request(client, text_request("abc abc abc", 3)).tokens.size(), 3u);
    EXPECT_EQ(daemon_->status().running(), 0u);
    EXPECT_EQ(daemon_->status().worker_restarts(), 0u);
  }
  // The error that a request meets, at once or as its end.
  static Error refusal(const wire::GenerateRequest& request) {
    auto client = daemon_->client();
    const Answer answer = run_request(client, request);
    if (answer.failure) return *answer.failure;
    EXPECT_EQ(answer.finished.reason(), "error");
    return from_wire(answer.finished.error());
  }
  static Daemon* daemon_;
};
Daemon* BadInput::daemon_ = nullptr;

TEST_F(BadInput, EveryBadFieldIsNamed) {
  const struct {
    const char* field;
    ErrorCode code;
    std::function<void(wire::GenerateRequest&)> spoil;
  } cases[] = {
      {"model", ErrorCode::kNotFound, [](auto& r) { r.set_model("gpt"); }},
      {"text", ErrorCode::kInvalidArgument, [](auto& r) { r.set_text(""); }},
      {"tokens", ErrorCode::kInvalidArgument, [](auto& r) { r.mutable_tokens(); }},
      {"tokens", ErrorCode::kInvalidArgument, [](auto& r) { r.mutable_tokens()->add_ids(1u << 30); }},
      {"prompt", ErrorCode::kInvalidArgument, [](auto& r) { r.clear_prompt(); }},
      {"temperature", ErrorCode::kInvalidArgument, [](auto& r) { r.set_temperature(NAN); }},
      {"temperature", ErrorCode::kInvalidArgument, [](auto& r) { r.set_temperature(-1); }},
      {"top_p", ErrorCode::kInvalidArgument, [](auto& r) { r.set_top_p(2); }},
      {"top_k", ErrorCode::kInvalidArgument, [](auto& r) { r.set_top_k(1u << 31); }},
      {"decode", ErrorCode::kInvalidArgument, [](auto& r) { r.set_decode("dcp(3)"); }},
      {"prefill", ErrorCode::kInvalidArgument, [](auto& r) { r.set_prefill("sideways"); }},
      {"index", ErrorCode::kInvalidArgument, [](auto& r) { r.set_index("lost"); }},
      {"max_tokens", ErrorCode::kTooLarge, [](auto& r) { r.set_max_tokens(1u << 31); }},
  };
  for (const auto& bad : cases) {
    auto request = text_request("some text", 4);
    bad.spoil(request);
    const Error error = refusal(request);
    EXPECT_EQ(error.field, bad.field) << error.text();
    EXPECT_EQ(error_code_name(error.code), std::string(error_code_name(bad.code))) << error.text();
  }
}

TEST_F(BadInput, PromptsBeyondThePoolOrTheContextAreTooLarge) {
  const Error pool = refusal(text_request(std::string(5000, 'x'), 4));  // the pool holds 4096
  EXPECT_EQ(pool.code, ErrorCode::kTooLarge) << pool.text();
  EXPECT_EQ(pool.field, "text");
  EXPECT_THAT(pool.message, HasSubstr("for 4096 tokens")) << pool.text();
  EXPECT_EQ(daemon_->status().pool_tokens(), 4096u);
  const Error context = refusal(text_request(std::string(1'100'000, 'x'), 4));
  EXPECT_EQ(context.code, ErrorCode::kTooLarge) << context.text();
  EXPECT_EQ(context.field, "text");
  wire::GenerateRequest tokens;
  for (int i = 0; i < 5000; ++i) tokens.mutable_tokens()->add_ids(97);
  EXPECT_EQ(refusal(tokens).field, "tokens");
  auto greedy = text_request("abc", 1u << 31);
  EXPECT_EQ(refusal(greedy).field, "max_tokens");
}

TEST_F(BadInput, GarbageOnTheClientSocket) {
  void* context = zmq_ctx_new();
  void* socket = zmq_socket(context, ZMQ_DEALER);
  const int linger = 0, timeout = 60'000;
  zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof linger);
  zmq_setsockopt(socket, ZMQ_RCVTIMEO, &timeout, sizeof timeout);
  ASSERT_EQ(zmq_connect(socket, daemon_->endpoint().c_str()), 0);
  const auto answer = [&](const std::string& frame, bool more) {
    EXPECT_GE(zmq_send(socket, frame.data(), frame.size(), more ? ZMQ_SNDMORE : 0), 0);
    if (more) {
      EXPECT_GE(zmq_send(socket, "x", 1, 0), 0);
    }
    char buffer[4096];
    const int got = zmq_recv(socket, buffer, sizeof buffer, 0);
    EXPECT_GT(got, 0);
    wire::ClientReply reply;
    EXPECT_TRUE(reply.ParseFromArray(buffer, got));
    return reply.error().code();
  };
  EXPECT_EQ(answer("\xff\xfe garbage", false), wire::ERROR_BAD_MESSAGE);
  EXPECT_EQ(answer("", false), wire::ERROR_BAD_MESSAGE);
  EXPECT_EQ(answer("two", true), wire::ERROR_BAD_MESSAGE);
  wire::ClientRequest future;
  future.set_version(9);
  EXPECT_EQ(answer(future.SerializeAsString(), false), wire::ERROR_BAD_MESSAGE);
  // Beyond the frame limit: the connection is dropped, nothing else.
  const std::string huge(size_t{65} << 20, 'x');
  EXPECT_GE(zmq_send(socket, huge.data(), huge.size(), 0), 0);
  zmq_close(socket);
  zmq_ctx_term(context);
}

// The reply carries the tag, or the client would wait for ever.
TEST_F(BadInput, TextThatIsNotUtf8) {
  auto client = daemon_->client();
  const std::function<void(wire::GenerateRequest&)> spoils[] = {
      [](auto& r) { r.set_model("\xff\xfe"); },
      [](auto& r) { r.set_decode("\xff\xfe"); },
      [](auto& r) { r.set_cache_salt("\xff\xfe"); },
  };
  for (const auto& spoil : spoils) {
    auto request = text_request("some text", 4);
    spoil(request);
    const auto outcome = client.generate(request, {}, kPatience);
    ASSERT_FALSE(outcome.has_value());
    EXPECT_EQ(error_code_name(outcome.error().code), std::string("bad_message")) << outcome.error().text();
  }
}

TEST_F(BadInput, GarbageOnTheControlSocket) {
  for (const std::string& garbage : {std::string("\xff\xff\xff\xff!", 5), std::string("\x04\0\0\0zzzz", 8)}) {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, daemon_->control_socket().c_str());
    ASSERT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    ASSERT_GT(::send(fd, garbage.data(), garbage.size(), MSG_NOSIGNAL), 0);
    std::string bytes;
    char buffer[1024];
    for (ssize_t got; (got = ::recv(fd, buffer, sizeof buffer, 0)) > 0;)
      bytes.append(buffer, static_cast<size_t>(got));
    ::close(fd);
    ASSERT_GT(bytes.size(), 4u);  // answered, then closed
    wire::ControlReply reply;
    ASSERT_TRUE(reply.ParseFromArray(bytes.data() + 4, static_cast<int>(bytes.size()) - 4));
    EXPECT_NE(reply.error().code(), wire::ERROR_OK);
  }
}

TEST_F(BadInput, ARequestThatHasEnded) {
  auto client = daemon_->client();
  client::StreamHandlers handlers;
  uint64_t id = 0;
  handlers.accepted = [&](const wire::Accepted& accepted) { id = accepted.request(); };
  (void)run_request(client, text_request("abc abc abc", 1), handlers);
  wire::ControlRequest cancel, regroup;
  cancel.mutable_cancel()->set_request(id);
  const wire::WireError cancelled = daemon_->control(cancel).error();
  EXPECT_EQ(cancelled.code(), wire::ERROR_FAILED_PRECONDITION);
  EXPECT_EQ(cancelled.message(), "request " + std::to_string(id) + " has ended");
  regroup.mutable_regroup()->add_requests(id);
  regroup.mutable_regroup()->set_decode("dp");
  const wire::RegroupOutcome outcome = daemon_->control(regroup).regroup().outcomes(0);
  EXPECT_EQ(outcome.error().code(), cancelled.code());
  EXPECT_EQ(outcome.error().message(), cancelled.message());
}

TEST_F(BadInput, OthersRequestsAndUnknownOnes) {
  auto client = daemon_->client();
  const auto cancelled = client.cancel(123456, kPatience);
  ASSERT_FALSE(cancelled.has_value());
  EXPECT_EQ(cancelled.error().code, ErrorCode::kNotFound);
  wire::ControlRequest explain;
  explain.mutable_explain()->set_request(123456);
  EXPECT_EQ(daemon_->control(explain).error().code(), wire::ERROR_NOT_FOUND);
  wire::ControlRequest regroup;
  regroup.mutable_regroup()->add_requests(123456);
  EXPECT_EQ(daemon_->control(regroup).error().code(), wire::ERROR_INVALID_ARGUMENT);  // asks for nothing
  regroup.mutable_regroup()->set_decode("dcp(3)");
  EXPECT_EQ(daemon_->control(regroup).error().code(), wire::ERROR_INVALID_ARGUMENT);
  regroup.mutable_regroup()->set_decode("dp");
  EXPECT_EQ(daemon_->control(regroup).regroup().outcomes(0).error().code(), wire::ERROR_NOT_FOUND);
}

}  // namespace
}  // namespace weft::integration
