// kill -9 of workers under load: what it costs, and that it costs no request anything.
//
// A real weftd serves streams of mixed groupings, splits, mechanisms and drafts of two tenants that share
// prompts; a few at a time, started anew as they end. Meanwhile a random worker is killed again and again, at
// moments that know nothing of steps, now and then also while another one is coming back. Every token is
// compared: with a hash model (made here, or given) with the oracle's, else with what the same request
// answered undisturbed. The program fails if a token is lost, there twice or wrong, if a stream does not end
// by its length, or if a prompt token that was computed or cached is computed again.
//
// With --host contexts lie in the host pool, over device pools that hold hardly one of them; with --regroup
// what runs is regrouped in the steps just before a kill, so that steps of both groupings are repeated.
//
// Times are of one run: what the client saw, beside spawn and handshake (from the spawn of a worker to the
// begin of the epoch) as weftd logged them.
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>

#include "proto/endpoints.h"
#include "proto/vocab/random.h"
#include "tests/bench/daemon_process.h"
#include "tests/bench/figures.h"
#include "tests/bench/guarded_main.h"
#include "worker/model/config.h"

namespace weft::bench {
namespace {

using Json = nlohmann::json;
using namespace std::chrono_literals;

struct Options {
  bool quick = false, spare = false, host = false, regroup = false;
  int64_t kills = 1000, streams = 6, workers = 4, seed = 1, gap_ms = 250, prompt = 1200, kinds = 48;
  std::string model;
};

constexpr Duration kPatience = 120s;

// Microseconds of the wall clock, which the daemon's log is stamped with.
int64_t wall_us() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// "2026-01-31T12:00:00.123456Z"
int64_t wall_us(const std::string& text) {
  std::tm parts{};
  const char* fraction = ::strptime(text.c_str(), "%Y-%m-%dT%H:%M:%S", &parts);
  CHECK(fraction != nullptr && *fraction == '.', text);
  return ::timegm(&parts) * int64_t{1'000'000} + std::strtoll(fraction + 1, nullptr, 10);
}

// ---- requests -------------------------------------------------------------------------------------------

struct Kind {
  wire::GenerateRequest request;
  std::vector<uint32_t> answer;
};

template <typename T>
T one_of(std::initializer_list<T> choices, SplitMix64& random) {
  return choices.begin()[random.below(choices.size())];
}

constexpr std::initializer_list<const char*> kDecodes = {"tp", "dcp(2)",        "dcp(4)",
                                                         "dp", "dp(2)xdcp(2)", "dp(2)xtp"};

// The tenant's number is in its seed and its salt; texts are shared between tenants, prefixes between
// requests.
Kind make_kind(size_t number, const worker::ModelConfig& config, const Options& options) {
  SplitMix64 random(1000 + number), text(number % 3);
  const uint64_t tenant = number % 2;
  Kind kind;
  const auto length =
      static_cast<int64_t>(1 + random.below(static_cast<uint64_t>(options.prompt))) | 1;  // no whole blocks
  // Of the third text look-up finds much.
  const auto words = static_cast<uint64_t>(number % 3 == 2 ? 7 : config.vocabulary);
  for (int64_t i = 0; i < length; ++i)
    kind.request.mutable_tokens()->add_ids(static_cast<uint32_t>(text.below(words)));
  kind.request.set_max_tokens(static_cast<uint32_t>(20 + random.below(60)));
  kind.request.set_ignore_eos(true);
  kind.request.set_cache_salt("tenant " + std::to_string(tenant));
  kind.request.set_seed(500 + tenant);
  if (options.host) {
    kind.request.set_context(one_of({"host", "host", "auto"}, random));
  } else {
    kind.request.set_no_prefix_cache(random.below(3) == 0);  // so that prompts are always being read
  }
  kind.request.set_prefill(one_of({"none", "zigzag", "interleave", "contiguous"}, random));
  const std::string decode = one_of(kDecodes, random);
  kind.request.set_decode(decode);
  if (decode == "dcp(4)") kind.request.set_mechanisms(one_of({"partials=tree", "query=replicated"}, random));
  if (config.index_layers() > 0) kind.request.set_index(one_of({"copied", "split"}, random));
  return kind;
}

// Forced drafts are its answer, every third of them wrong.
void add_drafts(size_t number, Kind& kind) {
  const char* sources[] = {"off", "lookup", "forced"};
  kind.request.set_speculative(sources[number % 3]);
  if (number % 3 != 2) return;
  for (size_t i = 0; i < kind.answer.size(); ++i)
    kind.request.add_forced_drafts(kind.answer[i] ^ (i % 3 == 2 ? 1u : 0u));
}

std::vector<uint32_t> oracle(const worker::ModelConfig& config, const wire::GenerateRequest& request) {
  const worker::hash_model::Shape& shape = *config.hash;
  std::vector<uint32_t> context(request.tokens().ids().begin(), request.tokens().ids().end());
  const size_t prompt = context.size();
  for (uint32_t i = 0; i < request.max_tokens(); ++i)
    context.push_back(next_token(shape, request.seed(), context));
  return {context.begin() + static_cast<std::ptrdiff_t>(prompt), context.end()};
}

Result<std::vector<uint32_t>> undisturbed(DaemonProcess& daemon, wire::GenerateRequest request) {
  request.set_speculative("off");
  request.set_no_prefix_cache(true);
  std::vector<uint32_t> tokens;
  client::StreamHandlers handlers;
  handlers.token = [&](const wire::TokenEvent& event) { tokens.push_back(event.token()); };
  TRY_VOID(daemon.client().generate(request, handlers, kPatience));
  return tokens;
}

// ---- streams --------------------------------------------------------------------------------------------

struct Counts {
  std::atomic<int64_t> tokens{0}, finished{0}, lost{0}, twice{0}, wrong{0}, cached{0}, prompts{0};
};

// One client with one stream at a time, until `stop`.
class Streams {
 public:
  Streams(std::string endpoint, const std::vector<Kind>& kinds, Counts& counts)
      : endpoint_(std::move(endpoint)), kinds_(kinds), counts_(counts) {}

  void run(uint64_t seed, const std::atomic<bool>& stop) {
    SplitMix64 random(seed);
    auto client = client::Client::connect({.endpoint = endpoint_});
    if (!client) return failed(client.error());
    while (!stop && !failure()) {
      const size_t number = random.below(kinds_.size());
      if (auto ended = serve(*client, kinds_[number]); !ended)
        return failed(
            error(ended.error().code, "kind " + std::to_string(number) + ": " + ended.error().message));
    }
  }

  std::optional<Error> failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  // When tokens arrived, ascending.
  std::vector<int64_t> arrivals() const {
    const std::lock_guard lock(mutex_);
    return arrivals_;
  }

 private:
  Result<void> serve(client::Client& client, const Kind& kind) {
    size_t next = 0;
    client::StreamHandlers handlers;
    handlers.token = [&](const wire::TokenEvent& event) {
      const std::lock_guard lock(mutex_);
      arrivals_.push_back(wall_us());
      ++counts_.tokens;
      if (event.index() > next) counts_.lost += static_cast<int64_t>(event.index() - next);
      if (event.index() < next) ++counts_.twice;
      if (event.index() >= kind.answer.size() || event.token() != kind.answer[event.index()]) ++counts_.wrong;
      next = event.index() + 1;
    };
    TRY(const wire::Finished finished, client.generate(kind.request, handlers, kPatience));
    if (finished.reason() != "length")
      return error(ErrorCode::kInternal, finished.reason() + ", " + finished.error().message());
    counts_.lost += static_cast<int64_t>(kind.answer.size() - std::min(next, kind.answer.size()));
    counts_.cached += static_cast<int64_t>(finished.usage().cached_tokens());
    counts_.prompts += static_cast<int64_t>(finished.usage().prompt_tokens());
    ++counts_.finished;
    return {};
  }
  void failed(const Error& why) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = why;
  }

  const std::string endpoint_;
  const std::vector<Kind>& kinds_;
  Counts& counts_;
  mutable std::mutex mutex_;
  std::optional<Error> failure_;
  std::vector<int64_t> arrivals_;
};

// ---- kills ----------------------------------------------------------------------------------------------

struct Kill {
  int64_t at = 0;     // wall clock, µs
  bool alone = true;  // none shortly before or after: its time counts
};

// Kills a live worker; false if the one that was drawn is not there now.
bool kill_one(DaemonProcess& daemon, SplitMix64& random, std::vector<Kill>& kills) {
  wire::ControlRequest request;
  request.mutable_workers();
  const auto reply = daemon.control(std::move(request));
  if (!reply) return false;
  const auto& workers = reply->workers().workers();
  const auto pid = static_cast<pid_t>(
      workers[static_cast<int>(random.below(static_cast<uint64_t>(workers.size())))].pid());
  if (pid == 0) return false;
  const int64_t at = wall_us();
  if (::kill(pid, SIGKILL) != 0) return false;
  kills.push_back({at});
  return true;
}

Result<wire::StatusReply> status_of(const DaemonProcess& daemon) {
  wire::ControlRequest request;
  request.mutable_status();
  TRY(const wire::ControlReply reply, daemon.control(std::move(request)));
  return reply.status();
}

void regroup_all(DaemonProcess& daemon, SplitMix64& random) {
  wire::ControlRequest request;
  request.mutable_regroup()->set_all_running(true);
  request.mutable_regroup()->set_decode(one_of(kDecodes, random));
  (void)daemon.control(std::move(request));  // who has no room for it stays
}

// One after the other at random distances, one in eight while the one before may not be back. Those behind
// a regrouping wait for a step: who never does one is started ever later.
void kill_all(DaemonProcess& daemon, const Options& options, const Streams& streams,
              std::vector<Kill>& kills) {
  SplitMix64 random(static_cast<uint64_t>(options.seed));
  uint64_t last = 0;  // steps that were done at the kill before
  while (std::ssize(kills) < options.kills && !streams.failure()) {
    const auto gap = static_cast<int64_t>(random.below(static_cast<uint64_t>(2 * options.gap_ms * 1000)));
    std::this_thread::sleep_for(std::chrono::microseconds(options.gap_ms * 500 + gap));  // no step is asked
    if (options.regroup) {
      const auto status = status_of(daemon);
      if (!status || status->steps() == std::exchange(last, status->steps())) continue;
      regroup_all(daemon, random);
      std::this_thread::sleep_for(std::chrono::microseconds(random.below(4000)));
    }
    if (!kill_one(daemon, random, kills) || random.below(8) != 0) continue;
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(20'000)));
    if (kill_one(daemon, random, kills)) kills.back().alone = kills[kills.size() - 2].alone = false;
  }
}

// ---- what the log says ----------------------------------------------------------------------------------

struct Log {
  std::vector<int64_t> began;         // epochs, µs
  std::vector<double> handshakes_ms;  // spawn to begin, of workers that came back alone
  std::vector<double> spares_ms;      // spawn to ready, of spares
  int64_t taken = 0;                  // places that spares took
  int64_t repeated_plans = 0, differing_repeats = 0, abandoned = 0;
};

Log read_log(const std::string& path) {
  Log log;
  std::vector<int64_t> spawned;  // since the last epoch began
  int64_t spare_spawned = 0;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const Json event = Json::parse(line, nullptr, false);
    if (!event.is_object() || !event.contains("event")) continue;
    const std::string name = event["event"];
    const int64_t at = wall_us(event["time"].get<std::string>());
    if (name == "worker_spawned") spawned.push_back(at);
    if (name == "spare_spawned") spare_spawned = at;
    if (name == "spare_ready") log.spares_ms.push_back(static_cast<double>(at - spare_spawned) / 1000);
    if (name == "spare_takes_over") ++log.taken;
    if (name == "plan_repeated") ++log.repeated_plans;
    if (name == "repeat_differs") ++log.differing_repeats;
    if (name == "plans_abandoned") ++log.abandoned;
    if (name != "epoch_began") continue;
    log.began.push_back(at);
    if (spawned.size() == 1) log.handshakes_ms.push_back(static_cast<double>(at - spawned[0]) / 1000);
    spawned.clear();
  }
  return log;
}

// From a kill to the first token that came after the next epoch had begun.
std::vector<double> recoveries_ms(const std::vector<Kill>& kills, const Log& log,
                                  std::vector<int64_t> arrivals) {
  std::sort(arrivals.begin(), arrivals.end());
  std::vector<double> out;
  for (const Kill& kill : kills) {
    if (!kill.alone) continue;
    const auto began = std::upper_bound(log.began.begin(), log.began.end(), kill.at);
    if (began == log.began.end()) continue;
    const auto token = std::upper_bound(arrivals.begin(), arrivals.end(), *began);
    if (token != arrivals.end()) out.push_back(static_cast<double>(*token - kill.at) / 1000);
  }
  return out;
}

std::string spread(std::vector<double> values) {
  if (values.empty()) return "none";
  std::sort(values.begin(), values.end());
  const Summary all = summarize(values);
  char text[128];
  std::snprintf(text, sizeof text, "median %.2f, 99 %% below %.2f, %.2f .. %.2f (%zu)", all.median,
                values[(values.size() - 1) * 99 / 100], all.min, all.max, all.count);
  return text;
}

// ---- the run --------------------------------------------------------------------------------------------

Result<std::string> model_folder(const Options& options, const std::string& folder) {
  if (!options.model.empty()) return options.model;
  std::vector<std::string> words = {program_path("weft-hash-model"), "--out", folder + "/hash",
                                    "--vocabulary", "20000"};
  if (options.host) words.insert(words.end(), {"--attention", "dsa", "--index-topk", "64"});
  TRY_VOID(run_program(words, folder + "/hash.log"));
  return folder + "/hash";
}

Result<bool> run(const Options& options, const std::string& folder) {
  TRY(const std::string model, model_folder(options, folder));
  TRY(const worker::ModelConfig config, worker::read_model_config(model));
  std::vector<std::string> arguments = {"--model", model, "--workers", std::to_string(options.workers)};
  const auto add = [&](std::initializer_list<const char*> words) {
    arguments.insert(arguments.end(), words.begin(), words.end());
  };
  add({"--max-context", "2048", "--threads-per-worker", "1"});
  if (options.host) {
    add({"--pool-tokens", "384", "--index-pool-tokens", "16384", "--hot-tokens", "128", "--block-tokens", "16",
         "--max-step-rows", "64", "--host-pool", "256MiB", "--host-write", "through"});
  } else {
    add({"--pool-tokens", "16384", "--max-step-rows", "256"});
  }
  if (options.spare) arguments.push_back("--spare");
  TRY(DaemonProcess daemon, DaemonProcess::start(folder + "/daemon", arguments));
  std::vector<Kind> kinds;
  for (size_t number = 0; number < static_cast<size_t>(options.kinds); ++number) {
    Kind kind = make_kind(number, config, options);
    if (config.hash) {
      kind.answer = oracle(config, kind.request);
    } else {
      TRY(kind.answer, undisturbed(daemon, kind.request));
    }
    add_drafts(number, kind);
    kinds.push_back(std::move(kind));
  }
  std::printf("%s (%s), %lld workers, %lld streams at once, seed %lld; tokens against %s\n",
              std::filesystem::path(model).filename().c_str(), config.model_type.c_str(),
              static_cast<long long>(options.workers), static_cast<long long>(options.streams),
              static_cast<long long>(options.seed), config.hash ? "the oracle" : "an undisturbed run");

  Counts counts;
  Streams streams(client_endpoint_in(folder + "/daemon"), kinds, counts);
  std::atomic<bool> stop = false;
  std::vector<std::thread> clients;
  for (int64_t i = 0; i < options.streams; ++i)
    clients.emplace_back([&, i] { streams.run(static_cast<uint64_t>(options.seed * 100 + i), stop); });
  std::vector<Kill> kills;
  const int64_t begin = wall_us();
  kill_all(daemon, options, streams, kills);
  stop = true;
  for (std::thread& client : clients) client.join();
  const double seconds = static_cast<double>(wall_us() - begin) / 1e6;
  if (const auto failure = streams.failure()) return daemon.explain(*failure);
  TRY(const wire::StatusReply status, status_of(daemon));
  const auto recomputed = static_cast<int64_t>(status.computed_prompt_tokens() + status.cached_tokens() -
                                               status.prompt_tokens());
  TRY_VOID(daemon.stop());

  const Log log = read_log(folder + "/daemon/weftd.log");
  const std::vector<double> recoveries = recoveries_ms(kills, log, streams.arrivals());
  const auto count = [](const char* what, int64_t value) {
    std::printf("  %-44s %lld\n", what, static_cast<long long>(value));
  };
  count("kills", std::ssize(kills));
  count("epochs that began after them", std::ssize(log.began) - 1);
  count("requests ended", counts.finished);
  count("tokens compared", counts.tokens);
  count("lost", counts.lost);
  count("there twice", counts.twice);
  count("wrong", counts.wrong);
  count("plans repeated", log.repeated_plans);
  count("repeats that drew another token", log.differing_repeats);
  count("plans lost twice and made anew", log.abandoned);
  count("prompt tokens served", counts.prompts);
  count("of them from the prefix cache", counts.cached);
  count("prompt tokens computed again", recomputed);
  if (options.host) {
    count("entries read from the host pool", static_cast<int64_t>(status.host_pool().hot_misses()));
    count("found in hot buffers instead", static_cast<int64_t>(status.host_pool().hot_hits()));
  }
  std::printf("  %-44s %s\n", "kill to next token, ms", spread(recoveries).c_str());
  std::printf("  %-44s %s\n", "spawn and handshake, ms", spread(log.handshakes_ms).c_str());
  if (options.spare) {
    count("places taken by a spare", log.taken);
    std::printf("  %-44s %s\n", "spawn and handshake of spares, ms", spread(log.spares_ms).c_str());
  }
  const std::vector<double>& starts = log.handshakes_ms.empty() ? log.spares_ms : log.handshakes_ms;
  if (!recoveries.empty() && !starts.empty()) {
    std::printf("  %-44s %.2f\n", "ratio of the medians",
                summarize(recoveries).median / summarize(starts).median);
  }
  std::printf("  %-44s %.0f\n", "seconds", seconds);
  return std::ssize(kills) >= options.kills && counts.lost + counts.twice + counts.wrong == 0 &&
         recomputed == 0 && log.differing_repeats == 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using namespace weft;
  using bench::add_number;
  bench::Options options;
  CLI::App app("Kills workers of a weftd under load and compares every token.", "kill_bench");
  app.add_flag("--quick", options.quick, "a dozen kills");
  app.add_flag("--spare", options.spare, "weftd keeps a warm spare worker");
  app.add_flag("--host", options.host, "contexts lie on the host (a model with an indexer)");
  app.add_flag("--regroup", options.regroup, "all that runs is regrouped just before a kill");
  add_number(app, "--kills", options.kills, 1, 1'000'000, "kills");
  add_number(app, "--streams", options.streams, 1, 64, "streams at once");
  add_number(app, "--workers", options.workers, 4, 8, "workers: 4 or 8");
  add_number(app, "--gap", options.gap_ms, 1, 60'000, "milliseconds between two kills, on the average");
  add_number(app, "--prompt", options.prompt, 1, 1900, "tokens of a prompt at most");
  add_number(app, "--kinds", options.kinds, 1, 1000, "different requests");
  add_number(app, "--seed", options.seed, 0, int64_t{1} << 40, "of kills and streams");
  app.add_option("--model", options.model, "folder of a model (default: a hash model made for the run)")
      ->type_name("FOLDER");
  const auto ready = [&] {
    if (options.quick) options.kills = std::min<int64_t>(options.kills, 12);
  };
  return bench::guarded_main(app, argc, argv, ready,
                             [&](const std::string& folder) { return bench::run(options, folder); });
}
