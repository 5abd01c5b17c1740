// Goal: real weftd and workers give every stream the tokens that the hash model's oracle computes, with
// groupings, splits, mechanisms and drafts of every kind side by side, two tenants that share prompts, prefix
// hits, regroups in flight, cancels, and workers that are killed, over a pool that holds few of them, with a
// host pool behind it or none. Method: streams drawn from a printed seed; every token is compared as it
// comes.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <optional>
#include <set>

#include "kv/layout.h"
#include "proto/vocab/random.h"
#include "tests/integration/harness.h"
#include "tests/support/temp_folder.h"
#include "worker/model/hash_math.h"

namespace weft::integration {
namespace {

using worker::hash_model::next_token;
using worker::hash_model::Shape;

constexpr uint32_t kVocabulary = 900;
constexpr size_t kStreams = 300, kAtOnce = 10;

struct Setting {
  const char* name;
  int workers;
  const char* attention;
  const char* cache_dtype;
  const char* step_rows = "64";
  bool spare = false;
  const char* host_write = "";  // empty: no host pool
  bool on_host =
      false;  // contexts lie there, or where there is room: device pools hold a third of a long one
  bool pressed = false;  // pools that hardly hold one request whole on every rank, and priorities
};
void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

// What weft-hash-model is asked for below.
Shape shape_of(const Setting& setting) {
  Shape shape;
  shape.layers = 2;
  shape.heads = 8;
  shape.vocabulary = kVocabulary;
  shape.digits = 14;
  shape.key_bits = 8;
  if (std::string(setting.attention) == "grouped") {
    shape.parts = 2;
    shape.key_bits = 16;
  } else if (std::string(setting.attention) == "dsa") {
    shape.selection = {0, 0};
    shape.index_topk = 48;
    shape.index_heads = 2;
    shape.index_width = 16;
  }
  return shape;
}

struct Stream {
  uint64_t tag = 0, id = 0, seed = 0;
  std::vector<uint32_t> context;  // prompt, then the oracle's answer as far as it came
  size_t prompt = 0, answer = 0;
  bool cancelled = false;
};

class Hash : public testing::TestWithParam<Setting> {
 protected:
  std::string one_of(const std::vector<std::string>& all) { return all[random_.below(all.size())]; }

  std::vector<std::string> decodes() const {
    std::vector<std::string> all;
    for (const kv::DecodeWish& wish : kv::decode_wishes(GetParam().workers))
      all.push_back(kv::decode_name(wish));
    return all;
  }
  std::string index() {
    return std::string(GetParam().attention) == "dsa" ? one_of({"copied", "split", "copied(2)", "split(2)"})
                                                      : "copied";
  }

  // Prompts begin with one of two texts, of both tenants; the second one repeats itself, so look-up finds
  // much.
  Stream make(wire::GenerateRequest& request) {
    const uint64_t tenant = random_.below(2), text_number = random_.below(2);
    Stream stream;
    stream.seed = 100 + tenant;
    stream.prompt = 1 + random_.below(400);
    stream.answer = 1 + random_.below(40);
    SplitMix64 text(text_number);
    for (size_t i = 0; i < stream.prompt; ++i)
      stream.context.push_back(static_cast<uint32_t>(text.below(text_number == 0 ? kVocabulary : 4)));
    if (random_.below(3) == 0) stream.context.back() = static_cast<uint32_t>(random_.below(kVocabulary));
    request.mutable_tokens()->mutable_ids()->Add(stream.context.begin(), stream.context.end());
    request.set_max_tokens(static_cast<uint32_t>(stream.answer));
    request.set_seed(stream.seed);
    request.set_cache_salt("tenant " + std::to_string(tenant));
    if (random_.below(2) == 0) request.set_temperature(0.8f);
    request.set_prefill(one_of({"none", "zigzag", "interleave", "contiguous"}));
    request.set_decode(one_of(decodes()));
    request.set_index(index());
    request.set_mechanisms(
        "query=" + one_of({"gathered", "replicated"}) + ",context=" + one_of({"auto", "pass-kv", "pass-q"}) +
        ",fetch=" + one_of({"view", "copies"}) + ",partials=" + one_of({"all-to-all", "tree"}));
    if (GetParam().on_host) {
      request.set_context(one_of({"auto", "host"}));
    } else {
      request.set_no_prefix_cache(random_.below(5) == 0);
    }
    if (GetParam().pressed) request.set_priority(static_cast<int>(random_.below(3)));
    request.set_speculative(one_of({"off", "lookup", "forced"}));
    if (request.speculative() == "forced") {
      std::vector<uint32_t> context = stream.context;
      for (size_t i = 0; i < stream.answer; ++i) {
        context.push_back(next_token(shape_, stream.seed, context));
        request.add_forced_drafts(context.back() ^ (random_.below(4) == 0 ? 1u : 0u));
      }
    }
    return stream;
  }

  void take(Stream& stream, const wire::TokenEvent& event) {
    ASSERT_EQ(event.index(), stream.context.size() - stream.prompt);
    ASSERT_EQ(event.token(), next_token(shape_, stream.seed, stream.context))
        << "index " << event.index() << " of a stream of " << stream.prompt << " tokens, seed "
        << stream.seed;
    stream.context.push_back(event.token());
  }

  void disturb(Daemon& daemon, client::Client& client, std::vector<Stream>& open) {
    const uint64_t draw = random_.below(1000);
    if (draw < 50) {
      wire::ControlRequest request;
      request.mutable_regroup()->set_all_running(true);
      request.mutable_regroup()->set_decode(one_of(decodes()));
      if (random_.below(2) == 0) request.mutable_regroup()->set_index(index());
      const wire::ControlReply reply = daemon.control(request);
      for (const auto& outcome : reply.regroup().outcomes()) regroups_ += outcome.has_error() ? 0 : 1;
    } else if (draw < 56) {
      kill_worker(daemon);
    } else if (draw < 58 && GetParam().spare) {
      kill_spare(daemon);
    } else if (draw < 66 && !open.empty()) {
      Stream& victim = open[random_.below(open.size())];
      if (victim.id == 0 || victim.cancelled) return;
      victim.cancelled = true;
      ++cancels_;
      ASSERT_TRUE(client.send_cancel(victim.id).has_value());
    }
  }

  // Not before a step was done since the last one: a request that loses its workers four times in one step is
  // given up, and rightly.
  void kill_worker(Daemon& daemon) {
    const uint64_t steps = daemon.status().steps();
    if (steps <= steps_at_kill_) return;
    const auto workers = daemon.workers();
    const auto pid = static_cast<pid_t>(workers[random_.below(workers.size())].pid());
    if (pid == 0 || ::kill(pid, SIGKILL) != 0) return;
    steps_at_kill_ = steps;
    ++kills_;
  }

  // The one that was started last; it may be a rank by now, and then it counts as one.
  void kill_spare(Daemon& daemon) {
    const uint64_t steps = daemon.status().steps();
    if (steps <= steps_at_kill_) return;
    steps_at_kill_ = steps;
    const std::string log = daemon.log(), event = "\"event\":\"spare_spawned\",\"pid\":";
    const size_t at = log.rfind(event);
    if (at == std::string::npos) return;
    const auto pid = static_cast<pid_t>(std::atol(log.c_str() + at + event.size()));
    std::ifstream file("/proc/" + std::to_string(pid) + "/status");
    for (std::string line; std::getline(file, line);) {
      if (line == "PPid:\t" + std::to_string(daemon.pid()))
        ::kill(pid, SIGKILL);  // and nobody else's process
    }
  }

  Shape shape_;
  SplitMix64 random_{0};
  int64_t regroups_ = 0, kills_ = 0, cancels_ = 0;
  uint64_t steps_at_kill_ = 0;
};

TEST_P(Hash, EveryTokenIsTheOracles) {
  const Setting& s = GetParam();
  const char* given = std::getenv("WEFT_HASH_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : 31;
  std::printf("seed %llu (WEFT_HASH_SEED sets it)\n", static_cast<unsigned long long>(seed));
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  random_ = SplitMix64(seed);
  shape_ = shape_of(s);
  const test::TempFolder folder;
  const std::string model = folder.file("hash");
  const Finished made =
      run_program({WEFT_HASH_MODEL, "--out", model, "--attention", s.attention, "--vocabulary",
                   std::to_string(kVocabulary), "--index-topk", "48", "--max-context", "512"});
  ASSERT_EQ(made.exit_code, 0) << made.errors;
  std::vector<std::string> arguments = {"--workers",
                                        std::to_string(s.workers),
                                        "--block-tokens",
                                        "8",
                                        "--pool-tokens",
                                        s.on_host   ? "152"
                                        : s.pressed ? "512"
                                                    : "1024",
                                        "--max-step-rows",
                                        s.step_rows,
                                        "--max-running",
                                        "7",
                                        "--cache-dtype",
                                        s.cache_dtype,
                                        "--threads-per-worker",
                                        "1"};
  if (s.spare) arguments.push_back("--spare");
  // Changes of long ones are spread over steps.
  arguments.insert(arguments.end(), {"--copy-step", "4KiB"});
  const bool host = *s.host_write != 0;
  if (host) arguments.insert(arguments.end(), {"--host-pool", "64MiB", "--host-write", s.host_write});
  if (s.on_host) arguments.insert(arguments.end(), {"--index-pool-tokens", "3600", "--hot-tokens", "56"});
  Daemon daemon(arguments, model);
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  auto client = daemon.client();
  std::vector<Stream> open;
  size_t started = 0, ended = 0;
  uint64_t cached = 0, tokens = 0, accepted = 0;
  while (started < kStreams || !open.empty()) {
    while (started < kStreams && open.size() < kAtOnce) {
      wire::GenerateRequest request;
      Stream stream = make(request);
      stream.tag = client.start(request).value();
      open.push_back(std::move(stream));
      ++started;
    }
    const size_t at = random_.below(open.size());
    const auto reply = client.next(open[at].tag, std::chrono::milliseconds(20));
    if (!reply) {
      ASSERT_EQ(reply.error().code, ErrorCode::kDeadlineExceeded) << reply.error().text();
      continue;
    }
    if (reply->has_accepted()) open[at].id = reply->accepted().request();
    if (reply->has_token()) {
      ++tokens;
      take(open[at], reply->token());
    }
    if (HasFatalFailure()) return;
    if (reply->has_finished()) {
      const wire::Finished& finished = reply->finished();
      ASSERT_EQ(finished.reason(),
                open[at].cancelled && finished.reason() == "cancelled" ? "cancelled" : "length")
          << finished.error().message();
      if (finished.reason() == "length") {
        EXPECT_EQ(open[at].context.size(), open[at].prompt + open[at].answer);
      }
      cached += finished.usage().cached_tokens();
      accepted += finished.trace().accepted_tokens();
      std::swap(open[at], open.back());
      open.pop_back();
      ++ended;
    }
    disturb(daemon, client, open);
  }
  std::printf(
      "%zu ended, %llu tokens, %llu prompt tokens from the cache, %llu drafts held, %lld regroups, "
      "%lld cancels, %lld kills\n",
      ended, static_cast<unsigned long long>(tokens), static_cast<unsigned long long>(cached),
      static_cast<unsigned long long>(accepted), static_cast<long long>(regroups_),
      static_cast<long long>(cancels_), static_cast<long long>(kills_));
  const wire::HostPoolStatus pool = daemon.status().host_pool();
  std::printf("host pool: %llu bytes spilled, %llu loaded, %llu prompt tokens\n",
              static_cast<unsigned long long>(pool.spilled_bytes()),
              static_cast<unsigned long long>(pool.loaded_bytes()),
              static_cast<unsigned long long>(pool.hit_tokens()));
  std::printf("hot buffers: %llu hits, %llu misses\n", static_cast<unsigned long long>(pool.hot_hits()),
              static_cast<unsigned long long>(pool.hot_misses()));
  EXPECT_EQ(pool.hot_hits() > 0 && pool.hot_misses() > 0, s.on_host);
  EXPECT_EQ(pool.loaded_bytes() > 0, host);
  const wire::PressureStatus pressure = daemon.status().pressure();
  std::printf("%llu thinned, %llu preempted, %llu rows computed again\n",
              static_cast<unsigned long long>(pressure.thinned()),
              static_cast<unsigned long long>(pressure.preempted()),
              static_cast<unsigned long long>(pressure.replayed_rows()));
  if (s.pressed) {
    EXPECT_GT(pressure.thinned(), 0u);
    // Over 8 ranks thin forms nearly always do.
    if (s.workers < 8) {
      EXPECT_GT(pressure.preempted(), 0u);
    }
  }
  EXPECT_EQ(ended, kStreams);
  EXPECT_GT(cached, 0u);
  EXPECT_GT(accepted, 0u);
  EXPECT_GT(regroups_, 0);
  EXPECT_GT(cancels_, 0);
  EXPECT_GT(kills_, 0);
  EXPECT_EQ(daemon.log().find("repeat_differs"), std::string::npos);
  EXPECT_EQ(daemon.log().find("spare_takes_over") != std::string::npos, s.spare);
  EXPECT_TRUE(wait_until([&] { return daemon.status().state() == "ready"; }));
  daemon.signal(SIGTERM);
  EXPECT_EQ(daemon.wait_exit(), 0);
  EXPECT_EQ(daemon.leftovers(), "");
}

INSTANTIATE_TEST_SUITE_P(
    Settings, Hash,
    testing::Values(Setting{"Grouped2", 2, "grouped", "f32"},
                    Setting{"Grouped4", 4, "grouped", "fp8", "64", false, "back"},
                    Setting{"Grouped8", 8, "grouped", "bf16", "33"},
                    Setting{"Mla4", 4, "mla", "fp8_ds_mla", "64", false, "through"},
                    Setting{"Dsa2", 2, "dsa", "f32", "256"}, Setting{"Dsa4", 4, "dsa", "fp8_ds_mla"},
                    Setting{"Dsa8", 8, "dsa", "bf16", "64", false, "back"},
                    Setting{"OnHost2", 2, "dsa", "fp8_ds_mla", "64", false, "back", true},
                    Setting{"OnHost4", 4, "dsa", "f32", "40", false, "through", true},
                    Setting{"Pressed4", 4, "dsa", "bf16", "64", false, "back", false, true},
                    Setting{"Pressed8", 8, "mla", "f32", "64", false, "", false, true},
                    Setting{"Spare4", 4, "grouped", "f32", "64", true, "back"}),
    [](const auto& info) { return std::string(info.param.name); });
}  // namespace
}  // namespace weft::integration
