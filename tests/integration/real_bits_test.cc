// Goal: equal bits between real processes, over a set of ways to run that covers all pairs of values of all
// axes. Method: random checkpoints; the reference is one worker, one chunk, alone. Every other way is asked
// for digests (SHA-256 of the raw logits) of all positions, through the client API, and must give the
// reference's. The covering set is drawn greedily from a fixed seed and printed. A stream with a credit
// stands still while it is regrouped.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <set>

#include "kv/layout.h"
#include "proto/vocab/random.h"
#include "tests/integration/harness.h"

namespace weft::integration {
namespace {

constexpr int64_t kBlock = 8, kPrompt = 205,
                  kAnswer = 14;  // 25 blocks and a partial one; crosses two borders
const int kWorkers[] = {1, 2, 4, 8};
const char* const kChunks[] = {"512", "64", "200"};
const char* const kPrefills[] = {"none", "zigzag", "interleave", "contiguous"};
const char* const kDecodes[] = {"tp", "dp", "dcp(2)", "dcp(4)", "dcp(8)", "dp(2)xdcp(2)", "dp(2)xtp"};
const int kLeastWorkers[] = {1, 1, 2, 4, 8, 4, 4};
const char* const kIndexes[] = {"copied", "split", "copied(2)", "split(2)"};
const char* const kMechanisms[] = {"query=gathered,partials=all-to-all",
                                   "query=replicated,partials=all-to-all", "query=gathered,partials=tree",
                                   "query=replicated,partials=tree"};

const char* const kDrafts[] = {"", " drafts that hold", " drafts of which some hold"};
const char* const kContexts[] = {"device", "host"};

// Axis values by number: workers, chunk, prefill, decode, index, with others, prefix hit, regrouped, drafts,
// mechanisms, context.
constexpr size_t kAxes = 11;
constexpr std::array<int, kAxes> kSizes = {4, 3, 4, 7, 4, 2, 2, 2, 3, 4, 2};
using Way = std::array<int, kAxes>;

bool possible(const Way& way) {
  const int workers = kWorkers[way[0]];
  if (workers < kLeastWorkers[way[3]] || (workers == 1 && way[4] >= 2)) return false;
  return workers > 1 || (way[2] == 0 && way[7] == 0);  // one worker: nothing to split or regroup
}

std::string name(const Way& way) {
  return "W=" + std::to_string(kWorkers[way[0]]) + " chunk=" + kChunks[way[1]] +
         " prefill=" + kPrefills[way[2]] + " decode=" + kDecodes[way[3]] + " index=" + kIndexes[way[4]] +
         (way[5] ? " with others" : " alone") + (way[6] ? " prefix hit" : "") + (way[7] ? " regrouped" : "") +
         kDrafts[way[8]] + " " + kMechanisms[way[9]] + " context=" + kContexts[way[10]];
}

// (axis, value, axis, value) of every pair in a way.
std::set<std::array<int, 4>> pairs_of(const Way& way) {
  std::set<std::array<int, 4>> pairs;
  for (int a = 0; a < static_cast<int>(kAxes); ++a) {
    for (int b = a + 1; b < static_cast<int>(kAxes); ++b) {
      pairs.insert({a, way[static_cast<size_t>(a)], b, way[static_cast<size_t>(b)]});
    }
  }
  return pairs;
}

// `on_host`: the model selects what rows read, so contexts can lie on the host.
std::vector<Way> covering_set(uint64_t seed, bool on_host) {
  std::vector<Way> all;
  Way way{};
  for (bool more = true; more;) {
    if (possible(way) && (on_host || way[10] == 0)) all.push_back(way);
    more = false;
    for (size_t axis = 0; axis < kAxes && !more; ++axis) {
      more = ++way[axis] < kSizes[axis];
      if (!more) way[axis] = 0;
    }
  }
  std::set<std::array<int, 4>> open;
  for (const Way& one : all) open.merge(pairs_of(one));
  SplitMix64 random(seed);
  std::vector<Way> chosen;
  while (!open.empty()) {
    Way best{};
    size_t best_covers = 0;
    for (int tries = 0; tries < 300; ++tries) {
      const Way& candidate = all[random.below(all.size())];
      size_t covers = 0;
      for (const auto& pair : pairs_of(candidate)) covers += open.count(pair);
      if (covers > best_covers) best = candidate, best_covers = covers;
    }
    if (best_covers == 0) continue;
    for (const auto& pair : pairs_of(best)) open.erase(pair);
    chosen.push_back(best);
  }
  // Pairs are covered; a few more ways at random.
  while (chosen.size() < 32) {
    const Way& extra = all[random.below(all.size())];
    if (std::find(chosen.begin(), chosen.end(), extra) == chosen.end()) chosen.push_back(extra);
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

struct Digests {
  std::map<uint64_t, std::string> by_position;
  std::vector<uint32_t> tokens;
  uint64_t cached = 0;
  uint64_t switch_bytes = 0;
  int regroups = 0;
  uint64_t drafted = 0, accepted = 0;
  std::string context;
};

std::vector<uint32_t> prompt_tokens(uint64_t seed) {
  constexpr uint64_t kSmallestVocabulary = 160;  // of the models below
  SplitMix64 random(seed);
  std::vector<uint32_t> out;
  for (int64_t i = 0; i < kPrompt; ++i)
    out.push_back(static_cast<uint32_t>(random.below(kSmallestVocabulary)));
  return out;
}

wire::GenerateRequest request_of(const std::vector<uint32_t>& prompt, const Way& way, bool prefix_cache) {
  wire::GenerateRequest request;
  for (uint32_t token : prompt) request.mutable_tokens()->add_ids(token);
  request.set_max_tokens(kAnswer);
  request.set_ignore_eos(true);
  request.set_prefill(kPrefills[way[2]]);
  request.set_decode(kDecodes[way[3]]);
  request.set_index(kIndexes[way[4]]);
  request.set_mechanisms(kMechanisms[way[9]]);
  request.set_context(kContexts[way[10]]);
  request.set_digest(true);
  request.set_no_prefix_cache(!prefix_cache);
  return request;
}

// A script made of the answer itself, every third guess of which may be wrong.
void add_drafts(wire::GenerateRequest& request, std::vector<uint32_t> answer, bool some_wrong) {
  for (size_t i = 2; some_wrong && i < answer.size(); i += 3) answer[i] ^= 1;
  request.set_speculative("forced");
  request.set_draft_tokens(3);
  request.mutable_forced_drafts()->Add(answer.begin(), answer.end());
}

// The decode groupings a regroup goes through, all different from each other where W allows it.
std::string next_decode(int workers, size_t turn) {
  static const std::vector<std::string> two = {"dcp(2)", "dp", "tp"}, four = {"dcp(4)", "tp", "dcp(2)"},
                                        eight = {"dcp(8)", "dp(4)xdcp(2)", "dcp(2)"};
  const auto& list = workers == 2 ? two : workers == 4 ? four : eight;
  return list[turn % list.size()];
}

Digests run(Daemon& daemon, wire::GenerateRequest request, const Way& way) {
  Digests out;
  client::Client client = daemon.client();
  const bool regrouped = way[7] != 0;
  if (regrouped) request.set_credit(3);
  const uint64_t tag = client.start(request).value();
  uint64_t id = 0;
  for (;;) {
    wire::ClientReply reply = client.next(tag, kPatience).value();
    if (reply.has_accepted()) id = reply.accepted().request();
    if (reply.has_digest()) out.by_position[reply.digest().position()] = reply.digest().sha256();
    if (reply.has_finished()) {
      EXPECT_EQ(reply.finished().reason(), "length") << reply.finished().error().message();
      out.cached = reply.finished().usage().cached_tokens();
      out.switch_bytes = reply.finished().trace().switch_bytes();
      out.drafted = reply.finished().trace().drafted_tokens();
      out.accepted = reply.finished().trace().accepted_tokens();
      out.context = reply.finished().trace().context();
      return out;
    }
    if (!reply.has_token()) continue;
    out.tokens.push_back(reply.token().token());
    if (!regrouped || out.tokens.size() % 3 != 0) continue;
    // The credit is used up: nothing of this request runs until it is granted more.
    if (out.regroups < 3) {
      wire::ControlRequest regroup;
      regroup.mutable_regroup()->add_requests(id);
      regroup.mutable_regroup()->set_decode(next_decode(kWorkers[way[0]], static_cast<size_t>(out.regroups)));
      regroup.mutable_regroup()->set_index(kIndexes[(way[4] + 1 + out.regroups) % 2]);
      regroup.mutable_regroup()->set_mechanisms(kMechanisms[(way[9] + out.regroups) % 4]);
      const wire::ControlReply done = daemon.control(regroup);
      EXPECT_TRUE(done.has_regroup()) << done.DebugString();
      for (const auto& outcome : done.regroup().outcomes()) {
        EXPECT_FALSE(outcome.has_error()) << outcome.error().message();
        ++out.regroups;
      }
    }
    EXPECT_TRUE(client.grant(id, 3).has_value());
  }
}

struct Model {
  const char* name;
  const char* weights;
  const char* cache;
  bool selects = false;
};

class RealBits : public ::testing::TestWithParam<Model> {
 protected:
  std::vector<std::string> arguments(int workers, const char* chunk) const {
    std::vector<std::string> all = {"--workers",       std::to_string(workers),
                                    "--max-step-rows", chunk,
                                    "--block-tokens",  std::to_string(kBlock),
                                    "--pool-tokens",   "16384",
                                    "--max-context",   "1024",
                                    "--weight-dtype",  GetParam().weights,
                                    "--cache-dtype",   GetParam().cache};
    if (GetParam().selects)
      all.insert(all.end(), {"--host-pool", "64MiB", "--host-write", "through", "--hot-tokens", "24"});
    return all;
  }
  std::string model() const { return std::string(WEFT_GOLDEN_FOLDER) + "/" + GetParam().name; }
};

TEST_P(RealBits, ACoveringSetOfWaysGivesTheSameDigests) {
  unsigned shards = 0;
  for (int64_t block = 0; block * kBlock < kPrompt; ++block) shards |= 1u << kv::canonical_shard(block);
  ASSERT_EQ(shards, 0xffu);

  const std::vector<uint32_t> prompt = prompt_tokens(41);
  Digests reference;
  {
    Daemon daemon(arguments(1, kChunks[0]), model());
    ASSERT_TRUE(daemon.wait_ready()) << daemon.log();
    const Way plain{};
    reference = run(daemon, request_of(prompt, plain, false), plain);
  }
  ASSERT_EQ(std::ssize(reference.by_position), kPrompt + kAnswer - 1);

  const uint64_t seed = 11;
  const std::vector<Way> ways = covering_set(seed, GetParam().selects);
  std::printf("seed %llu: %zu ways cover all pairs\n", static_cast<unsigned long long>(seed), ways.size());
  ASSERT_GE(ways.size(), 24u);
  std::unique_ptr<Daemon> daemon;
  Way running{};
  for (const Way& way : ways) {
    SCOPED_TRACE(name(way));
    if (daemon == nullptr || running[0] != way[0] || running[1] != way[1]) {
      if (daemon != nullptr) {
        daemon->signal(SIGTERM);
        EXPECT_EQ(daemon->wait_exit(), 0);
        EXPECT_EQ(daemon->leftovers(), "");
      }
      daemon = std::make_unique<Daemon>(arguments(kWorkers[way[0]], kChunks[way[1]]), model());
      ASSERT_TRUE(daemon->wait_ready()) << daemon->log();
      running = way;
    }
    // With a salt of its own what hits is what this way has put there. A context on the host needs the cache.
    wire::GenerateRequest request = request_of(prompt, way, way[6] != 0 || way[10] != 0);
    request.set_cache_salt(name(way));
    if (way[6])
      (void)run(*daemon, request, {way[0], way[1], way[2], way[3], way[4], 0, 0, 0, 0, way[9], way[10]});
    // Company under every grouping, started before and still running when the request under test comes.
    std::vector<client::Client> others;
    std::vector<uint64_t> tags;
    if (way[5]) {
      for (int decode = 0; decode < kSizes[3]; ++decode) {
        const Way other = {way[0], way[1], decode % 3, decode, decode % 2, 1, 0, 0, 0, decode % 4, 0};
        if (!possible(other)) continue;
        wire::GenerateRequest company =
            request_of(prompt_tokens(100 + static_cast<uint64_t>(decode)), other, false);
        company.set_max_tokens(60);
        others.push_back(daemon->client());
        tags.push_back(others.back().start(company).value());
      }
    }
    if (way[8]) add_drafts(request, reference.tokens, way[8] == 2);
    const Digests got = run(*daemon, request, way);
    EXPECT_EQ(got.drafted > 0, way[8] != 0);
    EXPECT_EQ(got.accepted > 0, way[8] != 0);
    EXPECT_EQ(got.accepted < got.drafted, way[8] == 2);
    EXPECT_EQ(got.tokens, reference.tokens);
    EXPECT_EQ(got.cached, way[6] ? static_cast<uint64_t>(kPrompt / kBlock * kBlock) : 0u);
    EXPECT_EQ(got.switch_bytes, 0u);
    EXPECT_EQ(got.regroups, way[7] ? 3 : 0);
    EXPECT_EQ(got.context, kContexts[way[10]]);
    int64_t different = 0;
    for (uint64_t position = got.cached; position < reference.by_position.size(); ++position) {
      const auto found = got.by_position.find(position);
      if (found == got.by_position.end() || found->second != reference.by_position.at(position)) ++different;
    }
    EXPECT_EQ(different, 0) << "positions whose logits differ";
    for (size_t i = 0; i < others.size(); ++i) {
      for (;;) {
        const auto reply = others[i].next(tags[i], kPatience);
        ASSERT_TRUE(reply.has_value()) << reply.error().text();
        if ((*reply).has_finished()) break;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Models, RealBits,
    ::testing::Values(Model{"glm_moe_dsa", "f32", "f32", true}, Model{"deepseek_v32", "bf16", "bf16", true},
                      Model{"llama_smol", "bf16", "bf16"}, Model{"qwen2_window", "f32", "f32"},
                      Model{"glm_moe_dsa_fp8", "bf16", "bf16", true},
                      Model{"glm_moe_dsa", "bf16", "fp8_ds_mla", true}),
    [](const auto& info) { return std::string(info.param.name) + "_" + info.param.cache; });

}  // namespace
}  // namespace weft::integration
