// Goal: whatever happens to workers, groupings and other clients, a stream that nobody cancelled gets the
// tokens, and the logits of every position to the bit, that it gets alone. Method: a tiny random checkpoint;
// a few hundred requests of every size around the borders, with mechanisms and drafts of every kind, sharing
// prefixes, over a pool that holds few of them; the truth is what each says alone, undisturbed and without
// drafts; meanwhile an adversary, drawn from a printed seed, kills and stops workers, regroups, cancels, and
// leaves.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>

#include "kv/layout.h"
#include "proto/vocab/random.h"
#include "tests/integration/harness.h"

namespace weft::integration {
namespace {

constexpr uint64_t kVocabulary = 128;  // the smallest of the models'

struct Setting {
  const char* name;
  const char* model;
  int workers;
  int block;
  const char* pool_tokens;
  const char* step_rows;
  const char* dtype;
  // Of 10,000 replies, how many do this. (A worker that is killed often comes back later and later.)
  unsigned kills, stops, regroups, cancels, leaves;
  // Worker counts outside {1, 2, 4, 8} promise equal bits only where the whole sequence, prefix included, was
  // computed under one grouping whose c divides 8. `kOwnBits`: only such are asked for, and bits are
  // compared; `kEnds`: anything may happen, and only how streams end is looked at.
  enum Promise { kAllBits, kOwnBits, kEnds } promise = kAllBits;
  const char* cache_dtype = nullptr;  // unless that of the weights
  bool draft_layers = false;          // loaded, and guess where a request asks for it
};

void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

struct Truth {
  std::vector<uint32_t> tokens;
  std::map<uint64_t, std::string> digests;
};

struct Stream {
  size_t client = 0;
  uint64_t tag = 0;
  size_t kind = 0;  // which request
  uint64_t id = 0;
  bool cancelled = false;
  Truth got;
};

std::vector<std::string> decodes_of(const Setting& setting) {
  std::vector<std::string> all;
  for (const kv::DecodeWish& wish : kv::decode_wishes(setting.workers)) {
    if (setting.promise == Setting::kOwnBits && 8 % wish.c != 0) continue;
    all.push_back(kv::decode_name(wish));
  }
  return all;
}

std::string one_of(const std::vector<std::string>& all, SplitMix64& random) {
  return all[random.below(all.size())];
}

// All but the form of attention, which has bits of its own.
std::string mechanisms_of(const Setting& setting, SplitMix64& random) {
  std::string text = "query=" + one_of({"gathered", "replicated"}, random);
  text += ",context=" + one_of({"auto", "pass-kv", "pass-q"}, random);
  text += ",fetch=" + one_of({"view", "copies"}, random);
  const bool trees = std::has_single_bit(static_cast<unsigned>(setting.workers));  // so is every c
  return text + ",partials=" + (trees ? one_of({"all-to-all", "tree"}, random) : "all-to-all");
}

std::string index_of(const Setting& setting, SplitMix64& random) {
  if (setting.workers % 2 != 0) return one_of({"copied", "split"}, random);
  return one_of({"copied", "split", "copied(2)", "split(2)"}, random);
}

class Chaos : public testing::TestWithParam<Setting> {
 protected:
  static constexpr size_t kKinds = 48;
  static constexpr size_t kStreams = 240;
  static constexpr size_t kAtOnce = 12;

  std::vector<std::string> arguments() const {
    std::vector<std::string> out = arguments(GetParam().workers);
    if (GetParam().draft_layers) out.insert(out.end(), {"--speculative", "mtp"});
    return out;
  }
  std::vector<std::string> arguments(int workers) const {
    const Setting& s = GetParam();
    return {"--workers",
            std::to_string(workers),
            "--block-tokens",
            std::to_string(s.block),
            "--pool-tokens",
            s.pool_tokens,
            "--max-step-rows",
            s.step_rows,
            "--max-running",
            "7",
            "--max-context",
            "600",
            "--weight-dtype",
            s.dtype,
            "--cache-dtype",
            s.cache_dtype != nullptr ? s.cache_dtype : s.dtype,
            "--heartbeat-deadline",
            "1"};
  }

  // Lengths sit on, below and above the borders of blocks, of chunks, and of the context.
  wire::GenerateRequest request(size_t kind) {
    const Setting& s = GetParam();
    SplitMix64 random(1000 + kind);
    const int64_t borders[] = {1, 2, s.block, 2 * s.block, 8 * s.block, 64, 128, 200, 500};
    int64_t length = borders[kind % std::size(borders)] + static_cast<int64_t>(random.below(3)) - 1;
    length = std::clamp<int64_t>(length, 1, 560);
    const auto answer = static_cast<uint32_t>(kind % 7 == 0 ? 1 : 2 + random.below(38));
    if (kind % 11 == 0) length = 600 - answer;  // the context, exactly
    wire::GenerateRequest made;
    // Three texts: others' prefixes are found in the cache. One has few words: look-up finds much.
    SplitMix64 text(7 + kind % 3);
    const uint64_t words = kind % 3 == 2 ? 5 : kVocabulary;
    for (int64_t i = 0; i < length; ++i) {
      made.mutable_tokens()->add_ids(static_cast<uint32_t>(text.below(words)));
    }
    made.set_max_tokens(answer);
    made.set_ignore_eos(true);
    made.set_digest(true);
    made.set_decode(one_of(decodes_of(s), random));
    made.set_prefill(one_of({"none", "zigzag", "interleave", "contiguous"}, random));
    made.set_index(index_of(s, random));
    made.set_mechanisms(mechanisms_of(s, random));
    made.set_no_prefix_cache(random.below(4) == 0 || s.promise == Setting::kOwnBits);
    made.set_speculative(one_of({"off", "lookup", "forced", s.draft_layers ? "mtp" : "lookup"}, random));
    if (made.speculative() != "off") made.set_draft_tokens(1 + static_cast<uint32_t>(random.below(6)));
    if (random.below(3) == 0) {
      made.set_temperature(0.9f);
      made.set_top_p(0.95f);
      made.set_seed(kind);
    }
    return made;
  }

  // Forced drafts are its answer, every third of them wrong.
  wire::GenerateRequest request(size_t kind, const Truth& truth) {
    wire::GenerateRequest made = request(kind);
    if (made.speculative() != "forced") return made;
    for (size_t i = 0; i < truth.tokens.size(); ++i)
      made.add_forced_drafts(truth.tokens[i] ^ (i % 3 == 2 ? 1 : 0));
    return made;
  }

  static void take(const wire::ClientReply& reply, Truth& into) {
    if (reply.has_digest()) into.digests[reply.digest().position()] = reply.digest().sha256();
    if (!reply.has_token()) return;
    EXPECT_EQ(reply.token().index(), into.tokens.size());
    into.tokens.push_back(reply.token().token());
  }

  Truth alone(Daemon& daemon, size_t kind, bool by_one_worker) {
    auto client = daemon.client();
    auto asked = request(kind);
    if (by_one_worker) {
      asked.set_decode("tp");
      asked.set_index("copied");
    }
    asked.set_no_prefix_cache(true);
    asked.set_speculative("off");
    asked.set_draft_tokens(0);
    const uint64_t tag = client.start(asked).value();
    Truth truth;
    for (;;) {
      const auto reply = client.next(tag, kPatience);
      EXPECT_TRUE(reply.has_value()) << reply.error().text();
      if (!reply) return truth;
      take(*reply, truth);
      if (!reply->has_finished()) continue;
      EXPECT_EQ(reply->finished().reason(), "length") << reply->finished().error().message();
      return truth;
    }
  }

  void expect_equal(const Stream& stream, const Truth& truth) {
    if (!stream.cancelled) {
      EXPECT_EQ(stream.got.tokens.size(), truth.tokens.size()) << "kind " << stream.kind;
    }
    if (GetParam().promise == Setting::kEnds) return;
    const size_t compared = stream.cancelled ? stream.got.tokens.size() : truth.tokens.size();
    ASSERT_LE(compared, truth.tokens.size());
    const std::vector<uint32_t> expected(truth.tokens.begin(),
                                         truth.tokens.begin() + static_cast<ptrdiff_t>(compared));
    EXPECT_EQ(stream.got.tokens, expected) << "kind " << stream.kind;
    int different = 0;
    for (const auto& [position, digest] : stream.got.digests) {
      different += digest != truth.digests.at(position) ? 1 : 0;
    }
    EXPECT_EQ(different, 0) << "positions of kind " << stream.kind;
  }

  void regroup(Daemon& daemon, SplitMix64& random) {
    wire::ControlRequest regroup;
    regroup.mutable_regroup()->set_all_running(true);
    regroup.mutable_regroup()->set_decode(one_of(decodes_of(GetParam()), random));
    if (random.below(2) == 0) regroup.mutable_regroup()->set_index(index_of(GetParam(), random));
    const auto reply = daemon.control(regroup);
    for (const auto& outcome : reply.regroup().outcomes()) {
      if (!outcome.has_error()) continue;
      const auto code = outcome.error().code();
      EXPECT_TRUE(code == wire::ERROR_RESOURCE_EXHAUSTED || code == wire::ERROR_NOT_FOUND ||
                  code == wire::ERROR_FAILED_PRECONDITION || code == wire::ERROR_TOO_LARGE)
          << outcome.error().message();
      ++refused_regroups_;
    }
    accepted_regroups_ += reply.regroup().outcomes_size();
  }

  void disturb(Daemon& daemon, SplitMix64& random) {
    const Setting& s = GetParam();
    const auto draw = random.below(10'000);
    if (draw < s.kills + s.stops) {
      const auto workers = daemon.workers();
      // Where sequences are regrouped, so they are just before: the death falls among the copies.
      if (s.regroups > 0) regroup(daemon, random);
      const auto pid = static_cast<pid_t>(workers[random.below(workers.size())].pid());
      if (pid != 0) ::kill(pid, draw < s.kills ? SIGKILL : SIGSTOP);
    } else if (draw < s.kills + s.stops + s.regroups) {
      regroup(daemon, random);
    }
  }

  int accepted_regroups_ = 0, refused_regroups_ = 0;
};

TEST_P(Chaos, StreamsEqualThemselvesAlone) {
  const char* given = std::getenv("WEFT_CHAOS_SEED");
  const uint64_t seed = given != nullptr ? std::strtoull(given, nullptr, 10) : 2026;
  std::printf("seed %llu (WEFT_CHAOS_SEED sets it)\n", static_cast<unsigned long long>(seed));
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  SplitMix64 random(seed);
  const Setting& s = GetParam();
  const std::string model = std::string(WEFT_GOLDEN_FOLDER) + "/" + s.model;
  Daemon daemon(arguments(), model);
  ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
  std::vector<Truth> truth;
  {
    // Where bits are promised whatever the number of workers, one worker tells the truth.
    std::optional<Daemon> one;
    if (s.promise == Setting::kAllBits) {
      one.emplace(arguments(1), model);
      ASSERT_TRUE(one->wait_ready()) << one->log();
    }
    for (size_t kind = 0; kind < kKinds; ++kind) {
      truth.push_back(alone(one ? *one : daemon, kind, one.has_value()));
    }
  }
  if (HasFailure()) return;

  constexpr size_t kClients = 3;
  std::vector<std::optional<client::Client>> clients(kClients);
  for (auto& client : clients) client.emplace(daemon.client());
  std::vector<Stream> open;
  size_t started = 0, ended = 0, cancelled = 0, left = 0;
  std::map<std::string, std::pair<uint64_t, uint64_t>> drafts;  // by source: made, and those that held
  Time last_news = monotonic_now();
  while (started < kStreams || !open.empty()) {
    while (started < kStreams && open.size() < kAtOnce) {
      Stream stream;
      stream.client = random.below(kClients);
      stream.kind = random.below(kKinds);
      stream.tag = clients[stream.client]->start(request(stream.kind, truth[stream.kind])).value();
      open.push_back(std::move(stream));
      ++started;
    }
    Stream& stream = open[random.below(open.size())];
    const auto reply = clients[stream.client]->next(stream.tag, std::chrono::milliseconds(20));
    if (!reply) {
      ASSERT_EQ(reply.error().code, ErrorCode::kDeadlineExceeded) << reply.error().text();
      ASSERT_LT(monotonic_now() - last_news, kPatience) << "nothing moves";
      continue;
    }
    {
      last_news = monotonic_now();
      if (reply->has_accepted()) stream.id = reply->accepted().request();
      take(*reply, stream.got);
      if (reply->has_finished()) {
        const auto& reason = reply->finished().reason();
        const auto& trace = reply->finished().trace();
        auto& [drafted, accepted] = drafts[trace.speculative()];
        drafted += trace.drafted_tokens();
        accepted += trace.accepted_tokens();
        if (reason != "length") {
          ASSERT_TRUE(stream.cancelled && reason == "cancelled")
              << reason << ": " << reply->finished().error().message() << ", kind " << stream.kind;
          stream.cancelled = true;
        } else {
          stream.cancelled = false;  // it was quicker
        }
        expect_equal(stream, truth[stream.kind]);
        std::swap(stream, open.back());
        open.pop_back();
        ++ended;
      }
    }
    if (HasFailure()) return;
    disturb(daemon, random);
    if (random.below(10'000) < s.cancels && !open.empty()) {
      Stream& victim = open[random.below(open.size())];
      if (victim.id != 0 && !victim.cancelled) {
        victim.cancelled = true;
        ++cancelled;
        ASSERT_TRUE(clients[victim.client]->send_cancel(victim.id).has_value());
      }
    }
    if (random.below(10'000) < s.leaves) {
      const size_t leaver = random.below(kClients);
      left += static_cast<size_t>(std::erase_if(open, [&](const Stream& o) { return o.client == leaver; }));
      clients[leaver].reset();
      clients[leaver].emplace(daemon.client());
    }
  }
  std::printf("%zu ended, %zu cancelled, %zu left; %d regroups (%d refused), %llu worker restarts\n", ended,
              cancelled, left, accepted_regroups_, refused_regroups_,
              static_cast<unsigned long long>(daemon.status().worker_restarts()));
  for (const auto& [source, count] : drafts) {
    if (count.first == 0) continue;
    std::printf("%s: %llu of %llu drafts held\n", source.c_str(),
                static_cast<unsigned long long>(count.second), static_cast<unsigned long long>(count.first));
  }
  EXPECT_EQ(drafts["mtp"].first > 0, s.draft_layers);
  EXPECT_GT(drafts["forced"].second, 0u);
  EXPECT_LT(drafts["forced"].second, drafts["forced"].first);
  // Nothing is held by anybody.
  EXPECT_TRUE(wait_until([&] {
    const auto status = daemon.status();
    return status.running() == 0 && status.waiting() == 0 &&
           std::all_of(status.pools().begin(), status.pools().end(), [](const wire::PoolStatus& pool) {
             return pool.entries().used() + pool.entries().in_flight() + pool.index_keys().used() +
                        pool.index_keys().in_flight() ==
                    0;
           });
  }));
  EXPECT_EQ(daemon.log().find("repeat_differs"), std::string::npos);
  EXPECT_TRUE(wait_until([&] { return daemon.status().state() == "ready"; }));
  daemon.signal(SIGTERM);
  EXPECT_EQ(daemon.wait_exit(), 0);
  EXPECT_EQ(daemon.leftovers(), "");
}

INSTANTIATE_TEST_SUITE_P(
    Settings, Chaos,
    testing::Values(
        Setting{"Kills4", "glm_moe_dsa", 4, 8, "2048", "64", "f32", 12, 0, 0, 0, 0},
        Setting{"KillsAndStops4", "deepseek_v32", 4, 8, "2048", "512", "bf16", 6, 4, 60, 0, 0},
        Setting{"Regroups4", "glm_moe_dsa", 4, 8, "1024", "33", "f32", 0, 0, 3000, 0, 0},
        Setting{"Regroups8", "deepseek_v32", 8, 8, "1024", "128", "f32", 0, 0, 1500, 0, 0},
        Setting{"Regroups6", "glm_moe_dsa", 6, 16, "1024", "128", "f32", 0, 0, 1500, 0, 0, Setting::kEnds},
        Setting{"Regroups2", "deepseek_v3", 2, 64, "1024", "7", "bf16", 0, 0, 1500, 0, 0},
        Setting{"Cancels3", "deepseek_v3_plain", 3, 8, "800", "64", "f32", 0, 0, 0, 300, 10,
                Setting::kOwnBits},
        Setting{"All4", "glm_moe_dsa", 4, 8, "800", "64", "bf16", 8, 2, 300, 60, 5},
        Setting{"Kills5", "deepseek_v32", 5, 8, "1024", "100", "f32", 8, 2, 0, 60, 5, Setting::kOwnBits},
        Setting{"Cancels6", "glm_moe_dsa", 6, 8, "1024", "33", "bf16", 0, 0, 0, 200, 5, Setting::kOwnBits},
        Setting{"All7", "glm_moe_dsa", 7, 16, "1024", "64", "f32", 8, 2, 300, 60, 5, Setting::kEnds},
        // Several KV heads: blocks have parts, and regroups move bytes.
        Setting{"Parts1", "qwen3", 1, 8, "700", "64", "f32", 8, 2, 0, 60, 5},
        Setting{"Parts2", "llama_smol", 2, 8, "1024", "33", "f32", 8, 2, 1500, 60, 5},
        Setting{"Parts4", "llama_smol", 4, 8, "600", "64", "bf16", 8, 2, 1500, 60, 5},
        Setting{"PartsRegroups4", "qwen3_moe", 4, 8, "1024", "33", "f32", 0, 0, 3000, 0, 0},
        Setting{"PartsKills4", "glm4_moe", 4, 16, "1024", "512", "f32", 12, 0, 300, 0, 0},
        Setting{"PartsCancels8", "qwen2", 8, 8, "600", "128", "bf16", 0, 0, 300, 300, 10},
        Setting{"PartsFewHeads8", "qwen3_moe_plain", 8, 8, "600", "64", "f32", 8, 2, 1500, 60, 5},
        Setting{"Parts8", "qwen3_moe", 8, 8, "600", "100", "f32", 8, 2, 300, 60, 5},
        Setting{"Parts3", "llama_bias", 3, 8, "800", "64", "f32", 8, 2, 0, 200, 5, Setting::kOwnBits},
        Setting{"Parts5", "llama_smol", 5, 8, "1024", "64", "f32", 8, 2, 300, 60, 5, Setting::kEnds},
        Setting{"Parts6", "llama_bias", 6, 16, "1024", "33", "bf16", 8, 2, 300, 60, 5, Setting::kEnds},
        Setting{"PartsOwn6", "qwen3_moe_plain", 6, 8, "800", "64", "f32", 0, 0, 0, 200, 5, Setting::kOwnBits},
        Setting{"Parts7", "qwen3", 7, 8, "1024", "64", "f32", 8, 2, 300, 60, 5, Setting::kEnds},
        // Draft layers that guess right, one and two of them, and one that keeps its selection.
        Setting{"DraftLayer4", "glm_moe_dsa_sure_draft", 4, 8, "1024", "64", "f32", 8, 2, 600, 60, 5,
                Setting::kAllBits, nullptr, true},
        Setting{"DraftLayers2", "deepseek_v3_sure_drafts", 2, 8, "1024", "33", "bf16", 8, 2, 600, 60, 5,
                Setting::kAllBits, nullptr, true},
        Setting{"DraftLayerFp8Cache4", "glm_moe_dsa_kept_draft", 4, 8, "1024", "100", "f32", 8, 2, 600, 60, 5,
                Setting::kAllBits, "fp8", true},
        Setting{"DraftLayer3", "glm_moe_dsa_sure_draft", 3, 8, "1024", "64", "f32", 8, 2, 0, 200, 5,
                Setting::kOwnBits, nullptr, true},
        // Quantised weights, quantised caches, windows.
        Setting{"Fp8Weights8", "glm_moe_dsa_fp8", 8, 8, "1024", "64", "bf16", 8, 2, 300, 60, 5,
                Setting::kAllBits, "fp8_ds_mla"},
        Setting{"Fp4Weights4", "qwen3_moe_nvfp4", 4, 8, "1024", "64", "bf16", 8, 2, 600, 60, 5,
                Setting::kAllBits, "fp8"},
        Setting{"Fp4Weights2", "llama_nvfp4", 2, 8, "1024", "33", "f32", 8, 2, 600, 60, 5},
        Setting{"Fp8Cache4", "deepseek_v32", 4, 8, "800", "64", "f32", 8, 2, 1500, 60, 5, Setting::kAllBits,
                "fp8_ds_mla"},
        Setting{"Windows2", "qwen2_window", 2, 8, "700", "64", "f32", 8, 2, 1500, 60, 5}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace weft::integration
