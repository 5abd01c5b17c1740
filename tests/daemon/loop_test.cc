// The loop's handles, real child processes on it, and the log's line format.
#include "daemon/loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <thread>

#include "daemon/event_log.h"
#include "daemon/process.h"
#include "kv/packet_socket.h"

namespace weft::daemon {
namespace {

using testing::HasSubstr;

TEST(Loop, DeferTimerAndWorkRunInTheirPlaces) {
  Loop loop;
  std::vector<int> order;
  const auto loop_thread = std::this_thread::get_id();
  std::thread::id work_thread;
  Timer timer(loop, [&] {
    order.push_back(2);
    run_off_loop(
        loop, [&] { work_thread = std::this_thread::get_id(); },
        [&] {
          EXPECT_EQ(std::this_thread::get_id(), loop_thread);
          order.push_back(3);
          loop.stop();
        });
  });
  loop.defer([&] {
    order.push_back(1);
    timer.start(std::chrono::milliseconds(1));
  });
  EXPECT_TRUE(order.empty());
  loop.run();
  EXPECT_THAT(order, testing::ElementsAre(1, 2, 3));
  EXPECT_NE(work_thread, loop_thread);
}

TEST(Loop, AHandleMayDieInItsOwnCallback) {
  Loop loop;
  auto timer = std::make_unique<std::unique_ptr<Timer>>();
  *timer = std::make_unique<Timer>(loop, [&] {
    timer->reset();
    loop.stop();
  });
  (*timer)->start(Duration(0));
  loop.run();
  EXPECT_EQ(*timer, nullptr);
}

TEST(Loop, ABusyHookKeepsTheLoopFromWaiting) {
  Loop loop;
  int turns = 0;
  TurnHook hook(
      loop, [&] { return turns < 5; },
      [&] {
        if (++turns == 5) loop.stop();
      });
  loop.run();  // without the hook nothing would ever wake it
  EXPECT_EQ(turns, 5);
}

std::string end_of(Loop& loop, const Process& process) {
  std::string how;
  Watch watch(loop, process.pidfd.get(), [&](int) {
    if (auto ended = reap(process)) {
      how = ended->text;
      loop.stop();
    }
  });
  watch.start(kReadable);
  loop.run();
  return how;
}

TEST(Process, ExitCodesAndSignalsAreTold) {
  Loop loop;
  auto process = spawn("/bin/sh", {"-c", "exit 7"});
  ASSERT_TRUE(process.has_value()) << process.error().text();
  EXPECT_EQ(end_of(loop, *process), "exit 7");
  process = spawn("/bin/sleep", {"1000"});
  ASSERT_TRUE(process.has_value());
  EXPECT_FALSE(reap(*process).has_value());
  kill_process(*process);
  EXPECT_EQ(end_of(loop, *process), "signal 9 (Killed)");
  kill_process(*process);  // harmless after the end
}

TEST(Process, AMissingBinaryIsAnError) {
  auto process = spawn("/nowhere/weft-worker", {});
  ASSERT_FALSE(process.has_value());
  EXPECT_THAT(process.error().text(), HasSubstr("/nowhere/weft-worker"));
}

TEST(Process, TheChildHasItsSocketItsOutputAndNothingElse) {
  Loop loop;
  kv::Descriptor inherited(::dup(STDERR_FILENO));  // not close-on-exec, and still not passed on
  auto process = spawn("/bin/ls", {"/proc/self/fd"});
  ASSERT_TRUE(process.has_value());
  EXPECT_EQ(end_of(loop, *process), "exit 0");
  char text[256] = {};
  ASSERT_GT(::read(process->output.get(), text, sizeof text - 1), 0);
  EXPECT_STREQ(text, "0\n1\n2\n3\n4\n");  // 4 is the folder that ls reads

  process = spawn("/bin/sh", {"-c", "printf hello >&3"});
  ASSERT_TRUE(process.has_value());
  EXPECT_EQ(end_of(loop, *process), "exit 0");
  auto packet = kv::receive_packet(process->socket.get());
  ASSERT_TRUE(packet.has_value() && packet->has_value());
  EXPECT_EQ((*packet)->bytes.size(), 5u);
  packet = kv::receive_packet(process->socket.get());
  ASSERT_FALSE(packet.has_value());
  EXPECT_EQ(packet.error().code, ErrorCode::kUnavailable);
}

TEST(EventLog, LinesInBothFormats) {
  const auto line = [](LogFormat format) {
    return log_line(format, LogLevel::kWarning, "T", "worker_exited",
                    {{"rank", 3}, {"reason", "signal 9 (Killed)"}, {"again", true}, {"delay_s", 0.5}});
  };
  const char* json =
      R"x({"time":"T","level":"warning","event":"worker_exited","rank":3,"reason":"signal 9 (Killed)",)x"
      R"x("again":true,"delay_s":0.5})x";
  EXPECT_EQ(line(LogFormat::kJson), json);
  EXPECT_EQ(line(LogFormat::kText),
            "T warning worker_exited rank=3 reason=\"signal 9 (Killed)\" again=true delay_s=0.5");
  EXPECT_EQ(log_line(LogFormat::kJson, LogLevel::kInfo, "T", "e", {{"bytes", std::string("a\xff\"\n")}}),
            "{\"time\":\"T\",\"level\":\"info\",\"event\":\"e\",\"bytes\":\"a\xEF\xBF\xBD\\\"\\n\"}");
}

}  // namespace
}  // namespace weft::daemon
