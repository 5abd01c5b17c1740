// What the control plane costs, in instructions: exact, and the same on a busy machine.
//
// Runs itself under valgrind --tool=callgrind and counts the instructions of single regions: pages taken and
// given back, evictions, looking up a context by its length, a whole turn, a scheduling decision for 256
// requests. Times are printed only beside a random read of a cache line, for scale. Needs valgrind; says so
// and ends well if it is not there.
#include <sys/wait.h>
#include <unistd.h>
#include <valgrind/callgrind.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "controlplane/control_plane.h"
#include "proto/vocab/random.h"
#include "proto/vocab/units.h"
#include "tests/support/temp_folder.h"

namespace weft {
namespace {

using namespace controlplane;  // NOLINT
using kv::BlockHash;

constexpr int64_t kBlockTokens = 64;
constexpr kv::Residency kReplicated = {};

template <typename F>
void measured(const std::string& name, F f) {
  CALLGRIND_ZERO_STATS;
  CALLGRIND_START_INSTRUMENTATION;
  f();
  CALLGRIND_STOP_INSTRUMENTATION;
  CALLGRIND_DUMP_STATS_AT(name.c_str());
}

std::vector<int64_t> context_lengths(bool quick) {
  if (quick) return {8 << 10, 64 << 10};
  return {8 << 10, 32 << 10, 128 << 10, 512 << 10, 1 << 20};
}

// ---- pages

Limits one_pool(int64_t pages) {
  Limits limits;
  limits.geometry.block_tokens = kBlockTokens;
  limits.geometry.streams[0] = {1, 16};
  limits.pool_pages = {{pages, 0}};
  return limits;
}

constexpr int64_t kCycles = 1000;

void page_cycle() {
  const Limits limits = one_pool(100'000);
  PageAllocator allocator(limits);
  std::vector<PageId> pages(kCycles);
  for (int round = 0; round < 2; ++round) {  // the first one fills the deque
    const StepId step{static_cast<uint64_t>(round) + 1};
    const auto cycle = [&] {
      for (PageId& page : pages) page = *allocator.take(kv::Stream::kEntries, 0);
      for (const PageId page : pages) allocator.give_back(kv::Stream::kEntries, 0, page, step);
      allocator.complete(step);
    };
    if (round == 0) {
      cycle();
    } else {
      measured("pages", cycle);
    }
  }
}

BlockHash hash_of(uint64_t number) {
  BlockHash hash;
  SplitMix64 random(number);
  const uint64_t words[] = {random.next(), number};
  std::memcpy(hash.bytes.data(), words, sizeof words);
  return hash;
}

// A finished context of so many blocks in the cache.
Identities cached_context(Memory& memory, int64_t blocks, uint64_t seed) {
  Identities identities;
  for (int64_t i = 0; i < blocks; ++i)
    identities.push_back(hash_of(seed * 1'000'000 + static_cast<uint64_t>(i)));
  PageCounts reserved;
  reserved.at(kv::Stream::kEntries, 0) = blocks;
  memory.reserve(reserved);
  BlockPath path;
  for (int64_t i = 0; i < blocks; ++i) {
    memory.extend(path, 0);
    CHECK(memory.hold(memory.at(path, i), kReplicated, reserved, true));
    CHECK(memory.insert(path, identities[i], kReplicated));
  }
  memory.release(path);
  return identities;
}

const std::vector<int64_t> kEvicted = {250, 500, 1000, 2000, 4000};

void evictions() {
  for (const int64_t pages : kEvicted) {
    const Limits limits = one_pool(20'000);
    Memory memory(limits);
    for (uint64_t seed = 1; seed <= 20; ++seed) cached_context(memory, 1000, seed);
    PageCounts reserved;
    reserved.at(kv::Stream::kEntries, 0) = pages;
    memory.reserve(reserved);
    BlockPath path;
    for (int64_t i = 0; i < pages; ++i) memory.extend(path, 0);
    measured("evict " + std::to_string(pages), [&] {
      for (const BlockId id : path.own) CHECK(memory.hold(id, kReplicated, reserved, true));
    });
    CHECK_EQ(memory.evicted_blocks(), pages);
    memory.release(path);
  }
}

// ---- contexts

void lookups(bool quick) {
  for (const int64_t tokens : context_lengths(quick)) {
    const int64_t blocks = tokens / kBlockTokens;
    const Limits limits = one_pool(blocks + 100);
    Memory memory(limits);
    Identities parent = cached_context(memory, blocks, 1);
    Identities turn = parent.share();
    for (uint64_t i = 0; i < 8; ++i) turn.push_back(hash_of(77 + i));
    const std::string suffix = " " + std::to_string(tokens);
    BlockPath path;
    const auto use = [&](int64_t likely) {
      memory.use(memory.cache().find(turn, likely), path);
      CHECK_EQ(path.registered, blocks);
    };
    measured("parent" + suffix, [&] { use(blocks); });
    measured("give back" + suffix, [&] { memory.release(path); });
    measured("plain" + suffix, [&] { use(0); });
    memory.release(path);
    std::unordered_map<BlockHash, BlockId, kv::BlockHashHasher> table;
    for (int64_t i = 0; i < blocks; ++i) table.emplace(turn[i], BlockId{static_cast<uint32_t>(i)});
    const std::vector<BlockHash> hashes = turn.copy();
    size_t found = 0;
    measured("walk" + suffix, [&] {
      for (const BlockHash& hash : hashes) found += table.contains(hash) ? 1 : 0;
    });
    CHECK_EQ(found, static_cast<size_t>(blocks));
  }
}

// ---- the whole control plane

constexpr int kRanks = 8;
constexpr int64_t kRequests = 256;

Limits eight_ranks(int64_t context) {
  Limits limits;
  limits.rank_count = kRanks;
  limits.geometry.block_tokens = kBlockTokens;
  limits.geometry.streams = {kv::StreamGeometry{78, 576}, kv::StreamGeometry{21, 132}};
  const int64_t blocks = context / kBlockTokens + kRequests * 24;
  limits.pool_pages.assign(kRanks, {blocks, blocks});
  limits.max_context = context + 4096;
  limits.max_running = kRequests;
  limits.table_count = kRequests + 8;
  limits.max_samples = kRequests;
  limits.max_step_rows = 16384;
  return limits;
}

// The context and 256 requests beside it are nearly all that the pools hold.
constexpr int64_t kWaitingTokens = 450'000;

Limits crowded(int64_t context) {
  Limits limits = eight_ranks(context);
  const int64_t blocks = ceil_div(context / kBlockTokens, kRanks) + kRequests * 4;
  limits.pool_pages.assign(kRanks, {blocks, blocks});
  limits.max_context = context + kWaitingTokens + 4096;
  limits.max_running = limits.max_samples = kRequests + 1;
  return limits;
}

class Plane {
 public:
  explicit Plane(const Limits& limits, kv::IndexKind index = kv::IndexKind::kCopied)
      : plane(limits), index_(index) {}

  RequestArrived arrival(RequestId parent, int64_t tokens, int64_t max_tokens) {
    RequestArrived out;
    out.request = RequestId{++requests_};
    out.parent = parent;
    for (int64_t i = 0; i < tokens; ++i) out.prompt.push_back(static_cast<uint32_t>(random_.below(32000)));
    out.max_tokens = max_tokens;
    out.grouping.decode = {kv::DecodeKind::kDcp, kRanks};
    out.grouping.index = index_;
    out.root = kv::namespace_hash("m", "f", "");
    BlockHash last = out.root;
    std::vector<uint32_t> behind;
    if (const auto tail = plane.context(parent)) {
      last = tail->last;
      behind = tail->rest;
    }
    behind.insert(behind.end(), out.prompt.begin(), out.prompt.end());
    out.hashes = kv::block_hashes(last, behind, kBlockTokens);
    return out;
  }
  void feed(const Event& event) { plane.handle(now, {&event, 1}); }
  // Every rank's acknowledgement; samples by their ranks.
  static std::vector<Event> acknowledgements(const Plan& plan) {
    std::vector<Event> events;
    for (int rank = 0; rank < kRanks; ++rank) {
      StepAcknowledged ack{plan.step, rank, {}};
      for (const Span& span : plan.spans) {
        if (span.sampler_rank != rank) continue;
        for (int64_t i = 0; i < span.sample_rows; ++i) {
          ack.samples.push_back({span.request, span.sample_index + static_cast<uint32_t>(i), 7, false});
        }
      }
      events.emplace_back(std::move(ack));
    }
    return events;
  }
  bool step() {
    const auto plan = plane.next_plan(now);
    if (!plan) return false;
    plane.handle(now, acknowledgements(*plan));
    return true;
  }
  // A context of so many tokens that has ended.
  RequestId ended_context(int64_t tokens) {
    const RequestArrived first = arrival(RequestId{0}, tokens - 1, 1);
    feed(first);
    while (step()) {
    }
    return first.request;
  }

  ControlPlane plane;
  Time now{};

 private:
  const kv::IndexKind index_;
  SplitMix64 random_{1};
  uint64_t requests_ = 0;
};

constexpr int64_t kTurnTokens = 500;

void turns(bool quick) {
  for (const int64_t tokens : context_lengths(quick)) {
    Plane plane(eight_ranks(tokens));
    const RequestId parent = plane.ended_context(tokens);
    const Event turn = plane.arrival(parent, kTurnTokens, 16);
    const std::string suffix = " " + std::to_string(tokens);
    measured("turn arrives" + suffix, [&] { plane.feed(turn); });
    measured("turn planned" + suffix, [&] { CHECK(plane.plane.next_plan(plane.now)); });
  }
}

void schedule(bool quick) {
  const auto lengths = context_lengths(quick);
  for (const int64_t tokens : {lengths.front(), lengths.back()}) {
    Plane plane(eight_ranks(tokens));
    const RequestId parent = plane.ended_context(tokens);
    for (int64_t i = 0; i < kRequests; ++i) plane.feed(plane.arrival(parent, 50, 1000));
    while (plane.plane.counters().generated_tokens < kRequests * 3 + 1) CHECK(plane.step());
    const int64_t before = plane.plane.counters().generated_tokens;
    const std::string suffix = " " + std::to_string(tokens);
    std::optional<Plan> plan;
    for (int64_t i = 0; i < kBlockTokens; ++i) {  // each request gets a new block once
      const std::string step = suffix + " " + std::to_string(i);
      measured("plan" + step, [&] { plan = plane.plane.next_plan(plane.now); });
      const auto events = Plane::acknowledgements(*plan);
      measured("acknowledge" + step, [&] { plane.plane.handle(plane.now, events); });
    }
    CHECK_EQ(plane.plane.counters().generated_tokens - before, kRequests * kBlockTokens);
  }
}

// The first in the queue finds no room, and would not if the half that is less urgent left: every so many
// plans room is looked for.
void schedule_crowded(bool quick) {
  const auto lengths = context_lengths(quick);
  for (const int64_t tokens : {lengths.front(), lengths.back()}) {
    Plane plane(crowded(tokens), kv::IndexKind::kSplit);  // nothing to thin
    const RequestId parent = plane.ended_context(tokens);
    for (int64_t i = 0; i < kRequests; ++i) {
      RequestArrived request = plane.arrival(parent, 50, 1000);
      request.priority = i % 2 == 0 ? 1 : -1;
      plane.feed(request);
    }
    while (plane.plane.counters().generated_tokens < kRequests * 3 + 1) CHECK(plane.step());
    const Event waiting = plane.arrival(RequestId{0}, 50, kWaitingTokens);
    plane.feed(waiting);
    for (int64_t i = 0; i < kBlockTokens; ++i) {
      std::optional<Plan> plan;
      const std::string step = " " + std::to_string(tokens) + " " + std::to_string(i);
      measured("crowded plan" + step, [&] { plan = plane.plane.next_plan(plane.now); });
      CHECK_EQ(std::ssize(plan->spans), kRequests);  // the one that waits did not come in
      const auto events = Plane::acknowledgements(*plan);
      measured("crowded acknowledge" + step, [&] { plane.plane.handle(plane.now, events); });
    }
  }
}

void run_measured(bool quick) {
  page_cycle();
  evictions();
  lookups(quick);
  turns(quick);
  schedule(quick);
  schedule_crowded(quick);
}

// ---- outside of valgrind

// Instructions by region.
class Counts {
 public:
  void add(const std::string& region, double instructions) { by_region_[region] = instructions; }
  double of(const std::string& region) const {
    const auto found = by_region_.find(region);
    CHECK(found != by_region_.end(), "callgrind says nothing of '", region, "'");
    return found->second;
  }

 private:
  std::map<std::string, double> by_region_;
};

Counts read_counts(const std::filesystem::path& folder) {
  Counts counts;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    std::ifstream in(file.path());
    std::string name;
    for (std::string line; std::getline(in, line);) {
      const std::string trigger = "desc: Trigger: Client Request: ";
      if (line.starts_with(trigger)) name = line.substr(trigger.size());
      if (!name.empty() && line.starts_with("totals: ")) counts.add(name, std::stod(line.substr(8)));
    }
  }
  return counts;
}

template <typename F>
double nanoseconds(int64_t count, F f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() /
         static_cast<double>(count);
}

// A read that depends on the one before, of lines in random order.
double random_read_ns() {
  const size_t lines = size_t{1} << 21;  // 128 MB
  std::vector<std::array<uint64_t, 8>> memory(lines);
  std::vector<uint32_t> order(lines);
  for (uint32_t i = 0; i < lines; ++i) order[i] = i;
  SplitMix64 random(3);
  for (size_t i = lines - 1; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
  for (size_t i = 0; i < lines; ++i) memory[order[i]][0] = order[(i + 1) % lines];
  uint64_t at = 0;
  const int64_t reads = 1'000'000;
  const double ns = nanoseconds(reads, [&] {
    for (int64_t i = 0; i < reads; ++i) at = memory[at][0];
  });
  CHECK(at < lines);
  return ns;
}

double page_cycle_ns() {
  const Limits limits = one_pool(1'000'000);
  PageAllocator allocator(limits);
  std::vector<PageId> pages(500'000);
  uint64_t step = 0;
  const auto cycle = [&] {
    ++step;
    for (PageId& page : pages) page = *allocator.take(kv::Stream::kEntries, 0);
    for (const PageId page : pages) allocator.give_back(kv::Stream::kEntries, 0, page, StepId{step});
    allocator.complete(StepId{step});
  };
  cycle();
  return nanoseconds(std::ssize(pages), cycle);
}

void print_pages(const Counts& counts) {
  std::printf("\na page taken, given back and free again: %.0f instructions (wanted: 150 at most)\n",
              counts.of("pages") / kCycles);
  std::printf("  the same, %.1f ns of 500,000 pages; a random read of a cache line: %.1f ns\n",
              page_cycle_ns(), random_read_ns());
  std::printf("\nevictions for pages, of 20 contexts of 1,000 blocks\n%8s %22s\n", "pages",
              "instructions per page");
  for (const int64_t pages : kEvicted) {
    std::printf("%8lld %22.0f\n", (long long)pages,
                counts.of("evict " + std::to_string(pages)) / static_cast<double>(pages));
  }
}

void print_lookups(const Counts& counts, bool quick) {
  std::printf("\ninstructions to look up and lock the context of a turn of %lld new tokens, by its length\n",
              (long long)kTurnTokens);
  std::printf("%9s %12s %12s %12s %12s   %12s %12s\n", "tokens", "by parent", "whole prompt", "give back",
              "walk", "turn arrives", "turn planned");
  const auto lengths = context_lengths(quick);
  for (const int64_t tokens : lengths) {
    const std::string suffix = " " + std::to_string(tokens);
    std::printf("%9lld %12.0f %12.0f %12.0f %12.0f   %12.0f %12.0f\n", (long long)tokens,
                counts.of("parent" + suffix), counts.of("plain" + suffix), counts.of("give back" + suffix),
                counts.of("walk" + suffix), counts.of("turn arrives" + suffix),
                counts.of("turn planned" + suffix));
  }
  const std::string shortest = " " + std::to_string(lengths.front()),
                    longest = " " + std::to_string(lengths.back());
  const auto growth = [&](const std::string& name) {
    return counts.of(name + longest) - counts.of(name + shortest);
  };
  std::printf(
      "growth over that of the walk (one probe of a hash table for each block): by parent %.3f %%, whole "
      "prompt "
      "%.3f %%, arrives %.3f %%, planned (it writes the page table) %.0f %%  (wanted, by parent: 1 %% at "
      "most)\n",
      100 * growth("parent") / growth("walk"), 100 * growth("plain") / growth("walk"),
      100 * growth("turn arrives") / growth("walk"), 100 * growth("turn planned") / growth("walk"));
}

struct Planned {
  double average = 0, most = 0;  // per request, of one plan
};

Planned planned(const Counts& counts, const std::string& region, int64_t tokens) {
  Planned out;
  for (int64_t i = 0; i < kBlockTokens; ++i) {
    const double each = counts.of(region + " " + std::to_string(tokens) + " " + std::to_string(i)) /
                        static_cast<double>(kRequests);
    out.average += each / static_cast<double>(kBlockTokens);
    out.most = std::max(out.most, each);
  }
  return out;
}

void print_steps(const Counts& counts, bool quick) {
  std::printf(
      "\na step of %lld decoding requests planned and acknowledged by %d ranks, instructions per request "
      "(wanted, planned: 1,000 at most)\n",
      (long long)kRequests, kRanks);
  const auto lengths = context_lengths(quick);
  for (const int64_t tokens : {lengths.front(), lengths.back()}) {
    for (const std::string beside : {"", "crowded "}) {
      const Planned plan = planned(counts, beside + "plan", tokens),
                    acknowledge = planned(counts, beside + "acknowledge", tokens);
      std::printf("%9lld tokens of context%s: planned %.0f (at most %.0f), acknowledged %.0f (%.0f)\n",
                  (long long)tokens, beside.empty() ? "" : ", beside one that finds no room", plan.average,
                  plan.most, acknowledge.average, acknowledge.most);
    }
  }
}

int run_under_valgrind(bool quick, const char* self) {
  const test::TempFolder folder;
  const std::string out = "--callgrind-out-file=" + folder.path() + "/out";
  const pid_t child = ::fork();
  if (child == 0) {
    ::execlp("valgrind", "valgrind", "--tool=callgrind", "--quiet", "--instr-atstart=no", out.c_str(), self,
             quick ? "--quick" : "--full", static_cast<char*>(nullptr));
    ::_exit(127);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
    std::printf("control_bench counts instructions with valgrind, which is not installed\n");
    return 0;
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) return 1;
  const Counts counts = read_counts(folder.path());
  print_pages(counts);
  print_lookups(counts, quick);
  print_steps(counts, quick);
  return 0;
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::string(argv[1]) == "--quick";
  if (RUNNING_ON_VALGRIND == 0) return weft::run_under_valgrind(quick, argv[0]);
  weft::run_measured(quick);
  return 0;
}
