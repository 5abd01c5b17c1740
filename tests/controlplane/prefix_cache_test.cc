// Goal: the cache finds exactly the longest registered chain, never evicts what is used, and evicts the least
// recently used tail first, or the one that a policy finds worth least, children before parents.
// Method: random chains beside a naive model that keeps whole texts; then cases through the control plane.
#include "controlplane/prefix_cache.h"

#include <gtest/gtest.h>

#include "controlplane/memory.h"
#include "proto/vocab/random.h"
#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

// Registered chains as texts of one number per block, with users and last use. Slow and obvious.
struct NaiveCache {
  struct Node {
    int users = 0;
    uint64_t last_use = 0;
    Unused chain;
  };
  std::map<std::vector<int>, Node> nodes;
  uint64_t uses = 0;

  size_t longest(const std::vector<int>& text) const {
    size_t length = 0;
    while (length < text.size() &&
           nodes.contains({text.begin(), text.begin() + static_cast<int64_t>(length) + 1})) {
      ++length;
    }
    return length;
  }
  bool has_child(const std::vector<int>& text) const {
    return std::any_of(nodes.begin(), nodes.end(), [&](const auto& node) {
      return node.first.size() == text.size() + 1 && std::equal(text.begin(), text.end(), node.first.begin());
    });
  }
  // Null policy: least recently used.
  std::vector<int> victim(EvictionPolicy* policy, Time now) const {
    const auto key = [&](const std::vector<int>& text) {
      const Node& node = nodes.at(text);
      return std::pair(policy != nullptr ? policy->worth(node.chain, now) : 0, node.last_use);
    };
    std::vector<int> best;
    for (const auto& [text, node] : nodes) {
      if (node.users > 0 || has_child(text)) continue;
      if (best.empty() || key(text) < key(best)) best = text;
    }
    return best;
  }
};

// Worths that jump about with kind and age: nothing but the present one tells the victim.
class JumpyPolicy : public EvictionPolicy {
 public:
  double worth(const Unused& unused, Time now) override {
    const auto age = static_cast<uint64_t>(now.ns - unused.since.ns) / kAge;
    return static_cast<double>(SplitMix64(unused.steps[0] * 1000 + age).next() % 8);
  }
  Time next_change(const Unused& unused, Time now) const override {
    return Time{unused.since.ns + ((now.ns - unused.since.ns) / kAge + 1) * kAge};
  }

 private:
  static constexpr int64_t kAge = 10;
};

class CacheModel {
 public:
  CacheModel(uint64_t seed, EvictionPolicy* policy)
      : random_(seed), limits_(make_limits()), policy_(policy), memory_(limits_, policy) {}

  void run() {
    for (int i = 0; i < 600; ++i) {
      now_.ns += static_cast<int64_t>(random_.below(7));
      memory_.advance(now_);
      if (users_.size() < 4 && random_.below(2) == 0) {
        start();
      } else if (!users_.empty()) {
        stop(random_.below(users_.size()));
      }
      memory_.check_invariants();
      compare();
    }
    EXPECT_GT(memory_.evicted_blocks(), 0);
  }

 private:
  static constexpr int64_t kPages = 24;
  static constexpr kv::Residency kResidency = {};
  struct User {
    std::vector<int> text;
    BlockPath blocks;
  };
  static Limits make_limits() {
    Limits limits = small_limits(1, kPages);
    limits.geometry.streams[1] = {};
    return limits;
  }
  std::vector<int> random_text() {
    std::vector<int> text;
    const uint64_t length = 1 + random_.below(6);
    while (text.size() < length) text.push_back(static_cast<int>(random_.below(2)));
    return text;
  }
  static Identities hashes(const std::vector<int>& text) {
    Identities out;
    kv::BlockHash parent;
    for (const int block : text) {
      const auto token = static_cast<uint32_t>(block);
      out.push_back(parent = kv::block_hash(parent, {&token, 1}));
    }
    return out;
  }
  static std::vector<int> cut(const std::vector<int>& text, size_t length) {
    return {text.begin(), text.begin() + static_cast<int64_t>(length)};
  }

  // A sequence comes: uses what is there, takes pages for the rest (evicting), registers.
  void start() {
    User user;
    user.text = random_text();
    const Identities identities = hashes(user.text);
    const auto likely = static_cast<int64_t>(random_.below(user.text.size() + 2));
    memory_.use(memory_.cache().find(identities, likely), user.blocks);
    ASSERT_EQ(user.blocks.registered, static_cast<int64_t>(naive_.longest(user.text)));
    for (int64_t n = 1; n <= user.blocks.registered; ++n)
      ++naive_.nodes.at(cut(user.text, static_cast<size_t>(n))).users;
    while (user.blocks.size() < std::ssize(user.text)) {
      const int64_t n = user.blocks.size();
      memory_.extend(user.blocks, 0);
      hold_one(memory_.at(user.blocks, n));
      if (testing::Test::HasFatalFailure()) return;
      ASSERT_TRUE(memory_.insert(user.blocks, identities[n], kResidency));
      naive_.nodes[cut(user.text, static_cast<size_t>(n) + 1)].users = 1;
    }
    users_.push_back(std::move(user));
  }

  void hold_one(BlockId id) {
    PageCounts reserved;
    reserved.at(kv::Stream::kEntries, 0) = 1;
    memory_.reserve(reserved);
    const int64_t before = memory_.evicted_blocks();
    const bool full = memory_.pool(kv::Stream::kEntries, 0).free == 0;
    const std::vector<int> expected = full ? naive_.victim(policy_, now_) : std::vector<int>{};
    ASSERT_TRUE(memory_.hold(id, kResidency, reserved, true));
    ASSERT_EQ(memory_.evicted_blocks() - before, full ? 1 : 0);
    if (full) {
      ASSERT_EQ(memory_.cache().find(hashes(expected)).blocks, std::ssize(expected) - 1)
          << "another block was evicted";
      naive_.nodes.erase(expected);
    }
  }

  void stop(size_t which) {
    User user = std::move(users_[which]);
    users_.erase(users_.begin() + static_cast<int64_t>(which));
    const Unused chain{now_, {static_cast<uint8_t>(random_.below(5))}, true};
    memory_.chain_unused(chain);
    memory_.release(user.blocks);
    for (size_t n = user.text.size(); n > 0; --n) {
      auto& node = naive_.nodes.at(cut(user.text, n));
      if (--node.users > 0) continue;
      node.last_use = ++naive_.uses;
      node.chain = chain;
    }
  }

  void compare() {
    ASSERT_EQ(memory_.cache().registered(), std::ssize(naive_.nodes));
    std::vector<BlockId> locks;
    for (const User& user : users_) locks.push_back(user.blocks.tail);
    memory_.check_locks(locks);
    for (int i = 0; i < 5; ++i) {
      const std::vector<int> text = random_text();
      ASSERT_EQ(memory_.cache().find(hashes(text)).blocks, static_cast<int64_t>(naive_.longest(text)));
    }
  }

  SplitMix64 random_;
  Limits limits_;
  EvictionPolicy* policy_;
  Memory memory_;
  Time now_{};
  NaiveCache naive_;
  std::vector<User> users_;
};

TEST(PrefixCache, AgreesWithANaiveModel) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    CacheModel(seed, nullptr).run();
    JumpyPolicy jumpy;
    CacheModel(seed, &jumpy).run();
    if (HasFatalFailure()) return;
  }
}

// ---- through the control plane

TEST(PrefixCache, SharesFullBlocksOfAFinishedAndOfARunningRequest) {
  Harness h(small_limits(1, 64));
  const RequestId first = h.submit(text(1, 18), 8);
  h.step();  // prefilled, still decoding
  std::vector<uint32_t> longer = text(1, 18);
  longer.insert(longer.end(), {9, 9, 9});
  const RequestId second = h.submit(longer, 2);
  h.run_all();
  const RequestId third = h.submit(longer, 2);
  h.run_all();
  EXPECT_EQ(h.finished(second).cached_tokens, 16);
  EXPECT_EQ(h.finished(third).cached_tokens, 20);
  for (const RequestId id : {first, second, third}) h.expect_right(id);
}

TEST(PrefixCache, ABlockIsNotShareableBeforeEveryRankHasAcknowledged) {
  Harness h(small_limits(2, 64));
  h.submit(text(1, 16), 4);
  const Plan plan = h.plan().value();
  const auto samples = h.execute(plan);
  h.feed(StepAcknowledged{plan.step, 0, samples});
  const RequestId second = h.submit(text(1, 16), 1);
  h.plan();  // admits it
  EXPECT_EQ(h.plane.request(second)->cached_tokens, 0);
}

TEST(PrefixCache, FullHitRunsOnlyTheLastRowAgainWithoutWriting) {
  for (const int ranks : {1, 2, 4}) {
    Harness h(small_limits(ranks, 64));
    h.submit(text(1, 16), 1);
    h.run_all();
    const RequestId again = h.submit(text(1, 16), 5, wish(kv::DecodeKind::kDcp, ranks));
    const Plan plan = h.plan().value();
    ASSERT_EQ(plan.spans.size(), 1u);
    EXPECT_EQ(plan.spans[0].start, 15);
    EXPECT_EQ(plan.spans[0].rows, 1);
    EXPECT_TRUE(plan.spans[0].no_write);
    EXPECT_EQ(plan.spans[0].sample_rows, 1);
    h.run_oldest();
    const Plan next = h.plan().value();
    EXPECT_FALSE(next.spans[0].no_write);
    h.run_oldest();
    h.run_all();
    h.expect_right(again);
    EXPECT_EQ(h.finished(again).cached_tokens, 15);
  }
}

TEST(PrefixCache, AnswersEnterTooAndAConversationGoesOn) {
  Harness h(small_limits(2, 64));
  const RequestId first = h.submit(text(1, 10), 12);
  h.run_all();
  std::vector<uint32_t> turn = text(1, 10);
  turn.insert(turn.end(), h.outcome(first).tokens.begin(), h.outcome(first).tokens.end());
  turn.insert(turn.end(), {1, 2, 3});
  const RequestId second = h.submit(turn, 3);
  h.run_all();
  // 10 + 12 tokens, of which the last was never an input: 21 rows, 5 full blocks.
  EXPECT_EQ(h.finished(second).cached_tokens, 20);
  h.expect_right(second);
}

TEST(PrefixCache, AnAnswerCanFillTheFirstBlock) {
  Harness h(small_limits(1, 64));
  const RequestId first = h.submit(text(1, 2), 8, kTpWish, "salt");
  h.run_all();
  std::vector<uint32_t> turn = text(1, 2);
  turn.insert(turn.end(), h.outcome(first).tokens.begin(), h.outcome(first).tokens.end());
  const RequestId same = h.submit(turn, 1, kTpWish, "salt"), other = h.submit(turn, 1, kTpWish, "pepper");
  h.run_all();
  EXPECT_EQ(h.finished(same).cached_tokens, 8);
  EXPECT_EQ(h.finished(other).cached_tokens, 0);
}

TEST(PrefixCache, SaltsSeparate) {
  Harness h(small_limits(1, 64));
  h.submit(text(1, 16), 1, kTpWish, "a");
  h.run_all();
  const RequestId other = h.submit(text(1, 16), 1, kTpWish, "b");
  const RequestId same = h.submit(text(1, 16), 1, kTpWish, "a");
  h.run_all();
  EXPECT_EQ(h.finished(other).cached_tokens, 0);
  EXPECT_EQ(h.finished(same).cached_tokens, 15);
}

TEST(PrefixCache, EqualBlocksBehindDifferentParentsDiffer) {
  Harness h(small_limits(1, 64));
  std::vector<uint32_t> a = text(1, 8), b = text(2, 8);
  std::copy(a.begin() + 4, a.end(), b.begin() + 4);  // the second block has the same tokens
  h.submit(a, 1);
  h.run_all();
  const RequestId second = h.submit(b, 1);
  h.run_all();
  EXPECT_EQ(h.finished(second).cached_tokens, 0);
}

TEST(PrefixCache, ARequestWithoutItNeitherReadsNorWritesIt) {
  Harness h(small_limits(1, 64));
  for (int i = 0; i < 2; ++i) {
    RequestArrived arrived = h.arrival(text(1, 16), 1);
    arrived.use_prefix_cache = false;
    const RequestId id = h.submit(arrived);
    h.run_all();
    EXPECT_EQ(h.finished(id).cached_tokens, 0);
  }
  EXPECT_EQ(h.entries().cached, 0);
}

TEST(PrefixCache, EvictsTheTailOfTheOldestChainAndNeverAUsedBlock) {
  Harness h(small_limits(1, 12));
  h.submit(text(1, 16), 1);  // 4 blocks
  h.run_all();
  h.submit(text(2, 16), 1);  // 4 blocks
  h.run_all();
  EXPECT_EQ(h.entries().cached, 8);
  const RequestId user = h.submit(text(2, 16), 2);  // uses the second chain, needs one block more
  ASSERT_TRUE(h.step());
  h.submit(text(3, 16), 1);  // 4 blocks, 3 are free: one has to go
  h.run_all();
  EXPECT_EQ(h.plane.counters().evicted_blocks, 1);
  const RequestId oldest = h.submit(text(1, 16), 1);
  h.run_all();
  EXPECT_EQ(h.finished(oldest).cached_tokens, 12) << "its last block was evicted, not its first";
  h.expect_right(user);
}

TEST(PrefixCache, ABlockThatAPlanInFlightReadsIsNotEvicted) {
  Harness h(small_limits(1, 10));
  RequestArrived arrived = h.arrival(text(1, 16), 8);
  arrived.stop_tokens = {h.truth_of(arrived.prompt, 1, {}, -1).tokens.back()};
  const RequestId stops = h.submit(arrived);
  h.plan();
  h.plan();  // a row that will be wasted
  h.run_oldest();
  ASSERT_FALSE(h.plane.request(stops));
  EXPECT_EQ(h.entries().cached, 4);
  EXPECT_EQ(h.entries().in_flight, 1);
  const RequestId next = h.submit(text(2, 40), 1);  // needs all ten pages
  EXPECT_EQ(h.plan()->spans[0].rows, 5 * 4) << "as many as are free";
  EXPECT_EQ(h.plane.counters().evicted_blocks, 0);
  h.run_oldest();
  h.run_oldest();
  h.run_all();
  EXPECT_EQ(h.plane.counters().evicted_blocks, 4);
  h.expect_right(next);
}

TEST(PrefixCache, TwinsComputedAtTheSameTimeAreRegisteredOnce) {
  Harness h(small_limits(1, 64));
  const RequestId a = h.submit(text(1, 16), 6), b = h.submit(text(1, 16), 6);
  h.run_all();
  h.expect_right(a);
  h.expect_right(b);
  EXPECT_EQ(h.entries().cached, 5);  // 16 + 5 rows: 5 full blocks, once
  EXPECT_EQ(h.entries().free, 64 - 5);
}

TEST(PrefixCache, BlocksOfANumericalFailureNeverEnter) {
  Harness h(small_limits(2, 64));
  const RequestArrived arrived = h.arrival(text(1, 16), 8);
  const RequestId id = h.submit(arrived, 18);  // the third token
  h.run_all();
  EXPECT_EQ(h.finished(id).reason, FinishReason::kError);
  EXPECT_EQ(h.finished(id).error.code, ErrorCode::kNumerical);
  EXPECT_EQ(h.finished(id).completion_tokens, 3);
  EXPECT_EQ(h.entries().cached, 0);
  EXPECT_EQ(h.entries().free, 64);
}

TEST(PrefixCache, ANumericalFailureLeavesWhatItOnlyUsed) {
  Harness h(small_limits(1, 64));
  h.submit(text(1, 16), 1);
  h.run_all();
  std::vector<uint32_t> longer = text(1, 16);
  longer.insert(longer.end(), {1, 2, 3, 4, 5});
  h.submit(h.arrival(longer, 8), 21);
  h.run_all();
  EXPECT_EQ(h.entries().cached, 4);
}

}  // namespace
}  // namespace weft::controlplane
