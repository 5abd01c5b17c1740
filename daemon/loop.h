// libuv handles as owned values: the daemon's one loop, its timers, watched descriptors, signals and work.
//
// Everything of the daemon that changes state runs on the thread that calls Loop::run(). A handle is closed
// by its destructor; libuv frees it one turn later, so a callback may destroy the very object that it belongs
// to. Only run_off_loop()'s work runs elsewhere, on libuv's pool; it may touch what it captured and nothing
// else.
#pragma once

#include <functional>
#include <memory>

#include "proto/vocab/clock.h"

struct uv_loop_s;  // libuv stays inside loop.cc

namespace weft::daemon {

// What a Watch waits for; numbers of libuv.
inline constexpr int kReadable = 1;
inline constexpr int kWritable = 2;

class Loop {
 public:
  Loop();
  // Every handle made on this loop is gone by now; waits for the last closes.
  ~Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  uv_loop_s* get();
  // Until stop(). May be called again.
  void run();
  void stop();
  // On the monotonic clock.
  Time now() const;
  // Runs `task` on this thread, soon, outside of the present callback.
  void defer(std::function<void()> task);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

class Timer {
 public:
  Timer(Loop& loop, std::function<void()> expired);
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  void start(Duration delay, Duration repeat = Duration(0));
  void stop();

 private:
  struct State;
  State* state_;
};

// Watches a descriptor that the caller owns and keeps open while watching.
class Watch {
 public:
  Watch(Loop& loop, int fd, std::function<void(int events)> ready);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  void start(int events);  // kReadable | kWritable
  void stop();

 private:
  struct State;
  State* state_;
};

class SignalWatch {
 public:
  SignalWatch(Loop& loop, int signal, std::function<void()> raised);
  ~SignalWatch();
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;

 private:
  struct State;
  State* state_;
};

// Called in every turn of the loop, before it waits and after it waited. While `busy` says true the loop does
// not wait. For descriptors that are edge triggered and must be asked again and again (ZeroMQ's).
class TurnHook {
 public:
  TurnHook(Loop& loop, std::function<bool()> busy, std::function<void()> turn);
  ~TurnHook();
  TurnHook(const TurnHook&) = delete;
  TurnHook& operator=(const TurnHook&) = delete;

 private:
  struct State;
  State* state_;
};

// Runs `work` on a pool thread, then `done` on the loop.
void run_off_loop(Loop& loop, std::function<void()> work, std::function<void()> done);

}  // namespace weft::daemon
