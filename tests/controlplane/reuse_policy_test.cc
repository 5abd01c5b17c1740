// Goal: the policy follows a chain from request to request by its blocks, whatever its end looks like, learns
// from what it sees, keeps no more than it may, and saves blocks where LRU loses them. Method: made-up
// conversations against the policy, then through the whole control plane.
#include "controlplane/reuse_policy.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

Time at(double seconds) { return Time{static_cast<int64_t>(seconds * 1e9)}; }

Identities chain(uint32_t seed, size_t blocks, uint32_t tail = 0, size_t tail_blocks = 0) {
  std::vector<kv::BlockHash> hashes;
  kv::BlockHash parent;
  for (size_t i = 0; i < blocks; ++i) {
    const uint32_t token = i + tail_blocks < blocks ? seed : seed + 1000 + tail;
    hashes.push_back(parent = kv::block_hash(parent, {&token, 1}));
  }
  return Identities(std::move(hashes));
}

TEST(ReusePolicy, KnowsAChainThatGoesOn) {
  for (const size_t blocks : {1u, 2u, 3u, 4u, 5u, 8u, 41u}) {
    ReusePolicy policy;
    policy.ended(policy.arrived(chain(1, blocks), at(0)), chain(1, blocks), static_cast<int64_t>(blocks),
                 at(2));
    EXPECT_EQ(policy.arrived(chain(2, blocks + 3), at(3)).gaps, 0) << "another text";
    ChainHistory history = policy.arrived(chain(1, blocks + 3), at(12));
    EXPECT_EQ(history.gaps, 1) << blocks;
    EXPECT_NEAR(history.last, std::log(10.0), 1e-9) << "from its end to the next request";
    policy.ended(history, chain(1, blocks + 3), static_cast<int64_t>(blocks) + 3, at(13));
    EXPECT_EQ(policy.arrived(chain(1, blocks + 9), at(14)).gaps, 2);
  }
}

TEST(ReusePolicy, KnowsHowLongAChainIsAndHowMuchLongerItGot) {
  ReusePolicy policy;
  const ChainHistory first = policy.arrived(chain(1, 40), at(0));
  EXPECT_EQ(first.blocks, 40);
  policy.ended(first, chain(1, 40), 40, at(8));
  const ChainHistory second = policy.arrived(chain(1, 47), at(9));
  EXPECT_EQ(second.blocks, 47);
  EXPECT_EQ(second.growth, 7);
  EXPECT_EQ(second.before, 0);
  EXPECT_DOUBLE_EQ(second.services.mean(0, 0), std::log(8.0));
  // A request that has begun and one that has ended are followed both; only the rest counts as a gap.
  const Unused begun = policy.begun(second, chain(1, 47), 47, at(9));
  const Unused ended = policy.ended(second, chain(1, 47), 47, at(29));
  EXPECT_TRUE(begun.begun);
  EXPECT_FALSE(ended.begun);
  const ChainHistory third = policy.arrived(chain(1, 47), at(32));
  EXPECT_EQ(third.gaps, 2);
  EXPECT_NEAR(third.last, std::log(3.0), 1e-9);
  EXPECT_NEAR(third.before, std::log(1.0), 1e-9) << "from 8 to 9 seconds";
  EXPECT_NEAR(third.services.mean(0, 0), (0.8 * std::log(8.0) + std::log(20.0)) / 1.8, 1e-9);
}

TEST(ReusePolicy, KnowsAChainWhoseEndWasWrittenAnew) {
  ReusePolicy policy;
  policy.ended({}, chain(1, 40), 40, at(0));
  EXPECT_EQ(policy.arrived(chain(1, 44, 7, 5), at(5)).gaps, 1) << "its first 39 blocks are the same";
  policy.ended({}, chain(2, 40), 40, at(0));
  EXPECT_EQ(policy.arrived(chain(2, 44, 7, 24), at(5)).gaps, 0) << "half of it is another text";
}

TEST(ReusePolicy, AQuickChainIsWorthMoreThanASlowOne) {
  ReusePolicy policy;
  ChainHistory quick, slow;
  double now = 0;
  for (int i = 0; i < 100; ++i) {
    policy.ended(quick, chain(1, 40), 40, at(now));
    policy.ended(slow, chain(2, 40), 40, at(now));
    policy.advance(at(now));
    quick = policy.arrived(chain(1, 40), at(now + 4));
    slow = policy.arrived(chain(2, 40), at(now + 90));
    now += 90;
  }
  const Unused a = policy.ended(quick, chain(1, 40), 40, at(now)),
               b = policy.ended(slow, chain(2, 40), 40, at(now));
  EXPECT_GT(policy.worth(a, at(now)), 3 * policy.worth(b, at(now)));
  EXPECT_LT(policy.worth(a, at(now + 80)), policy.worth(b, at(now + 80))) << "one is overdue, one comes soon";
}

TEST(ReusePolicy, ChainsThatNeverComeBackCount) {
  const auto worth = [](bool some_end) {
    ReusePolicy policy;
    double now = 0;
    for (uint32_t i = 0; i < 200 && some_end; ++i) {
      policy.ended(policy.arrived(chain(i, 40), at(now)), chain(i, 40), 40, at(now + 5));
      policy.advance(at(now += 10));
    }
    policy.advance(at(now += 1000));
    const Unused last =
        policy.ended(policy.arrived(chain(1000, 40), at(now)), chain(1000, 40), 40, at(now + 5));
    return policy.worth(last, at(now + 5));
  };
  EXPECT_LT(worth(true), worth(false) / 2);
}

TEST(ReusePolicy, ForgetsTheOldestHistoriesOnly) {
  ReusePolicy policy;
  constexpr auto kAll = static_cast<uint32_t>(ReusePolicy::kHistories) + 100;
  for (uint32_t i = 0; i < kAll; ++i) policy.ended({}, chain(i * 2, 5), 5, at(i));
  EXPECT_EQ(policy.arrived(chain(2 * 99, 5), at(kAll)).gaps, 0);
  EXPECT_EQ(policy.arrived(chain(2 * 100, 5), at(kAll)).gaps, 1);
}

TEST(ReusePolicy, ThroughTheControlPlaneItKeepsTheQuickConversation) {
  // A quick conversation comes back between any two of many that never do; the pool holds three.
  for (const Eviction eviction : {Eviction::kLru, Eviction::kReuse}) {
    Limits limits = small_limits(1, 24);
    limits.eviction = eviction;
    Harness h(limits);
    int64_t cached = 0;
    for (uint32_t round = 0; round < 60; ++round) {
      h.now = at(10.0 * round);
      const RequestId id = h.submit(text(1, 32), 1);
      h.run_all();
      h.expect_right(id);
      cached = h.finished(id).cached_tokens;
      for (uint32_t other = 0; other < 2; ++other) {
        h.now = at(10.0 * round + 3 + other);
        h.submit(text(2 + round * 2 + other, 48), 1);
        h.run_all();
      }
      h.plane.check_invariants();
    }
    if (eviction == Eviction::kReuse) {
      EXPECT_EQ(cached, 31);
    }
    EXPECT_GT(h.plane.counters().evicted_blocks, 0);
  }
}

}  // namespace
}  // namespace weft::controlplane
