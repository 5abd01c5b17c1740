// Goal: what users of other engines' prefix caches take for granted holds here: partial matches, locks that
// move sizes both ways, splits that lose nothing, evictions that free and go on to the parent, and no leak.
// Method: one pool, blocks of one token, contexts by their texts; sizes are pages.
#include <gtest/gtest.h>

#include "controlplane/memory.h"
#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

constexpr kv::Residency kReplicated = {};

class CacheConformance : public testing::Test {
 protected:
  static Limits one_pool() {
    Limits limits = small_limits(1, 20);
    limits.geometry.streams[1] = {};
    return limits;
  }
  static Identities identities(const std::string& text) {
    Identities out;
    kv::BlockHash parent;
    for (const char c : text) {
      const auto token = static_cast<uint32_t>(c);
      out.push_back(parent = kv::block_hash(parent, {&token, 1}));
    }
    return out;
  }
  // Takes what is there, computes and registers the rest.
  BlockPath use(const std::string& text) {
    const Identities names = identities(text);
    BlockPath path;
    memory.use(memory.cache().find(names), path);
    PageCounts reserved;
    reserved.at(kv::Stream::kEntries, 0) = names.size() - path.size();
    memory.reserve(reserved);
    while (path.size() < names.size()) {
      const int64_t index = path.size();
      memory.extend(path, 0);
      EXPECT_TRUE(memory.hold(memory.at(path, index), kReplicated, reserved, true));
      EXPECT_TRUE(memory.insert(path, names[index], kReplicated));
    }
    memory.check_invariants();
    return path;
  }
  void give_back(BlockPath& path) {
    memory.release(path);
    memory.check_invariants();
  }
  void cache(const std::string& text) {
    BlockPath path = use(text);
    give_back(path);
  }
  int64_t found(const std::string& text) { return memory.cache().find(identities(text)).blocks; }
  PoolCounts pool() const { return memory.pool(kv::Stream::kEntries, 0); }
  // How many runs a cached context lies on.
  int64_t runs(const std::string& text) {
    int64_t count = 0;
    memory.cache().for_each_run(memory.cache().find(identities(text)).tail,
                                [&](const controlplane::Run&, int64_t, int64_t) { ++count; });
    return count;
  }

  const Limits limits = one_pool();
  Memory memory{limits};
};

TEST_F(CacheConformance, MatchesTheLongestPrefixAndNothingInTheMiddle) {
  cache("abcd");
  EXPECT_EQ(found("abcd"), 4);
  EXPECT_EQ(found("abcdef"), 4);
  EXPECT_EQ(found("abxd"), 2);
  EXPECT_EQ(found("bcd"), 0);
  EXPECT_EQ(found(""), 0);
  for (int64_t likely = 0; likely < 8; ++likely) {
    EXPECT_EQ(memory.cache().find(identities("abcx"), likely).blocks, 3) << likely;
  }
}

TEST_F(CacheConformance, EqualBlocksBehindOtherParentsAndAtOtherPlacesAreOthers) {
  const Identities repeated = identities("aaaa");
  for (int64_t i = 1; i < repeated.size(); ++i) EXPECT_FALSE(repeated[i] == repeated[i - 1]);
  const kv::BlockHash root = kv::namespace_hash("m", "f", ""), salted = kv::namespace_hash("m", "f", "s");
  const uint32_t token = 1;
  EXPECT_FALSE(kv::block_hash(root, {&token, 1}) == kv::block_hash(salted, {&token, 1}));
  cache("aaaa");
  EXPECT_EQ(found("aa"), 2);
  EXPECT_EQ(memory.cache().registered(), 4);
}

TEST_F(CacheConformance, ALockMovesPagesBothWays) {
  cache("abcdef");
  EXPECT_EQ(pool().cached, 6);
  BlockPath whole = use("abcdef");
  EXPECT_EQ(pool().used, 6);
  EXPECT_EQ(pool().cached, 0);
  BlockPath half = use("abc");
  give_back(whole);
  EXPECT_EQ(pool().used, 3) << "what the other still uses";
  EXPECT_EQ(pool().cached, 3);
  give_back(half);
  EXPECT_EQ(pool().used, 0);
  EXPECT_EQ(pool().cached, 6);
}

TEST_F(CacheConformance, ASplitLosesNothingAndEndsWhenItIsNotNeeded) {
  cache("abcdefgh");
  EXPECT_EQ(runs("abcdefgh"), 1);
  for (size_t cut = 1; cut < 8; ++cut) {
    BlockPath part = use(std::string("abcdefgh").substr(0, cut));
    EXPECT_EQ(runs("abcdefgh"), 2);
    EXPECT_EQ(pool().used + pool().cached, 8);
    EXPECT_EQ(pool().used, static_cast<int64_t>(cut));
    EXPECT_EQ(found("abcdefgh"), 8);
    BlockPath whole = use("abcdefgh");
    give_back(part);
    EXPECT_EQ(runs("abcdefgh"), 1) << "nobody's context ends there any more";
    give_back(whole);
    EXPECT_EQ(runs("abcdefgh"), 1);
    EXPECT_EQ(pool().cached, 8);
  }
}

TEST_F(CacheConformance, AConversationWithoutBranchesIsOneRun) {
  std::string text;
  for (char c = 'a'; c < 'p'; ++c) {
    text += c;
    cache(text);
    EXPECT_EQ(runs(text), 1);
  }
}

TEST_F(CacheConformance, ABranchThatIsEvictedLeavesOneRun) {
  cache("abcd");
  BlockPath kept = use("abcdef");
  cache("abcdxy");  // the older of what is unused
  EXPECT_EQ(runs("abcdef"), 2);
  EXPECT_EQ(runs("abcdxy"), 2);
  BlockPath large = use("qrstuvwxyz1234");  // 14 pages; 12 are free
  EXPECT_EQ(found("abcdxy"), 4);
  EXPECT_EQ(runs("abcdef"), 1);
  give_back(kept);
  give_back(large);
}

TEST_F(CacheConformance, EvictsTailsFirstAndGoesOnToTheParent) {
  cache("abcdef");
  cache("abcxyz");
  cache("12345678901");                    // 20 pages: all taken, 9 for the tree
  const auto evict = [&](int64_t pages) {  // so many are gone after it, all told
    BlockPath path;
    PageCounts reserved;
    reserved.at(kv::Stream::kEntries, 0) = pages;
    memory.reserve(reserved);
    for (int64_t i = 0; i < pages; ++i) {
      memory.extend(path, 0);
      EXPECT_TRUE(memory.hold(memory.at(path, i), kReplicated, reserved, true));
    }
    give_back(path);  // not registered: free again
  };
  evict(1);
  EXPECT_EQ(found("abcdef"), 5);
  evict(4);
  EXPECT_EQ(found("abcdef"), 3) << "used again with the other branch";
  EXPECT_EQ(found("abcxyz"), 5) << "the next in age";
  evict(12);
  EXPECT_EQ(found("abc"), 0) << "a parent goes after its children";
  EXPECT_EQ(found("12345678901"), 8);
  evict(20);
  EXPECT_EQ(memory.cache().registered(), 0);
  EXPECT_EQ(pool().free, 20);
}

TEST_F(CacheConformance, WhatARequestFoundIsNotEvictedForTheRestOfIt) {
  cache("abcdefgh");
  cache("1234567890");
  BlockPath path = use("abcdefghijklmn");  // 8 found, 6 pages more, 2 are free
  EXPECT_EQ(path.size(), 14);
  EXPECT_EQ(found("abcdefghijklmn"), 14);
  EXPECT_EQ(found("1234567890"), 6);
  give_back(path);
}

TEST_F(CacheConformance, TheOrderOfGivingBackChangesNoCount) {
  for (int order = 0; order < 6; ++order) {
    BlockPath paths[] = {use("abcd"), use("abxy"), use("ab")};
    const int first = order % 3, second = (first + 1 + order / 3) % 3, third = 3 - first - second;
    for (const int which : {first, second, third}) give_back(paths[which]);
    EXPECT_EQ(pool().used, 0);
    EXPECT_EQ(pool().cached, 6);
  }
}

TEST_F(CacheConformance, ATwinStaysPrivateAndIsFreedAtOnce) {
  BlockPath first = use("abc");
  const Identities names = identities("abc");
  BlockPath twin;
  PageCounts reserved;
  reserved.at(kv::Stream::kEntries, 0) = 3;
  memory.reserve(reserved);
  for (int64_t i = 0; i < 3; ++i) {
    memory.extend(twin, 0);
    ASSERT_TRUE(memory.hold(memory.at(twin, i), kReplicated, reserved, true));
  }
  EXPECT_FALSE(memory.insert(twin, names[0], kReplicated));
  EXPECT_EQ(pool().used, 6);
  give_back(twin);
  EXPECT_EQ(pool().used, 3);
  EXPECT_EQ(pool().free, 17);
  give_back(first);
}

TEST_F(CacheConformance, WhatIsForgottenIsNeitherFoundNorGrowsAndGoesWithItsLastUser) {
  BlockPath failed = use("abcdef");
  BlockPath other = use("abcdef");
  memory.forget(memory.at(failed, 3));
  EXPECT_EQ(found("abcdef"), 3);
  give_back(failed);
  EXPECT_EQ(pool().used, 6) << "the other still runs on it";
  PageCounts reserved;
  reserved.at(kv::Stream::kEntries, 0) = 1;
  memory.reserve(reserved);
  memory.extend(other, 0);
  ASSERT_TRUE(memory.hold(memory.at(other, 6), kReplicated, reserved, true));
  EXPECT_FALSE(memory.insert(other, identities("abcdefg")[6], kReplicated));
  give_back(other);
  EXPECT_EQ(pool().used, 0);
  EXPECT_EQ(pool().cached, 3);
}

// Hit or miss, ended well or failed: nothing stays in use, however often.
TEST(CacheConformanceRequests, EveryOutcomeLeavesNothingInUse) {
  Harness h(small_limits(2, 64));
  for (int repeat = 0; repeat < 5; ++repeat) {
    for (const bool hit : {false, true}) {
      for (const bool fails : {false, true}) {
        const auto prompt = text(hit ? 1 : 10 + static_cast<uint32_t>(repeat), 17);
        const RequestId id = h.submit(h.arrival(prompt, 6), fails ? 18 : -1);
        h.run_all();
        EXPECT_EQ(h.finished(id).reason, fails ? FinishReason::kError : FinishReason::kLength);
        EXPECT_EQ(h.entries().used, 0);
        EXPECT_EQ(h.entries().reserved, 0);
        EXPECT_EQ(h.entries().free + h.entries().cached, 64);
      }
    }
  }
}

}  // namespace
}  // namespace weft::controlplane
