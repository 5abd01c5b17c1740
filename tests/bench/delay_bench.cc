// How long short requests wait behind a prompt of 900,000 tokens.
//
// A real weftd reads one very long prompt. Meanwhile short requests come, one after the other, each with a
// text of its own; one in three as urgent (`priority`). What each waits is counted in steps of the daemon,
// which is exact whatever the machine does, from just before it is sent until just after its first token has
// come; and in milliseconds, beside those of an empty daemon. Two plans may be in flight when it arrives, the
// third one has it, and its token comes with the end of that. What the long prompt still reads meanwhile
// shows that it is not stopped.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <optional>
#include <thread>

#include "proto/endpoints.h"
#include "proto/vocab/random.h"
#include "tests/bench/daemon_process.h"
#include "tests/bench/figures.h"
#include "tests/bench/guarded_main.h"

namespace weft::bench {
namespace {

using namespace std::chrono_literals;

struct Options {
  bool quick = false;
  int64_t prompt = 900'000, shorts = 60, tokens = 1000, workers = 4;
};

constexpr Duration kPatience = 3600s;
constexpr uint64_t kVocabulary = 4096;

wire::GenerateRequest request_of(uint64_t seed, int64_t prompt, uint32_t answer) {
  SplitMix64 random(seed);
  wire::GenerateRequest request;
  for (int64_t i = 0; i < prompt; ++i)
    request.mutable_tokens()->add_ids(static_cast<uint32_t>(random.below(kVocabulary)));
  request.set_max_tokens(answer);
  request.set_ignore_eos(true);
  request.set_no_prefix_cache(true);
  request.set_prefill("zigzag");
  return request;
}

// The long prompt, on a thread of its own.
struct Long {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t request = 0, read = 0;
  bool ended = false;
  std::optional<Error> failure;

  void run(const std::string& endpoint, const wire::GenerateRequest& wanted) {
    client::StreamHandlers handlers;
    handlers.accepted = [&](const wire::Accepted& accepted) {
      const std::lock_guard lock(mutex);
      request = accepted.request();
    };
    handlers.progress = [&](const wire::PrefillProgress& progress) {
      const std::lock_guard lock(mutex);
      read = progress.done();
      changed.notify_all();
    };
    auto client = client::Client::connect({.endpoint = endpoint});
    std::optional<Error> why;
    if (!client) {
      why = client.error();
    } else if (auto finished = client->generate(wanted, handlers, kPatience); !finished) {
      why = finished.error();
    } else if (finished->reason() != "cancelled") {
      why = error(ErrorCode::kInternal, finished->reason() + " " + finished->error().message());
    }
    const std::lock_guard lock(mutex);
    failure = why;
    ended = true;
    changed.notify_all();
  }
  // False: it ended.
  bool wait_for(uint64_t rows) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return ended || read >= rows; });
    return !ended;
  }
  uint64_t rows() {
    const std::lock_guard lock(mutex);
    return read;
  }
};

Result<uint64_t> steps_of(const DaemonProcess& daemon) {
  wire::ControlRequest request;
  request.mutable_status();
  TRY(const wire::ControlReply reply, daemon.control(std::move(request)));
  return reply.status().steps();
}

struct Waits {
  std::vector<double> steps, ms;
};

Result<void> serve_short(DaemonProcess& daemon, const wire::GenerateRequest& request, Waits& waits) {
  TRY(const uint64_t before, steps_of(daemon));
  const Time sent = monotonic_now();
  std::optional<Time> first;
  Result<uint64_t> after = before;
  client::StreamHandlers handlers;
  handlers.token = [&](const wire::TokenEvent&) {
    if (first) return;
    first = monotonic_now();
    after = steps_of(daemon);
  };
  TRY(const wire::Finished finished, daemon.client().generate(request, handlers, kPatience));
  if (finished.reason() != "length" || !after)
    return daemon.explain(error(ErrorCode::kInternal, "a short request ended by " + finished.reason()));
  waits.steps.push_back(static_cast<double>(*after - before));
  waits.ms.push_back(std::chrono::duration<double, std::milli>(*first - sent).count());
  return {};
}

void print(const char* what, Waits waits) {
  const Summary steps = summarize(waits.steps), ms = summarize(waits.ms);
  std::printf("  %-24s %5zu  %8.0f  %8.0f  %10.1f  %10.1f\n", what, steps.count, steps.median, steps.max,
              ms.median, ms.max);
}

Result<bool> run(const Options& options, const std::string& folder) {
  TRY_VOID(run_program({program_path("weft-hash-model"), "--out", folder + "/hash"}, folder + "/hash.log"));
  const std::string room = std::to_string(options.prompt + 64 * (options.tokens + 64));
  TRY(DaemonProcess daemon,
      DaemonProcess::start(
          folder + "/daemon",
          {"--model", folder + "/hash", "--workers", std::to_string(options.workers), "--pool-tokens", room,
           "--max-context", std::to_string(options.prompt + 4096), "--threads-per-worker", "1", "--decode",
           "dcp(" + std::to_string(options.workers) + ")"}));
  Waits alone, behind, urgent;
  uint64_t seed = 1;
  const auto short_request = [&] { return request_of(++seed, options.tokens, 2); };
  for (int i = 0; i < 10; ++i) TRY_VOID(serve_short(daemon, short_request(), alone));
  Long slow;
  std::thread thread([&, wanted = request_of(1, options.prompt, 2)] {
    slow.run(client_endpoint_in(folder + "/daemon"), wanted);
  });
  const auto measure = [&]() -> Result<uint64_t> {
    slow.wait_for(4096);
    const uint64_t before = slow.rows();
    for (int64_t i = 0; i < options.shorts; ++i) {
      auto request = short_request();
      if (i % 3 == 2) request.set_priority(-1);
      TRY_VOID(serve_short(daemon, request, i % 3 == 2 ? urgent : behind));
    }
    return slow.rows() - before;
  };
  const Result<uint64_t> read = measure();
  const bool going = !slow.ended;
  wire::ControlRequest cancel;
  cancel.mutable_cancel()->set_request(slow.request);
  (void)daemon.control(std::move(cancel));
  thread.join();
  if (!read) return read.error();
  if (slow.failure) return daemon.explain(*slow.failure);
  TRY_VOID(daemon.stop());

  std::printf("short requests of %lld tokens behind a prompt of %lld, %lld workers, steps of 2,048 rows\n",
              static_cast<long long>(options.tokens), static_cast<long long>(options.prompt),
              static_cast<long long>(options.workers));
  std::printf("  to the first token       count  steps     worst          ms       worst\n");
  print("nobody else is there", alone);
  print("behind the long prompt", behind);
  print("the same, urgent", urgent);
  std::printf("  the long prompt read %llu tokens meanwhile, to %llu\n",
              static_cast<unsigned long long>(*read), static_cast<unsigned long long>(slow.rows()));
  // Two plans in flight, its own, and one that may end between the token and the look.
  return going && *read > 0 && summarize(behind.steps).max <= 5 && summarize(urgent.steps).max <= 5;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using namespace weft;
  using bench::add_number;
  bench::Options options;
  CLI::App app("Sends short requests while a very long prompt is read, and counts the steps that they wait.",
               "delay_bench");
  app.add_flag("--quick", options.quick, "six behind a prompt of 200,000 tokens");
  add_number(app, "--prompt", options.prompt, 10'000, 1 << 20, "tokens of the long prompt");
  add_number(app, "--shorts", options.shorts, 3, 100'000, "short requests");
  add_number(app, "--tokens", options.tokens, 1, 1024, "of a short request");
  add_number(app, "--workers", options.workers, 1, 8, "workers");
  const auto ready = [&] {
    if (options.quick) {
      options.prompt = std::min<int64_t>(options.prompt, 200'000);
      options.shorts = std::min<int64_t>(options.shorts, 6);
    }
  };
  return bench::guarded_main(app, argc, argv, ready,
                             [&](const std::string& folder) { return bench::run(options, folder); });
}
