#include "daemon/loop.h"

#include <uv.h>

#include <deque>

#include "proto/vocab/check.h"

namespace weft::daemon {
namespace {

// State of a handle that is its member `handle`; freed when libuv lets go of it.
template <typename State>
void close_and_free(State* state) {
  uv_close(reinterpret_cast<uv_handle_t*>(&state->handle),
           [](uv_handle_t* closed) { delete static_cast<State*>(closed->data); });
}

uint64_t milliseconds_up(Duration duration) {
  const auto count = (duration.count() + 999'999) / 1'000'000;
  return count < 0 ? 0 : static_cast<uint64_t>(count);
}

}  // namespace

static_assert(kReadable == UV_READABLE && kWritable == UV_WRITABLE);

// The async handle carries deferred tasks: an idle handle would keep the loop spinning.
struct Loop::State {
  uv_loop_t loop;
  uv_async_t async;
  std::deque<std::function<void()>> tasks;
};

Loop::Loop() : state_(new State) {
  CHECK_EQ(uv_loop_init(&state_->loop), 0);
  state_->async.data = state_.get();
  const auto run_tasks = [](uv_async_t* async) {
    auto tasks = std::move(static_cast<State*>(async->data)->tasks);
    static_cast<State*>(async->data)->tasks.clear();
    for (auto& task : tasks) task();
  };
  CHECK_EQ(uv_async_init(&state_->loop, &state_->async, run_tasks), 0);
}

Loop::~Loop() {
  state_->tasks.clear();
  uv_close(reinterpret_cast<uv_handle_t*>(&state_->async), nullptr);
  uv_run(&state_->loop, UV_RUN_DEFAULT);
  CHECK_EQ(uv_loop_close(&state_->loop), 0);
}

uv_loop_s* Loop::get() { return &state_->loop; }
void Loop::run() { uv_run(&state_->loop, UV_RUN_DEFAULT); }
void Loop::stop() { uv_stop(&state_->loop); }
Time Loop::now() const { return monotonic_now(); }

void Loop::defer(std::function<void()> task) {
  state_->tasks.push_back(std::move(task));
  uv_async_send(&state_->async);
}

struct Timer::State {
  uv_timer_t handle;
  std::function<void()> expired;
};

Timer::Timer(Loop& loop, std::function<void()> expired) : state_(new State{{}, std::move(expired)}) {
  CHECK_EQ(uv_timer_init(loop.get(), &state_->handle), 0);
  state_->handle.data = state_;
}

Timer::~Timer() { close_and_free(state_); }

void Timer::start(Duration delay, Duration repeat) {
  uv_update_time(state_->handle.loop);
  uv_timer_start(
      &state_->handle, [](uv_timer_t* timer) { static_cast<State*>(timer->data)->expired(); },
      milliseconds_up(delay), milliseconds_up(repeat));
}

void Timer::stop() { uv_timer_stop(&state_->handle); }

struct Watch::State {
  uv_poll_t handle;
  std::function<void(int)> ready;
};

Watch::Watch(Loop& loop, int fd, std::function<void(int)> ready) : state_(new State{{}, std::move(ready)}) {
  CHECK_EQ(uv_poll_init(loop.get(), &state_->handle, fd), 0);
  state_->handle.data = state_;
}

Watch::~Watch() {
  stop();
  close_and_free(state_);
}

void Watch::start(int events) {
  uv_poll_start(&state_->handle, events, [](uv_poll_t* poll, int status, int fired) {
    // An error (EBADF, EPOLLERR) is reported as readable: the reader then meets it in its own call.
    static_cast<State*>(poll->data)->ready(status < 0 ? UV_READABLE : fired);
  });
}

void Watch::stop() { uv_poll_stop(&state_->handle); }

struct SignalWatch::State {
  uv_signal_t handle;
  std::function<void()> raised;
};

SignalWatch::SignalWatch(Loop& loop, int signal, std::function<void()> raised)
    : state_(new State{{}, std::move(raised)}) {
  CHECK_EQ(uv_signal_init(loop.get(), &state_->handle), 0);
  state_->handle.data = state_;
  uv_signal_start(
      &state_->handle, [](uv_signal_t* handle, int) { static_cast<State*>(handle->data)->raised(); }, signal);
}

SignalWatch::~SignalWatch() { close_and_free(state_); }

struct TurnHook::State {
  uv_prepare_t prepare;
  uv_check_t check;
  uv_idle_t idle;
  int open = 3;
  std::function<bool()> busy;
  std::function<void()> turn;

  static void closed(uv_handle_t* handle) {
    auto* state = static_cast<State*>(handle->data);
    if (--state->open == 0) delete state;
  }
};

TurnHook::TurnHook(Loop& loop, std::function<bool()> busy, std::function<void()> turn)
    : state_(new State{{}, {}, {}, 3, std::move(busy), std::move(turn)}) {
  CHECK_EQ(uv_prepare_init(loop.get(), &state_->prepare), 0);
  CHECK_EQ(uv_check_init(loop.get(), &state_->check), 0);
  CHECK_EQ(uv_idle_init(loop.get(), &state_->idle), 0);
  state_->prepare.data = state_->check.data = state_->idle.data = state_;
  uv_prepare_start(&state_->prepare, [](uv_prepare_t* handle) {
    auto* state = static_cast<State*>(handle->data);
    // An active idle handle makes the coming wait return at once.
    if (state->busy()) uv_idle_start(&state->idle, [](uv_idle_t*) {});
  });
  uv_check_start(&state_->check, [](uv_check_t* handle) {
    auto* state = static_cast<State*>(handle->data);
    uv_idle_stop(&state->idle);
    state->turn();
  });
}

TurnHook::~TurnHook() {
  for (uv_handle_t* handle :
       {reinterpret_cast<uv_handle_t*>(&state_->prepare), reinterpret_cast<uv_handle_t*>(&state_->check),
        reinterpret_cast<uv_handle_t*>(&state_->idle)}) {
    uv_close(handle, State::closed);
  }
}

void run_off_loop(Loop& loop, std::function<void()> work, std::function<void()> done) {
  struct Job {
    uv_work_t request;
    std::function<void()> work, done;
  };
  auto* job = new Job{{}, std::move(work), std::move(done)};
  job->request.data = job;
  CHECK_EQ(
      uv_queue_work(
          loop.get(), &job->request, [](uv_work_t* request) { static_cast<Job*>(request->data)->work(); },
          [](uv_work_t* request, int) {
            std::unique_ptr<Job> owned(static_cast<Job*>(request->data));
            owned->done();
          }),
      0);
}

}  // namespace weft::daemon
