// The client library against real sockets with a scripted daemon behind them.
#include "tools/client/client.h"

#include <gtest/gtest.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

#include "tests/tools/fake_daemon.h"

namespace weft::client {
namespace {

using test::FakeDaemon;
using namespace std::chrono_literals;

constexpr Duration kPatience = 30s;  // only ever spent when something is broken

wire::ClientReply accepted(uint64_t request, uint64_t prompt_tokens = 3) {
  wire::ClientReply reply;
  reply.mutable_accepted()->set_request(request);
  reply.mutable_accepted()->set_prompt_tokens(prompt_tokens);
  return reply;
}

wire::ClientReply token(uint64_t request, uint64_t index, const std::string& text) {
  wire::ClientReply reply;
  reply.mutable_token()->set_request(request);
  reply.mutable_token()->set_index(index);
  reply.mutable_token()->set_token(static_cast<uint32_t>(100 + index));
  reply.mutable_token()->set_text(text);
  return reply;
}

wire::ClientReply finished(uint64_t request, const std::string& reason) {
  wire::ClientReply reply;
  reply.mutable_finished()->set_request(request);
  reply.mutable_finished()->set_reason(reason);
  return reply;
}

std::string no_control(const wire::ControlRequest&) { return {}; }

Client connected(const FakeDaemon& daemon, int interrupt_fd = -1) {
  auto client = Client::connect({daemon.endpoint(), kPatience, interrupt_fd});
  EXPECT_TRUE(client) << client.error().text();
  return std::move(client).value();
}

wire::GenerateRequest prompt(const std::string& text) {
  wire::GenerateRequest request;
  request.set_text(text);
  request.set_max_tokens(4);
  return request;
}

TEST(Client, SaysAtOnceThatNobodyListens) {
  for (const char* endpoint : {"ipc:///tmp/weft-no-such-folder/client.sock", "tcp://127.0.0.1:1"}) {
    const auto client = Client::connect({endpoint, kPatience});
    ASSERT_FALSE(client);
    EXPECT_EQ(client.error().code, ErrorCode::kUnavailable) << client.error().text();
    EXPECT_NE(client.error().message.find("no daemon listens"), std::string::npos) << client.error().text();
  }
}

TEST(Client, RefusesAnEndpointThatIsNone) {
  const auto client = Client::connect({"over there", kPatience});
  ASSERT_FALSE(client);
  EXPECT_EQ(client.error().code, ErrorCode::kInvalidArgument);
}

TEST(Client, StreamsInOrderToTheEnd) {
  FakeDaemon daemon(
      [](const wire::ClientRequest& request, const FakeDaemon::Send& send) {
        ASSERT_TRUE(request.has_generate());
        EXPECT_EQ(request.generate().text(), "hello");
        EXPECT_EQ(request.version(), 1u);
        send(accepted(9));
        wire::ClientReply progress;
        progress.mutable_progress()->set_done(2);
        progress.mutable_progress()->set_total(3);
        send(progress);
        for (uint64_t i = 0; i < 3; ++i) send(token(9, i, std::string(1, static_cast<char>('a' + i))));
        wire::ClientReply digest;
        digest.mutable_digest()->set_position(7);
        send(digest);
        send(finished(9, "length"));
      },
      no_control);
  Client client = connected(daemon);
  std::string seen;
  StreamHandlers handlers;
  handlers.accepted = [&](const auto& a) { seen += "[" + std::to_string(a.request()) + "]"; };
  handlers.progress = [&](const auto& p) {
    seen += std::to_string(p.done()) + "/" + std::to_string(p.total());
  };
  handlers.token = [&](const auto& t) { seen += t.text(); };
  handlers.digest = [&](const auto& d) { seen += "#" + std::to_string(d.position()); };
  const auto outcome = client.generate(prompt("hello"), handlers, kPatience);
  ASSERT_TRUE(outcome) << outcome.error().text();
  EXPECT_EQ(outcome->reason(), "length");
  EXPECT_EQ(seen, "[9]2/3abc#7");
}

TEST(Client, TurnsAnErrorReplyIntoAnError) {
  FakeDaemon daemon(
      [](const wire::ClientRequest&, const FakeDaemon::Send& send) {
        wire::ClientReply reply;
        reply.mutable_error()->set_code(wire::ERROR_TOO_LARGE);
        reply.mutable_error()->set_message("limit 10");
        reply.mutable_error()->set_field("text");
        send(reply);
      },
      no_control);
  Client client = connected(daemon);
  const auto outcome = client.generate(prompt("hello"), {}, kPatience);
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().text(), "too_large: text: limit 10");
}

// Two requests whose replies alternate: each stream sees its own, whichever is read first.
TEST(Client, KeepsStreamsApart) {
  std::vector<uint64_t> tags;
  FakeDaemon daemon(
      [&](const wire::ClientRequest& request, const FakeDaemon::Send& send) {
        tags.push_back(request.tag());
        if (tags.size() < 2) return;
        for (uint64_t i = 0; i < 5; ++i) {
          for (size_t s = 0; s < 2; ++s) {
            wire::ClientReply reply = token(s, i, std::to_string(10 * s + i));
            reply.set_tag(tags[s]);
            send(reply);
          }
        }
        wire::ClientReply stray = token(5, 0, "stray");
        stray.set_tag(999);
        send(stray);
      },
      no_control);
  Client client = connected(daemon);
  const auto first = client.start(prompt("a"));
  const auto second = client.start(prompt("b"));
  ASSERT_TRUE(first && second);
  for (const size_t s : {1u, 0u}) {
    for (uint64_t i = 0; i < 5; ++i) {
      const auto reply = client.next(s == 0 ? *first : *second, kPatience);
      ASSERT_TRUE(reply) << reply.error().text();
      EXPECT_EQ(reply->token().text(), std::to_string(10 * s + i));
    }
  }
}

// The fake sends no token that it has no credit for; a client that grants too little would stop short.
TEST(Client, GrantsCreditAsItReads) {
  struct {
    uint64_t tag = 0, sent = 0, allowed = 0;
  } stream;
  constexpr uint64_t kTokens = 23;
  FakeDaemon daemon(
      [&](const wire::ClientRequest& request, const FakeDaemon::Send& send) {
        if (request.has_generate()) {
          stream.tag = request.tag();
          stream.allowed = request.generate().credit();
          wire::ClientReply reply = accepted(4);
          send(reply);
        } else if (request.has_credit()) {
          EXPECT_EQ(request.credit().request(), 4u);
          stream.allowed += request.credit().tokens();
          EXPECT_LE(stream.allowed, stream.sent + 5);
        }
        while (stream.sent < stream.allowed && stream.sent < kTokens) {
          wire::ClientReply reply = token(4, stream.sent++, "x");
          reply.set_tag(stream.tag);
          send(reply);
        }
        wire::ClientReply last = finished(4, "length");
        last.set_tag(stream.tag);
        if (stream.sent == kTokens) send(last);
      },
      no_control);
  Client client = connected(daemon);
  auto request = prompt("a");
  request.set_credit(5);
  std::string text;
  StreamHandlers handlers;
  handlers.token = [&](const auto& t) { text += t.text(); };
  const auto outcome = client.generate(request, handlers, kPatience);
  ASSERT_TRUE(outcome) << outcome.error().text();
  EXPECT_EQ(text, std::string(kTokens, 'x'));
}

struct Interrupt {
  int descriptor = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  ~Interrupt() { ::close(descriptor); }
  void raise() const {
    const uint64_t one = 1;
    ASSERT_EQ(::write(descriptor, &one, sizeof one), static_cast<ssize_t>(sizeof one));
  }
};

TEST(Client, AnInterruptCancelsAndWaitsForTheEnd) {
  uint64_t stream_tag = 0;
  FakeDaemon daemon(
      [&](const wire::ClientRequest& request, const FakeDaemon::Send& send) {
        if (request.has_generate()) {
          stream_tag = request.tag();
          send(accepted(6));
          send(token(6, 0, "a"));
        } else {
          ASSERT_TRUE(request.has_cancel());
          EXPECT_EQ(request.cancel().request(), 6u);
          wire::ClientReply last = finished(6, "cancelled");
          last.set_tag(stream_tag);
          send(last);
        }
      },
      no_control);
  Interrupt interrupt;
  Client client = connected(daemon, interrupt.descriptor);
  StreamHandlers handlers;
  handlers.token = [&](const auto&) { interrupt.raise(); };
  int interrupts = 0;
  handlers.interrupted = [&] { ++interrupts; };
  const auto outcome = client.generate(prompt("a"), handlers, kPatience);
  ASSERT_TRUE(outcome) << outcome.error().text();
  EXPECT_EQ(outcome->reason(), "cancelled");
  EXPECT_EQ(interrupts, 1);
}

TEST(Client, ASecondInterruptLeaves) {
  Interrupt interrupt;
  FakeDaemon daemon(
      [&](const wire::ClientRequest& request, const FakeDaemon::Send& send) {
        if (request.has_generate()) send(accepted(6));
        interrupt.raise();  // once at the request, once at the cancel, which is never answered
      },
      no_control);
  Client client = connected(daemon, interrupt.descriptor);
  StreamHandlers handlers;
  const auto outcome = client.generate(prompt("a"), handlers, kPatience);
  ASSERT_FALSE(outcome);
  EXPECT_TRUE(is_interrupt(outcome.error())) << outcome.error().text();
}

TEST(Client, TimesOutAndCancels) {
  std::atomic<uint64_t> cancelled{0};
  FakeDaemon daemon(
      [&](const wire::ClientRequest& request, const FakeDaemon::Send& send) {
        if (request.has_generate()) send(accepted(8));
        if (request.has_cancel()) cancelled = request.cancel().request();
        if (request.has_list_models()) {
          wire::ClientReply reply;
          reply.mutable_models()->add_models()->set_name("recall");
          send(reply);
        }
      },
      no_control);
  Client client = connected(daemon);
  const auto outcome = client.generate(prompt("a"), {}, 200ms);
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code, ErrorCode::kDeadlineExceeded);
  // A later exchange on the same connection comes after the cancel.
  const auto models = client.list_models(kPatience);
  ASSERT_TRUE(models) << models.error().text();
  EXPECT_EQ(models->models(0).name(), "recall");
  EXPECT_EQ(cancelled, 8u);
}

TEST(Client, ADaemonThatGoesAwayIsFinal) {
  FakeDaemon daemon([](const wire::ClientRequest&, const FakeDaemon::Send& send) { send(accepted(1)); },
                    no_control);
  Client client = connected(daemon);
  const auto tag = client.start(prompt("a"));
  ASSERT_TRUE(tag);
  ASSERT_TRUE(client.next(*tag, kPatience));
  daemon.stop();
  const auto reply = client.next(*tag, kPatience);
  ASSERT_FALSE(reply);
  EXPECT_EQ(reply.error().code, ErrorCode::kUnavailable) << reply.error().text();
  const auto again = client.start(prompt("a"));
  ASSERT_FALSE(again);
  EXPECT_EQ(again.error().code, ErrorCode::kUnavailable);
}

TEST(Client, RefusesWhatItCannotRead) {
  FakeDaemon daemon(
      [](const wire::ClientRequest& request, const FakeDaemon::Send& send) {
        wire::ClientReply reply = accepted(1);
        reply.set_version(request.tag() == 1 ? 1 : 77);
        send(reply);
      },
      no_control);
  daemon.send_raw_next("\xff\xff\xff\xff");
  Client client = connected(daemon);
  const auto garbage = client.generate(prompt("a"), {}, kPatience);
  ASSERT_FALSE(garbage);
  EXPECT_EQ(garbage.error().code, ErrorCode::kBadMessage) << garbage.error().text();
  const auto other = client.generate(prompt("a"), {}, kPatience);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, ErrorCode::kUnsupported) << other.error().text();
}

TEST(Client, ShortCalls) {
  FakeDaemon daemon(
      [](const wire::ClientRequest& request, const FakeDaemon::Send& send) {
        wire::ClientReply reply;
        if (request.has_tokenize()) {
          EXPECT_EQ(request.tokenize().text(), "ab");
          reply.mutable_tokenize()->add_ids(97);
          reply.mutable_tokenize()->add_ids(98);
        } else if (request.cancel().request() == 5) {
          reply.mutable_cancel()->set_request(5);
        } else {
          reply.mutable_error()->set_code(wire::ERROR_NOT_FOUND);
        }
        send(reply);
      },
      no_control);
  Client client = connected(daemon);
  const auto ids = client.tokenize("", "ab", kPatience);
  ASSERT_TRUE(ids);
  EXPECT_EQ(*ids, (std::vector<uint32_t>{97, 98}));
  EXPECT_TRUE(client.cancel(5, kPatience));
  const auto missing = client.cancel(6, kPatience);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
}

TEST(Client, RefusesTextThatIsNotUtf8) {
  FakeDaemon daemon([](const wire::ClientRequest&, const FakeDaemon::Send&) { FAIL() << "was sent"; },
                    no_control);
  Client client = connected(daemon);
  const auto outcome = client.generate(prompt("caf\xe9"), {}, kPatience);
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(outcome.error().field, "text");
}

}  // namespace
}  // namespace weft::client
