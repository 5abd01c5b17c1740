// What changes of grouping that copy bytes cost the requests beside them.
//
// A real weftd decodes one request with a long context and a few short ones. The long one changes between
// dcp(W), its cache striped, and tp, its cache on every worker: the one way copies (W − 1) / W of it to every
// worker, the other copies nothing. What is measured are the gaps between the tokens of the short ones, as
// their client sees them: *during* a change, from the command that copies until so many tokens of the long
// one later (`--stay`: at its default all copies are made by then); and *steady*, all others. Both have the
// long request under both groupings. A gap's extra is what it has above the steady median.
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
#include "tests/bench/guarded_main.h"

namespace weft::bench {
namespace {

using namespace std::chrono_literals;

struct Options {
  bool quick = false;
  int64_t changes = 1000, workers = 4, tokens = 32'768, others = 3, layers = 4, width = 64, stay = 12;
  std::string copy_step = "4MiB";
};

constexpr Duration kPatience = 3600s;
constexpr int64_t kAnswer = 16'384;  // of the long request, which is asked again when it ends
constexpr uint64_t kVocabulary = 4096;

struct Span {
  Time begin, end;
};

// What the clients have seen.
struct Seen {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Span> gaps;      // of the short requests
  uint64_t request = 0;        // the long one
  int64_t tokens = 0;          // that it has given
  uint64_t regroup_bytes = 0;  // of long ones that have ended
  std::optional<Error> failure;
  std::atomic<bool> stop = false;

  void failed(const Error& why) {
    const std::lock_guard lock(mutex);
    if (!failure) failure = why;
    changed.notify_all();
  }
  // False: a client failed.
  bool wait(const std::function<bool()>& done) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return failure || done(); });
    return !failure;
  }
};

wire::GenerateRequest request_of(SplitMix64 random, int64_t prompt, int64_t answer) {
  wire::GenerateRequest request;
  for (int64_t i = 0; i < prompt; ++i)
    request.mutable_tokens()->add_ids(static_cast<uint32_t>(random.below(kVocabulary)));
  request.set_max_tokens(static_cast<uint32_t>(answer));
  request.set_ignore_eos(true);
  return request;
}

// One request after the other until the end.
void run_short(const std::string& endpoint, uint64_t seed, Seen& seen) {
  auto client = client::Client::connect({.endpoint = endpoint});
  if (!client) return seen.failed(client.error());
  while (!seen.stop) {
    std::optional<Time> last;
    client::StreamHandlers handlers;
    handlers.token = [&](const wire::TokenEvent&) {
      const Time now = monotonic_now();
      const std::lock_guard lock(seen.mutex);
      if (last) seen.gaps.push_back({*last, now});
      last = now;
    };
    const auto ended = client->generate(request_of(SplitMix64(seed), 200, 4000), handlers, kPatience);
    if (!ended) return seen.failed(ended.error());
  }
}

void run_long(const std::string& endpoint, const Options& options, Seen& seen) {
  auto client = client::Client::connect({.endpoint = endpoint});
  if (!client) return seen.failed(client.error());
  while (!seen.stop) {
    client::StreamHandlers handlers;
    handlers.accepted = [&](const wire::Accepted& accepted) {
      const std::lock_guard lock(seen.mutex);
      seen.request = accepted.request();
    };
    handlers.token = [&](const wire::TokenEvent&) {
      const std::lock_guard lock(seen.mutex);
      ++seen.tokens;
      seen.changed.notify_all();
    };
    auto request = request_of(SplitMix64(77), options.tokens, kAnswer);
    request.set_prefill("zigzag");
    request.set_decode("dcp(" + std::to_string(options.workers) + ")");
    const auto ended = client->generate(request, handlers, kPatience);
    if (!ended) return seen.failed(ended.error());
    const std::lock_guard lock(seen.mutex);
    seen.regroup_bytes += ended->trace().regroup_bytes();
  }
}

// Bytes that the change copies; 0 also if the request has just ended.
Result<uint64_t> regroup(const DaemonProcess& daemon, Seen& seen, const std::string& decode) {
  wire::ControlRequest request;
  {
    const std::lock_guard lock(seen.mutex);
    request.mutable_regroup()->add_requests(seen.request);
  }
  request.mutable_regroup()->set_decode(decode);
  TRY(const wire::ControlReply reply, daemon.control(std::move(request)));
  if (reply.regroup().outcomes_size() == 0) return 0;
  const wire::RegroupOutcome& outcome = reply.regroup().outcomes(0);
  if (outcome.has_error() && outcome.error().code() != wire::ERROR_NOT_FOUND)
    return error(ErrorCode::kInternal, outcome.error().message());
  return outcome.bytes_moved();
}

// Until the long request has given so many tokens more.
bool stay(const Options& options, Seen& seen) {
  int64_t from = 0;
  {
    const std::lock_guard lock(seen.mutex);
    from = seen.tokens;
  }
  return seen.wait([&] { return seen.tokens >= from + options.stay; });
}

struct Changes {
  std::vector<Span> copying;
  uint64_t bytes = 0;
};

Result<Changes> change(const DaemonProcess& daemon, const Options& options, Seen& seen) {
  Changes changes;
  const std::string striped = "dcp(" + std::to_string(options.workers) + ")";
  bool goes_on = seen.wait([&] { return seen.tokens > 0; }) && stay(options, seen);
  while (goes_on && std::ssize(changes.copying) < options.changes) {
    const Time begin = monotonic_now();
    TRY(const uint64_t bytes, regroup(daemon, seen, "tp"));
    goes_on = stay(options, seen);
    if (bytes > 0) changes.copying.push_back({begin, monotonic_now()});
    changes.bytes += bytes;
    goes_on = goes_on && stay(options, seen);
    TRY_VOID(regroup(daemon, seen, striped));
    goes_on = goes_on && stay(options, seen);
  }
  return changes;
}

std::vector<double> milliseconds(const std::vector<Span>& gaps) {
  std::vector<double> out;
  for (const Span& gap : gaps)
    out.push_back(std::chrono::duration<double, std::milli>(gap.end - gap.begin).count());
  std::sort(out.begin(), out.end());
  return out;
}

double at(const std::vector<double>& sorted, double share) {
  return sorted.empty() ? 0 : sorted[static_cast<size_t>(share * static_cast<double>(sorted.size() - 1))];
}

void print(const char* what, const std::vector<double>& ms, double median) {
  std::printf("  %-34s %9zu  %8.2f  %8.2f  %8.2f  %8.2f  %11.2f\n", what, ms.size(), at(ms, 0.5),
              at(ms, 0.99), at(ms, 0.999), at(ms, 1), at(ms, 1) - median);
}

void report(const Options& options, const Changes& changes, const std::vector<Span>& gaps) {
  std::vector<Span> during, steady;
  for (const Span& gap : gaps) {
    if (gap.begin < changes.copying.front().begin || gap.begin > changes.copying.back().end) continue;
    const auto next = std::lower_bound(changes.copying.begin(), changes.copying.end(), gap.begin,
                                       [](const Span& change, Time time) { return change.end < time; });
    const bool overlaps = next != changes.copying.end() && next->begin < gap.end;
    (overlaps ? during : steady).push_back(gap);
  }
  const std::vector<double> calm = milliseconds(steady), busy = milliseconds(during);
  const double median = at(calm, 0.5), steady99 = at(calm, 0.99), extra = at(busy, 1) - median;
  std::printf(
      "%lld changes of a request of %lld tokens from dcp(%lld) to tp, %.1f MiB each, --copy-step %s\n",
      static_cast<long long>(changes.copying.size()), static_cast<long long>(options.tokens),
      static_cast<long long>(options.workers),
      static_cast<double>(changes.bytes) / static_cast<double>(changes.copying.size()) / (1 << 20),
      options.copy_step.c_str());
  std::printf(
      "gaps between tokens of %lld others, ms: count    median      99 %%    99.9 %%     worst  worst "
      "extra\n",
      static_cast<long long>(options.others));
  print("steady", calm, median);
  print("during changes", busy, median);
  std::printf("worst extra gap during changes / steady 99 %% gap: %.2f (of steady gaps themselves: %.2f)\n",
              extra / steady99, (at(calm, 1) - median) / steady99);
  std::printf("99 %% gap during changes / steady 99 %% gap: %.2f\n", at(busy, 0.99) / steady99);
}

Result<bool> run(const Options& options, const std::string& folder) {
  TRY_VOID(run_program({program_path("weft-hash-model"), "--out", folder + "/hash", "--attention", "mla",
                        "--width", std::to_string(options.width), "--layers", std::to_string(options.layers)},
                       folder + "/hash.log"));
  const std::string room = std::to_string(options.tokens + 2 * kAnswer + options.others * 5000 + 4096);
  TRY(DaemonProcess daemon,
      DaemonProcess::start(
          folder + "/daemon",
          {"--model", folder + "/hash", "--workers", std::to_string(options.workers), "--pool-tokens", room,
           "--max-context", room, "--threads-per-worker", "1", "--copy-step", options.copy_step}));
  const std::string endpoint = client_endpoint_in(folder + "/daemon");
  Seen seen;
  std::vector<std::thread> clients;
  clients.emplace_back([&] { run_long(endpoint, options, seen); });
  for (int64_t i = 0; i < options.others; ++i)
    clients.emplace_back([&, i] { run_short(endpoint, static_cast<uint64_t>(i), seen); });
  const Result<Changes> changes = change(daemon, options, seen);
  seen.stop = true;
  wire::ControlRequest cancel;
  cancel.mutable_cancel()->set_request(seen.request);
  (void)daemon.control(std::move(cancel));
  for (std::thread& client : clients) client.join();
  if (!changes) return daemon.explain(changes.error());
  if (seen.failure) return daemon.explain(*seen.failure);
  TRY_VOID(daemon.stop());
  report(options, *changes, seen.gaps);
  // A change that the end of the request, or of the run, came before has copied less than was told.
  return seen.regroup_bytes > 0 && std::ssize(changes->copying) == options.changes;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using namespace weft;
  using bench::add_number;
  bench::Options options;
  CLI::App app("Changes the grouping of a long request and watches the tokens of those beside it.",
               "regroup_bench");
  app.add_flag("--quick", options.quick, "four changes of 2,048 tokens");
  add_number(app, "--changes", options.changes, 1, 1'000'000, "changes that copy");
  add_number(app, "--workers", options.workers, 2, 8, "workers");
  add_number(app, "--tokens", options.tokens, 64, 1 << 20, "context of the request that changes");
  add_number(app, "--others", options.others, 1, 16, "requests beside it");
  add_number(app, "--layers", options.layers, 1, 64, "of the model");
  add_number(app, "--width", options.width, 4, 64, "float32 values of an entry in each layer");
  add_number(app, "--stay", options.stay, 2, 1000, "tokens between two commands");
  app.add_option("--copy-step", options.copy_step, "what a step may copy for each worker; 0: all")
      ->type_name("SIZE")
      ->capture_default_str();
  const auto ready = [&] {
    if (options.quick) {
      options.changes = std::min<int64_t>(options.changes, 4);
      options.tokens = std::min<int64_t>(options.tokens, 2048);
    }
  };
  return bench::guarded_main(app, argc, argv, ready,
                             [&](const std::string& folder) { return bench::run(options, folder); });
}
