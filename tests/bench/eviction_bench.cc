// How much of recorded prompts the prefix cache finds, by eviction policy. Counters, no times: the real
// Memory, PrefixCache and policies, driven by traces.
//
// Agents (agent_sessions.jsonl): a closed loop of users for an hour. Each draws a session (an agent of one;
// one recorded session of each group), sends its requests one after the other, the next one service and think
// time after the last, each at most 60 s, then draws again. Blocks count when a request arrives and may be
// evicted while it is served, so that every policy sees the same requests at the same times. `clairvoyant`
// gives up the chain whose next request is furthest away, which nobody can know. Sessions are in two halves
// by FNV-1a of their group, or id: the numbers in the policy were chosen on `train`, `test` is what counts.
//
// Conversations (Mooncake's format): requests at their recorded times. `endless`: with room for all.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <queue>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "controlplane/memory.h"
#include "proto/command_line.h"
#include "proto/vocab/random.h"

namespace weft::bench {
namespace {

using controlplane::BlockPath;
using controlplane::ChainHistory;
using controlplane::Eviction;
using controlplane::Identities;
using controlplane::Limits;
using controlplane::Memory;
using controlplane::PageCounts;
using controlplane::ReturnOdds;
using controlplane::ReusePolicy;
using controlplane::Unused;
using kv::BlockHash;
using Json = nlohmann::json;

struct Options {
  std::string traces;
  int64_t pool_tokens = 2'350'000, seeds = 4, minutes = 60;
  std::string half = "test";
  bool learn = false;
};

// ---- one cache ------------------------------------------------------------------------------------------

constexpr Time kNever{int64_t{1} << 62};

class Clairvoyant : public controlplane::EvictionPolicy {
 public:
  // `since` is when the chain is used next; a chain whose time has come is what a request left behind.
  double worth(const Unused& unused, Time now) override {
    return unused.since <= now ? -1e30 : -static_cast<double>(unused.since.ns);
  }
  Time next_change(const Unused& unused, Time now) const override {
    return unused.since <= now ? kNever : unused.since;
  }
};

enum class Policy { kLru, kReuse, kClairvoyant };

// What the loop asks of a cache.
class Served {
 public:
  virtual ~Served() = default;
  // A request arrives. Its blocks are unused again at once; `served`: for a while it still counts as being
  // served. Returns the blocks found.
  virtual int64_t arrive(const std::vector<BlockHash>& hashes, Time now, Time next, bool served,
                         ChainHistory& history) = 0;
  // It has been served.
  virtual void end(const std::vector<BlockHash>& hashes, Time now, const ChainHistory& history) = 0;
  virtual void check() const {}
};

class Cache : public Served {
 public:
  Cache(Policy policy, int64_t blocks) : policy_(policy), limits_(limits(policy, blocks)) {
    memory_ = std::make_unique<Memory>(limits_, policy == Policy::kClairvoyant ? &clairvoyant_ : nullptr);
  }

  int64_t arrive(const std::vector<BlockHash>& hashes, Time now, Time next, bool served,
                 ChainHistory& history) override {
    const Identities prompt(hashes);
    memory_->advance(now);
    if (policy_ == Policy::kReuse) history = memory_->chain_arrived(prompt, now);
    BlockPath blocks;
    memory_->use(memory_->cache().find(prompt), blocks);
    const int64_t found = blocks.registered;
    PageCounts reserved;
    reserved.at(kv::Stream::kEntries, 0) = prompt.size() - found;
    memory_->reserve(reserved);
    while (blocks.size() < prompt.size()) {
      const int64_t index = blocks.size();
      memory_->extend(blocks, 0);
      CHECK(memory_->hold(memory_->at(blocks, index), {kv::replicated(), kv::replicated()}, reserved, true));
      CHECK(memory_->insert(blocks, prompt[index], {kv::replicated(), kv::replicated()}));
    }
    give_back(blocks, prompt, next, served, history);
    return found;
  }

  void end(const std::vector<BlockHash>& hashes, Time now, const ChainHistory& history) override {
    if (policy_ != Policy::kReuse) return;  // the others do not ask
    const Identities prompt(hashes);
    memory_->advance(now);
    BlockPath blocks;
    memory_->use(memory_->cache().find(prompt), blocks);
    give_back(blocks, prompt, now, false, history);
  }

  void check() const override { memory_->check_invariants(); }

 private:
  static Limits limits(Policy policy, int64_t blocks) {
    Limits limits;
    limits.geometry.block_tokens = 64;
    limits.geometry.streams[0] = {1, 16};
    limits.geometry.streams[1] = {};
    limits.pool_pages = {{blocks, 0}};
    limits.eviction = policy == Policy::kReuse ? Eviction::kReuse : Eviction::kLru;
    return limits;
  }
  void give_back(BlockPath& blocks, const Identities& prompt, Time next, bool served,
                 const ChainHistory& history) {
    if (policy_ == Policy::kReuse) {
      memory_->chain_unused(history, prompt, prompt.size(), served);
    } else if (policy_ == Policy::kClairvoyant) {
      memory_->chain_unused(Unused{next, {}, true});
    }
    memory_->release(blocks);
  }

  Policy policy_;
  Limits limits_;
  Clairvoyant clairvoyant_;
  std::unique_ptr<Memory> memory_;
};

// Only the policy, which learns: what it is told does not depend on what a cache holds.
class Learner : public Served {
 public:
  Learner(const ReturnOdds& begun, const ReturnOdds& ended) : policy_(begun, ended) {}
  int64_t arrive(const std::vector<BlockHash>& hashes, Time now, Time, bool, ChainHistory& history) override {
    const Identities prompt(hashes);
    policy_.advance(now);
    history = policy_.arrived(prompt, now);
    policy_.begun(history, prompt, prompt.size(), now);
    return 0;
  }
  void end(const std::vector<BlockHash>& hashes, Time now, const ChainHistory& history) override {
    const Identities prompt(hashes);
    policy_.advance(now);
    policy_.ended(history, prompt, prompt.size(), now);
  }
  const ReturnOdds& odds(bool begun) const { return policy_.odds(begun); }

 private:
  ReusePolicy policy_;
};

BlockHash hash_of(uint64_t number) {
  BlockHash hash;
  SplitMix64 random(number);
  const uint64_t words[] = {random.next(), number};
  std::memcpy(hash.bytes.data(), words, sizeof words);
  return hash;
}

struct Hits {
  int64_t found = 0, asked = 0, requests = 0;
  double rate() const {
    return static_cast<double>(found) / static_cast<double>(std::max<int64_t>(asked, 1));
  }
};

// ---- agents ---------------------------------------------------------------------------------------------

struct Turn {
  int64_t blocks = 0, common = 0;
  double service = 0, think = 0;  // seconds; think: before it
};
struct Session {
  bool test = false;
  std::vector<Turn> turns;
};

uint64_t fnv1a(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  return hash;
}

constexpr double kLongest = 60, kUnknownService = 6;

std::vector<Session> read_sessions(const std::string& path) {
  std::vector<Session> sessions;
  std::unordered_set<std::string> groups;
  std::ifstream file(path);
  for (std::string text; std::getline(file, text);) {
    const Json line = Json::parse(text);
    const std::string group = line.value("group", line.at("id").get<std::string>());
    if (!groups.insert(group).second) continue;
    const uint64_t hash = fnv1a(group);
    std::map<int, Session> agents;
    for (const Json& request : line.at("requests")) {
      Session& agent = agents[request.at(7)];
      agent.test = ((hash ^ hash >> 32) & 1) != 0;
      const auto capped = [&](size_t at, double unknown) {
        return std::min(kLongest, request.at(at).is_null() ? unknown : request.at(at).get<double>());
      };
      agent.turns.push_back({request.at(4), agent.turns.empty() ? 0 : request.at(3).get<int64_t>(),
                             capped(5, kUnknownService), capped(6, 0)});
    }
    for (auto& [number, agent] : agents) sessions.push_back(std::move(agent));
  }
  return sessions;
}

// Without a trace: sessions that grow, some quick, some with a human in them.
std::vector<Session> made_up_sessions() {
  std::vector<Session> sessions;
  SplitMix64 random(1);
  for (int i = 0; i < 40; ++i) {
    Session session{i % 2 != 0, {}};
    int64_t blocks = 100 + static_cast<int64_t>(random.below(1000));
    const double pace = i % 4 < 2 ? 5 : 30;
    for (uint64_t turn = 0; turn < 5 + random.below(40); ++turn) {
      const int64_t common = session.turns.empty() ? 0 : blocks;
      blocks += static_cast<int64_t>(random.below(40));
      session.turns.push_back({blocks, common, 2 + 10 * random.uniform(), pace * (0.5 + random.uniform())});
    }
    sessions.push_back(std::move(session));
  }
  return sessions;
}

Time at_seconds(double seconds) { return Time{std::llround(seconds * 1e9)}; }

// The loop: the same requests at the same times whatever the cache. Null cache: endless.
class ClosedLoop {
 public:
  ClosedLoop(const std::vector<const Session*>& sessions, uint64_t seed, int64_t users, Served* cache)
      : sessions_(sessions), random_(seed), cache_(cache) {
    for (int64_t user = 0; user < users; ++user) draw(30 * random_.uniform());
  }

  Hits run(double seconds) {
    while (!events_.empty() && events_.top().when <= seconds) {
      const Event event = events_.top();
      events_.pop();
      if (event.ends) {
        cache_->end(active_[event.who]->prompt, at_seconds(event.when), active_[event.who]->history);
        if (active_[event.who]->done()) active_[event.who].reset();
      } else {
        arrive(event);
      }
    }
    if (cache_ != nullptr) cache_->check();
    return hits_;
  }

 private:
  struct Active {
    const Session* session;
    size_t turn = 0;
    std::vector<BlockHash> prompt;
    ChainHistory history;
    bool done() const { return turn == session->turns.size(); }
  };
  struct Event {
    double when;
    bool ends;
    size_t who;
    bool operator>(const Event& other) const {
      return std::tie(when, ends, who) > std::tie(other.when, other.ends, other.who);
    }
  };

  void draw(double when) {
    active_.push_back(
        std::make_unique<Active>(Active{sessions_[random_.below(sessions_.size())], 0, {}, {}}));
    events_.push({when, false, active_.size() - 1});
  }

  void arrive(const Event& event) {
    Active& active = *active_[event.who];
    const Turn& turn = active.session->turns[active.turn++];
    const int64_t common = std::min({turn.common, turn.blocks, std::ssize(active.prompt)});
    active.prompt.resize(static_cast<size_t>(common));
    while (std::ssize(active.prompt) < turn.blocks) active.prompt.push_back(hash_of(++ids_));
    const double ended = event.when + turn.service;
    const double next = active.done() ? 0 : ended + active.session->turns[active.turn].think;
    const Time now = at_seconds(event.when);
    hits_.found += cache_ == nullptr
                       ? common
                       : cache_->arrive(active.prompt, now, active.done() ? kNever : at_seconds(next), true,
                                        active.history);
    hits_.asked += turn.blocks;
    ++hits_.requests;
    const bool done = active.done();
    if (cache_ != nullptr) events_.push({ended, true, event.who});
    if (done) {
      draw(ended + 0.001);
    } else {
      events_.push({std::max(next, ended + 1e-6), false, event.who});
    }
  }

  const std::vector<const Session*>& sessions_;
  SplitMix64 random_;
  Served* cache_;
  std::vector<std::unique_ptr<Active>> active_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  Hits hits_;
  uint64_t ids_ = 0;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 != 0 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

void agents(const Options& options, const std::vector<Session>& all) {
  for (const bool test : {false, true}) {
    if (options.half != "both" && (options.half == "test") != test) continue;
    std::vector<const Session*> sessions;
    for (const Session& one : all) {
      if (one.test == test) sessions.push_back(&one);
    }
    std::printf(
        "\nagents, half `%s`: %zu sessions, pool of %lld tokens, %lld minutes, %lld seeds; blocks found\n",
        test ? "test" : "train", sessions.size(), (long long)options.pool_tokens, (long long)options.minutes,
        (long long)options.seeds);
    std::printf("%5s %5s   %7s %7s %11s %7s   %s\n", "users", "seed", "lru", "reuse", "clairvoyant",
                "endless", "of the gap from lru to clairvoyant, reuse closes");
    for (const int64_t users : {32, 64}) {
      std::vector<double> rates[4], closed;
      for (int64_t seed = 1; seed <= options.seeds; ++seed) {
        const double seconds = 60.0 * static_cast<double>(options.minutes);
        double rate[4];
        for (const Policy policy : {Policy::kLru, Policy::kReuse, Policy::kClairvoyant}) {
          Cache cache(policy, options.pool_tokens / 64);
          rate[static_cast<int>(policy)] =
              ClosedLoop(sessions, static_cast<uint64_t>(seed), users, &cache).run(seconds).rate();
        }
        rate[3] = ClosedLoop(sessions, static_cast<uint64_t>(seed), users, nullptr).run(seconds).rate();
        for (size_t i = 0; i < 4; ++i) rates[i].push_back(rate[i]);
        closed.push_back((rate[1] - rate[0]) / (rate[2] - rate[0]));
        std::printf("%5lld %5lld   %7.4f %7.4f %11.4f %7.4f   %.3f\n", (long long)users, (long long)seed,
                    rate[0], rate[1], rate[2], rate[3], closed.back());
        std::fflush(stdout);
      }
      std::printf("%5lld  mid.   %7.4f %7.4f %11.4f %7.4f   %.3f\n", (long long)users, median(rates[0]),
                  median(rates[1]), median(rates[2]), median(rates[3]), median(closed));
    }
  }
}

void print_start(const char* name, const ReturnOdds::Start& start) {
  std::printf("const ReturnOdds::Start ReturnOdds::%s = {{\n", name);
  for (const auto& part : start) {
    std::string line = "    {{";
    for (size_t cell = 0; cell < part.size(); ++cell) {
      const std::string word = std::to_string(part[cell]) + (cell + 1 < part.size() ? "," : "}},");
      if (line.size() + 1 + word.size() > 108) {
        std::printf("%s\n", line.c_str());
        line = "     ";
      }
      line += (line.back() == '{' || line.back() == ' ' ? "" : " ") + word;
    }
    std::printf("%s\n", line.c_str());
  }
  std::printf("}};\n");
}

// The factors that `reuse` starts from, of one half: controlplane/return_odds_start.cc.
void learn(const Options& options, const std::vector<Session>& all) {
  std::vector<const Session*> sessions;
  for (const Session& one : all) {
    if (one.test == (options.half == "test")) sessions.push_back(&one);
  }
  ReturnOdds begun({}, ReturnOdds::kBegunSeconds), ended({}, ReturnOdds::kEndedSeconds);
  for (const int64_t users : {32, 64}) {
    for (int64_t seed = 1; seed <= options.seeds; ++seed) {
      Learner learner(begun, ended);
      ClosedLoop(sessions, static_cast<uint64_t>(seed), users, &learner)
          .run(60.0 * static_cast<double>(options.minutes));
      begun = learner.odds(true);
      ended = learner.odds(false);
    }
  }
  print_start("kBegun", begun.learned());
  print_start("kEnded", ended.learned());
}

// ---- conversations --------------------------------------------------------------------------------------

struct Request {
  Time at;
  std::vector<BlockHash> prompt;
};

std::vector<Request> read_requests(const std::string& path) {
  std::vector<Request> requests;
  std::ifstream file(path);
  for (std::string text; std::getline(file, text);) {
    const Json line = Json::parse(text);
    Request& request = requests.emplace_back();
    request.at = Time{line.at("timestamp").get<int64_t>() * 1'000'000};
    for (const Json& id : line.at("hash_ids")) request.prompt.push_back(hash_of(id.get<uint64_t>()));
  }
  return requests;
}

Hits replay(const std::vector<Request>& requests, Policy policy, int64_t blocks) {
  Cache cache(policy, blocks);
  Hits hits;
  ChainHistory history;
  for (const Request& request : requests) {
    hits.found += cache.arrive(request.prompt, request.at, kNever, false, history);
    hits.asked += std::ssize(request.prompt);
    ++hits.requests;
  }
  cache.check();
  return hits;
}

void conversations(const std::string& name, const std::vector<Request>& requests) {
  std::unordered_set<BlockHash, kv::BlockHashHasher> distinct;
  size_t longest = 0;
  for (const Request& request : requests) {
    distinct.insert(request.prompt.begin(), request.prompt.end());
    longest = std::max(longest, request.prompt.size());
  }
  const auto all = std::ssize(distinct);
  const Hits endless = replay(requests, Policy::kLru, all);
  std::printf("\n%s: %lld requests, %lld of %lld blocks found with an endless pool: %.4f\n", name.c_str(),
              (long long)endless.requests, (long long)endless.found, (long long)endless.asked,
              endless.rate());
  std::printf("%22s   %7s %7s\n", "pool, of all blocks", "lru", "reuse");
  for (const int percent : {1, 2, 5, 10, 20, 50}) {
    const int64_t blocks = std::max<int64_t>(all * percent / 100, static_cast<int64_t>(longest));
    std::printf("%12lld (%4.1f %%)      %7.4f %7.4f\n", (long long)blocks,
                100.0 * static_cast<double>(blocks) / static_cast<double>(all),
                replay(requests, Policy::kLru, blocks).rate(),
                replay(requests, Policy::kReuse, blocks).rate());
    std::fflush(stdout);
  }
}

int fail(const std::string& why) {
  std::fprintf(stderr, "eviction_bench: %s\n", why.c_str());
  return 2;
}

int run_traces(const Options& options) {
  std::vector<std::filesystem::path> files;
  std::error_code failed;
  for (const auto& file : std::filesystem::directory_iterator(options.traces, failed)) {
    if (file.path().extension() == ".jsonl") files.push_back(file.path());
  }
  if (files.empty()) return fail("no *.jsonl in '" + options.traces + "'");
  std::sort(files.begin(), files.end());
  for (const auto& path : files) {
    try {
      if (path.filename().string().starts_with("agent")) {
        (options.learn ? learn : agents)(options, read_sessions(path));
      } else if (!options.learn) {
        conversations(path.stem().string(), read_requests(path));
      }
    } catch (const Json::exception& bad) {
      return fail(path.string() + ": " + bad.what());
    }
  }
  return 0;
}

int main_of(int argc, char** argv) {
  using command_line::at_least;
  Options options;
  bool quick = false;
  CLI::App app("Counts what the prefix cache finds of recorded prompts, by eviction policy. No times.",
               "eviction_bench");
  app.add_flag("--quick", quick, "ten minutes of one seed");
  app.add_option(
         "--traces", options.traces,
         "folder of *.jsonl: sessions if named agent*, else Mooncake's format (default: made-up sessions)")
      ->type_name("FOLDER");
  app.add_option("--half", options.half, "of the sessions: train, test or both")
      ->check(command_line::one_of({"train", "test", "both"}))
      ->capture_default_str();
  app.add_flag("--learn", options.learn,
               "prints the factors that `reuse` starts from, learned on one half (with --traces)");
  const auto number = [&](const char* name, int64_t& value, int64_t low, const char* what) {
    app.add_option(name, value, what)->type_name("N")->check(at_least(low))->capture_default_str();
  };
  number("--pool-tokens", options.pool_tokens, 1'000'000, "of the agents' pool");
  number("--seeds", options.seeds, 1, "runs of the loop");
  number("--minutes", options.minutes, 1, "of one run");
  const auto asked = command_line::parse_words(app, {argv + 1, argv + argc});
  if (!asked) return fail(asked.error().text());
  if (*asked == command_line::Asked::kHelp) {
    std::fputs(command_line::help_text(app).c_str(), stdout);
    return 0;
  }
  if (quick) options.minutes = 10, options.seeds = 1;
  if (!options.traces.empty()) return run_traces(options);
  agents(options, made_up_sessions());
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) { return weft::bench::main_of(argc, argv); }
