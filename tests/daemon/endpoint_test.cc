// The two sockets, for real: good frames, garbage, oversized frames, several clients, departures, addresses
// in use.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include <zmq.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "daemon/client_endpoint.h"
#include "daemon/control_endpoint.h"
#include "tests/support/temp_folder.h"

namespace weft::daemon {
namespace {

using testing::HasSubstr;

class EndpointTest : public testing::Test {
 protected:
  // Turns the loop until `done` has said yes once, at most ten seconds.
  void run_until(const std::function<bool()>& done) {
    bool was_done = false;
    Timer deadline(loop_, [&] { loop_.stop(); });
    deadline.start(std::chrono::seconds(10));
    TurnHook hook(
        loop_, [&] { return was_done = was_done || done(); },
        [&] {
          if (was_done) loop_.stop();
        });
    Timer tick(loop_, [] {});  // what `done` looks at may not wake the loop
    tick.start(std::chrono::milliseconds(1), std::chrono::milliseconds(1));
    loop_.run();
    ASSERT_TRUE(was_done);
  }
  test::TempFolder temporary_;
  const std::string folder_ = temporary_.path();
  EventLog log_{LogLevel::kError};
  Loop loop_;
};

// ---- control socket

class ControlClient {
 public:
  explicit ControlClient(const std::string& path)
      : socket_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, path.c_str());
    connected_ = ::connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  }
  bool connected() const { return connected_; }
  void send(const std::string& bytes) {
    EXPECT_EQ(::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(bytes.size()));
  }
  // Takes what has come; the next whole reply, if there is one.
  std::optional<wire::ControlReply> poll() {
    char buffer[4096];
    const ssize_t got = ::recv(socket_.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (got == 0) closed_ = true;
    if (got > 0) bytes_.append(buffer, static_cast<size_t>(got));
    uint32_t length = 0;
    if (bytes_.size() < 4) return std::nullopt;
    std::memcpy(&length, bytes_.data(), 4);
    if (bytes_.size() < 4 + length) return std::nullopt;
    wire::ControlReply reply;
    EXPECT_TRUE(reply.ParseFromArray(bytes_.data() + 4, static_cast<int>(length)));
    bytes_.erase(0, 4 + length);
    return reply;
  }
  // The other side is closed for both directions.
  bool broken() { return ::send(socket_.get(), "", 1, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && errno == EPIPE; }
  bool closed() {
    (void)poll();
    return closed_;
  }

 private:
  kv::Descriptor socket_;
  bool connected_ = false, closed_ = false;
  std::string bytes_;
};

std::string framed(const std::string& body) {
  std::string bytes;
  for (int i = 0; i < 4; ++i) bytes += static_cast<char>(body.size() >> (8 * i) & 0xff);
  return bytes + body;
}

std::string explain_frame(uint64_t request) {
  wire::ControlRequest message;
  message.set_version(1);
  message.mutable_explain()->set_request(request);
  return framed(message.SerializeAsString());
}

class ControlTest : public EndpointTest {
 protected:
  ControlTest() {
    auto endpoint = ControlEndpoint::listen(
        loop_, path_, [this](const wire::ControlRequest& request, ControlEndpoint::Reply reply) {
          if (request.explain().request() >= 100) {
            held_.push_back(std::move(reply));
            return;
          }
          wire::ControlReply answer;
          answer.mutable_explain()->mutable_status()->set_request(request.explain().request());
          reply(answer);
        });
    CHECK(endpoint.has_value(), endpoint.error().text());
    endpoint_ = std::move(endpoint).value();
  }
  wire::ControlReply next(ControlClient& client) {
    std::optional<wire::ControlReply> reply;
    run_until([&] { return reply.has_value() || (reply = client.poll()).has_value(); });
    return reply.value_or(wire::ControlReply());
  }
  std::string path_ = folder_ + "/control.sock";
  std::vector<ControlEndpoint::Reply> held_;
  std::unique_ptr<ControlEndpoint> endpoint_;
};

TEST_F(ControlTest, IsTheOwnersAloneAndLeavesNoFile) {
  struct stat info {};
  ASSERT_EQ(::stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  endpoint_.reset();
  EXPECT_NE(::stat(path_.c_str(), &info), 0);
}

TEST_F(ControlTest, AnswersSeveralClientsAndPipelinedRequestsInOrder) {
  ControlClient a(path_), b(path_);
  ASSERT_TRUE(a.connected() && b.connected());
  const std::string two = explain_frame(1) + explain_frame(2);
  a.send(two.substr(0, 5));
  b.send(explain_frame(3));
  EXPECT_EQ(next(b).explain().status().request(), 3u);
  a.send(two.substr(5));
  EXPECT_EQ(next(a).explain().status().request(), 1u);
  const auto second = next(a);
  EXPECT_EQ(second.explain().status().request(), 2u);
  EXPECT_EQ(second.version(), 1u);
}

TEST_F(ControlTest, ALateAnswerHoldsBackOnlyItsOwnConnection) {
  ControlClient slow(path_), quick(path_);
  slow.send(explain_frame(100) + explain_frame(5));
  run_until([&] { return held_.size() == 1; });
  quick.send(explain_frame(6));
  EXPECT_EQ(next(quick).explain().status().request(), 6u);
  EXPECT_FALSE(slow.poll().has_value());
  wire::ControlReply late;
  late.mutable_explain()->mutable_status()->set_request(100);
  held_[0](late);
  EXPECT_EQ(next(slow).explain().status().request(), 100u);
  EXPECT_EQ(next(slow).explain().status().request(), 5u);
}

TEST_F(ControlTest, AnAnswerToAClientThatLeftIsDropped) {
  {
    ControlClient client(path_);
    client.send(explain_frame(100));
    run_until([&] { return held_.size() == 1; });
  }
  ControlClient other(path_);
  other.send(explain_frame(1));
  EXPECT_EQ(next(other).explain().status().request(), 1u);
  held_[0](wire::ControlReply());
  endpoint_.reset();
  held_[0](wire::ControlReply());  // also after the endpoint is gone
}

TEST_F(ControlTest, GarbageAndOversizedFramesGetATypedErrorThenTheEnd) {
  const struct {
    std::string bytes;
    wire::WireErrorCode code;
  } cases[] = {
      {framed("\xff\xff\xff garbage"), wire::ERROR_BAD_MESSAGE},
      {framed(""), wire::ERROR_BAD_MESSAGE},
      {std::string("\xff\xff\xff\x7f", 4), wire::ERROR_TOO_LARGE},
      {"GET / HTTP/1.1\r\n\r\n", wire::ERROR_TOO_LARGE},
  };
  for (const auto& bad : cases) {
    ControlClient client(path_);
    client.send(bad.bytes);
    EXPECT_EQ(next(client).error().code(), bad.code);
    run_until([&] { return client.closed(); });
  }
  ControlClient good(path_);
  good.send(explain_frame(1));
  EXPECT_EQ(next(good).explain().status().request(), 1u);
}

TEST_F(ControlTest, TooManyConnectionsAreRefused) {
  std::vector<std::unique_ptr<ControlClient>> clients;
  for (size_t i = 0; i < ControlEndpoint::kConnectionsMax; ++i) {
    clients.push_back(std::make_unique<ControlClient>(path_));
    clients.back()->send(explain_frame(1));
    EXPECT_EQ(next(*clients.back()).explain().status().request(), 1u);
  }
  ControlClient extra(path_);
  EXPECT_EQ(next(extra).error().code(), wire::ERROR_RESOURCE_EXHAUSTED);
  // It is closed although this side keeps it open: refused clients do not add up.
  run_until([&] { return extra.broken(); });
}

TEST_F(ControlTest, ASuccessorsFilesAreLeftAlone) {
  std::filesystem::remove_all(folder_);  // under a running daemon
  std::filesystem::create_directory(folder_);
  auto successor =
      ControlEndpoint::listen(loop_, path_, [](const wire::ControlRequest&, ControlEndpoint::Reply) {});
  ASSERT_TRUE(successor.has_value()) << successor.error().text();
  endpoint_.reset();
  EXPECT_TRUE(ControlClient(path_).connected());
}

TEST_F(ControlTest, APathInUseIsRefusedAndADeadOneTaken) {
  const auto listen = [&](const std::string& path) {
    return ControlEndpoint::listen(loop_, path, [](const wire::ControlRequest&, ControlEndpoint::Reply) {});
  };
  auto second = listen(path_);
  ASSERT_FALSE(second.has_value());
  EXPECT_EQ(second.error().code, ErrorCode::kFailedPrecondition);
  EXPECT_THAT(second.error().message, HasSubstr("in use"));
  // A socket whose process died.
  const std::string dead = folder_ + "/dead.sock";
  {
    kv::Descriptor socket(::socket(AF_UNIX, SOCK_STREAM, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strcpy(address.sun_path, dead.c_str());
    ASSERT_EQ(::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  EXPECT_TRUE(listen(dead).has_value());
  const std::string file = folder_ + "/file";
  std::ofstream(file) << "precious";
  EXPECT_THAT(listen(file).error().message, HasSubstr("is no socket"));
  EXPECT_TRUE(std::filesystem::exists(file));
}

// ---- client socket

struct Recorder : ClientEndpoint::Listener {
  void client_frame(const ClientIdentity& client, std::string_view frame) override {
    frames.emplace_back(client, std::string(frame));
  }
  void client_bad_message(const ClientIdentity& client) override { bad.push_back(client); }
  void client_gone(const ClientIdentity& client) override { gone.push_back(client); }
  std::vector<std::pair<ClientIdentity, std::string>> frames;
  std::vector<ClientIdentity> bad, gone;
};

class ClientTest : public EndpointTest {
 protected:
  ClientTest() {
    ClientEndpointLimits limits;
    limits.frame_bytes = 1 << 20;
    limits.queue_frames = 4;
    auto endpoint = ClientEndpoint::bind(loop_, log_, address_, limits, recorder_);
    CHECK(endpoint.has_value(), endpoint.error().text());
    endpoint_ = std::move(endpoint).value();
  }
  ~ClientTest() override {
    for (void* socket : sockets_) zmq_close(socket);
    zmq_ctx_term(context_);
  }
  void* dealer(int receive_queue = 1000) {
    void* socket = zmq_socket(context_, ZMQ_DEALER);
    const int linger = 0;
    zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof linger);
    zmq_setsockopt(socket, ZMQ_RCVHWM, &receive_queue, sizeof receive_queue);
    EXPECT_EQ(zmq_connect(socket, endpoint_->address().c_str()), 0);
    sockets_.push_back(socket);
    return socket;
  }
  void close(void* socket) {
    zmq_close(socket);
    std::erase(sockets_, socket);
  }
  static void send(void* socket, const std::string& text, int flags = 0) {
    EXPECT_EQ(zmq_send(socket, text.data(), text.size(), flags), static_cast<int>(text.size()));
  }
  std::string address_ = "ipc://" + folder_ + "/client.sock";
  Recorder recorder_;
  std::unique_ptr<ClientEndpoint> endpoint_;
  void* context_ = zmq_ctx_new();
  std::vector<void*> sockets_;
};

TEST_F(ClientTest, FramesGoBothWaysAndABurstIsNotStuck) {
  void* client = dealer();
  for (int i = 0; i < 500; ++i) send(client, "frame " + std::to_string(i));
  run_until([&] { return recorder_.frames.size() == 500; });
  EXPECT_EQ(recorder_.frames[499].second, "frame 499");
  EXPECT_EQ(endpoint_->send(recorder_.frames[0].first, "hello"), ClientEndpoint::Sent::kSent);
  char buffer[16];
  ASSERT_EQ(zmq_recv(client, buffer, sizeof buffer, 0), 5);
}

TEST_F(ClientTest, MoreFramesThanOneAreABadMessage) {
  void* client = dealer();
  send(client, "one", ZMQ_SNDMORE);
  send(client, "two", ZMQ_SNDMORE);
  send(client, "three");
  send(client, "good");
  run_until([&] { return recorder_.frames.size() == 1; });
  EXPECT_EQ(recorder_.bad.size(), 1u);
  EXPECT_EQ(recorder_.frames[0].second, "good");
}

TEST_F(ClientTest, ADepartureIsToldWithoutSendingAnything) {
  void* leaver = dealer();
  void* stayer = dealer();
  send(leaver, "a");
  send(stayer, "b");
  run_until([&] { return recorder_.frames.size() == 2; });
  const auto identity = recorder_.frames[recorder_.frames[0].second == "a" ? 0 : 1].first;
  close(leaver);
  run_until([&] { return !recorder_.gone.empty(); });
  EXPECT_THAT(recorder_.gone, testing::ElementsAre(identity));
  // The event comes from ZeroMQ's own thread and may be ahead of the socket's own news.
  run_until([&] { return endpoint_->send(identity, "x") == ClientEndpoint::Sent::kGone; });
  EXPECT_EQ(endpoint_->send("nobody", "x"), ClientEndpoint::Sent::kGone);
  // Descriptor numbers are given again: departures keep hitting the right peer.
  for (int i = 0; i < 20; ++i) {
    recorder_.gone.clear();
    recorder_.frames.clear();
    void* next = dealer();
    send(next, "n");
    run_until([&] { return !recorder_.frames.empty(); });
    const auto expected = recorder_.frames[0].first;
    close(next);
    run_until([&] { return !recorder_.gone.empty(); });
    ASSERT_THAT(recorder_.gone, testing::ElementsAre(expected));
  }
}

TEST_F(ClientTest, AClientThatDoesNotReadIsFullAndNotGone) {
  void* client = dealer(1);
  send(client, "a");
  run_until([&] { return !recorder_.frames.empty(); });
  const std::string large(256 << 10, 'x');
  int sent = 0;
  run_until([&] {
    const auto outcome = endpoint_->send(recorder_.frames[0].first, large);
    if (outcome == ClientEndpoint::Sent::kSent) ++sent;
    EXPECT_NE(outcome, ClientEndpoint::Sent::kGone);
    return outcome != ClientEndpoint::Sent::kSent;
  });
  EXPECT_GT(sent, 0);
  std::vector<char> buffer(large.size());
  int got = 0;
  run_until([&] {
    if (zmq_recv(client, buffer.data(), buffer.size(), ZMQ_DONTWAIT) > 0) ++got;
    // The queue may also have been full only until ZeroMQ's own thread came to it: nothing has arrived yet.
    return got > 0 && endpoint_->send(recorder_.frames[0].first, "tail") == ClientEndpoint::Sent::kSent;
  });
}

TEST_F(ClientTest, AnOversizedFrameEndsItsConnectionOnly) {
  void* bad = dealer();
  void* good = dealer();
  send(bad, "first");
  run_until([&] { return recorder_.frames.size() == 1; });
  send(bad, std::string(2 << 20, 'x'));
  run_until([&] { return !recorder_.gone.empty(); });
  send(good, "still here");
  run_until([&] { return recorder_.frames.size() == 2; });
  EXPECT_EQ(recorder_.frames[1].second, "still here");
}

TEST_F(ClientTest, GarbageOnTheSocketDisturbsNobody) {
  kv::Descriptor raw(::socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, address_.c_str() + 6);
  ASSERT_EQ(::connect(raw.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  const std::string garbage(4096, '\xaa');
  EXPECT_GT(::send(raw.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL), 0);
  void* client = dealer();
  send(client, "fine");
  // Some garbage reads as frames of the oldest ZeroMQ protocol; then it is told like any other frame.
  run_until([&] {
    return std::any_of(recorder_.frames.begin(), recorder_.frames.end(),
                       [](const auto& frame) { return frame.second == "fine"; });
  });
}

TEST_F(ClientTest, AddressesInUseAreRefusedAndTheFileGoes) {
  Recorder other;
  auto second = ClientEndpoint::bind(loop_, log_, address_, {}, other);
  ASSERT_FALSE(second.has_value());
  EXPECT_EQ(second.error().code, ErrorCode::kFailedPrecondition);
  auto tcp = ClientEndpoint::bind(loop_, log_, "tcp://127.0.0.1:*", {}, other);
  ASSERT_TRUE(tcp.has_value()) << tcp.error().text();
  EXPECT_THAT((*tcp)->address(), testing::MatchesRegex("tcp://127.0.0.1:[0-9]+"));
  auto same = ClientEndpoint::bind(loop_, log_, (*tcp)->address(), {}, other);
  ASSERT_FALSE(same.has_value());
  EXPECT_EQ(same.error().code, ErrorCode::kFailedPrecondition);
  endpoint_->stop_accepting();
  EXPECT_FALSE(std::filesystem::exists(address_.substr(6)));
}

TEST_F(ClientTest, ASuccessorsFileIsLeftAlone) {
  std::filesystem::remove_all(folder_);  // under a running daemon
  std::filesystem::create_directory(folder_);
  Recorder other;
  auto successor = ClientEndpoint::bind(loop_, log_, address_, {}, other);
  ASSERT_TRUE(successor.has_value()) << successor.error().text();
  endpoint_->stop_accepting();
  EXPECT_TRUE(std::filesystem::exists(address_.substr(6)));
}

TEST(OwnedFolderTest, GoesIfItWasMadeAndIsEmpty) {
  const test::TempFolder temporary;
  const std::string path = temporary.path() + "/run", deep = temporary.path() + "/a/b";
  {
    auto made = OwnedFolder::make(path, "--control-socket");
    ASSERT_TRUE(made.has_value()) << made.error().text();
    EXPECT_EQ(std::filesystem::status(path).permissions(), std::filesystem::perms::owner_all);
    const auto found = OwnedFolder::make(path, "--client-endpoint");
    ASSERT_TRUE(found.has_value());
  }
  EXPECT_FALSE(std::filesystem::exists(path));
  {
    const OwnedFolder below = OwnedFolder::make(deep, "--control-socket").value();
    std::ofstream(deep + "/note") << "somebody's";
  }
  EXPECT_TRUE(std::filesystem::exists(deep));
  EXPECT_EQ(OwnedFolder::make(deep + "/note/x", "--control-socket").error().field, "--control-socket");
}

}  // namespace
}  // namespace weft::daemon
