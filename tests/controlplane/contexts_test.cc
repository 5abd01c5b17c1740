// Goal: a turn that names its parent runs exactly as the whole prompt would, of the right tenant only, and
// what is kept for such turns is shared and bounded.
#include "controlplane/contexts.h"

#include <gtest/gtest.h>

#include "proto/vocab/random.h"
#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

TEST(SharedList, ReadsAsThePlainListThatItStandsFor) {
  SplitMix64 random(7);
  std::vector<std::pair<SharedList<int>, std::vector<int>>> lists(1);
  for (int i = 0; i < 2000; ++i) {
    auto& [list, plain] = lists[random.below(lists.size())];
    if (random.below(4) == 0 && lists.size() < 50) {
      SharedList<int> shared = list.share();
      std::vector<int> copy = plain;
      lists.emplace_back(std::move(shared), std::move(copy));
      continue;
    }
    for (uint64_t n = random.below(4); n > 0; --n) {
      list.push_back(i);
      plain.push_back(i);
    }
    ASSERT_EQ(list.size(), std::ssize(plain));
    if (plain.empty()) continue;
    const auto first = static_cast<int64_t>(random.below(plain.size()));
    const auto count = static_cast<int64_t>(random.below(plain.size() - static_cast<size_t>(first) + 1));
    std::vector<int> part;
    list.read(first, count, part);
    ASSERT_TRUE(std::equal(part.begin(), part.end(), plain.begin() + first, plain.begin() + first + count));
    ASSERT_EQ(list[first], plain[static_cast<size_t>(first)]);
  }
  for (const auto& [list, plain] : lists) EXPECT_EQ(list.copy(), plain);
}

std::vector<uint32_t> joined(std::vector<uint32_t> a, const std::vector<uint32_t>& b,
                             const std::vector<uint32_t>& c) {
  a.insert(a.end(), b.begin(), b.end());
  a.insert(a.end(), c.begin(), c.end());
  return a;
}

TEST(Contexts, AConversationOfTurnsRunsAsItsWholePromptsWould) {
  for (const int64_t behind : {1, 2, 3, 4, 5, 9, 20}) {
    SCOPED_TRACE("turns of " + std::to_string(behind));
    Harness h(small_limits(2, 256));
    std::vector<uint32_t> whole = text(1, 10);
    RequestId last = h.submit(whole, 5);
    h.run_all();
    for (uint32_t turn = 2; turn < 8; ++turn) {
      const auto fresh = text(turn, behind);
      whole = joined(whole, h.outcome(last).tokens, fresh);
      const RequestId next = h.submit_turn(h.turn(last, fresh, 5, wish(kv::DecodeKind::kDcp, 2)), whole);
      h.run_all();
      h.expect_right(next);
      EXPECT_EQ(h.finished(next).prompt_tokens, std::ssize(whole));
      // All rows but that of the last token of the answer were there.
      EXPECT_EQ(h.finished(next).cached_tokens, (std::ssize(whole) - behind - 1) / 4 * 4);
      last = next;
    }
    RequestArrived again = h.arrival(whole, 5);
    const RequestId same = h.submit(again);
    h.run_all();
    EXPECT_EQ(h.outcome(same).tokens, h.outcome(last).tokens);
    EXPECT_EQ(h.finished(same).cached_tokens, std::min(std::ssize(whole) / 4 * 4, std::ssize(whole) - 1));
  }
}

TEST(Contexts, TwoTurnsCanGoOnFromOneRequest) {
  Harness h(small_limits(1, 256));
  const RequestId root = h.submit(text(1, 18), 6);
  h.run_all();
  const auto whole = joined(text(1, 18), h.outcome(root).tokens, {});
  const RequestId a = h.submit_turn(h.turn(root, text(2, 7), 4), joined(whole, text(2, 7), {}));
  const RequestId b = h.submit_turn(h.turn(root, text(3, 7), 4), joined(whole, text(3, 7), {}));
  h.run_all();
  h.expect_right(a);
  h.expect_right(b);
  EXPECT_EQ(h.finished(b).cached_tokens, 20);
}

TEST(Contexts, ATurnIsRightAlsoWhenItsParentsBlocksAreGone) {
  Harness h(small_limits(1, 16));
  const RequestId root = h.submit(text(1, 30), 6);
  h.run_all();
  h.submit(text(2, 60), 1);  // takes nearly all pages
  h.run_all();
  const auto whole = joined(text(1, 30), h.outcome(root).tokens, text(3, 5));
  const RequestId turn = h.submit_turn(h.turn(root, text(3, 5), 4), whole);
  h.run_all();
  h.expect_right(turn);
  EXPECT_LT(h.finished(turn).cached_tokens, 32);
}

TEST(Contexts, LookUpDraftsReadTheWholeText) {
  Harness h(small_limits(1, 256));
  const RequestId root = h.submit(text(1, 40), 2);
  h.run_all();
  const auto whole = joined(text(1, 40), h.outcome(root).tokens, text(1, 20));
  RequestArrived turn = h.turn(root, text(1, 20), 60);
  RequestArrived plain = h.arrival(whole, 60);
  turn.speculation = plain.speculation = {DraftSource::kLookup, 4, {}};
  const RequestId a = h.submit_turn(turn, whole);
  h.run_all();
  const RequestId b = h.submit(plain);
  h.run_all();
  h.expect_right(a);
  EXPECT_GT(h.finished(a).drafted_tokens, 0);
  EXPECT_EQ(h.finished(a).drafted_tokens, h.finished(b).drafted_tokens);
}

TEST(Contexts, UnknownParentsAndThoseOfOtherTenantsAreRefusedAlike) {
  Harness h(small_limits(1, 64));
  const RequestId root = h.submit(text(1, 10), 2, kTpWish, "a");
  h.run_all();
  RequestArrived foreign = h.turn(root, text(2, 3), 2);
  foreign.root = kv::namespace_hash("model", "format", "b");
  h.feed(foreign);
  RequestArrived unknown = h.turn(RequestId{99}, text(2, 3), 2);
  h.feed(unknown);
  for (const RequestId id : {foreign.request, unknown.request}) {
    EXPECT_EQ(h.finished(id).reason, FinishReason::kError);
    EXPECT_EQ(h.finished(id).error.code, ErrorCode::kNotFound);
    EXPECT_EQ(h.finished(id).error.field, "parent");
  }
}

TEST(Contexts, AFailedRequestLeavesNone) {
  Harness h(small_limits(1, 64));
  const RequestId failed = h.submit(h.arrival(text(1, 16), 8), 18);
  h.run_all();
  ASSERT_EQ(h.finished(failed).error.code, ErrorCode::kNumerical);
  EXPECT_FALSE(h.plane.context(failed));
}

TEST(Contexts, ForgetsWhatWasUsedLongestAgoAndCountsSharedTokensOnce) {
  Contexts contexts(3, 100);
  Context first;
  for (uint32_t i = 0; i < 40; ++i) first.tokens.push_back(i);
  contexts.keep(RequestId{1}, std::move(first));
  Context second;
  second.tokens = contexts.find(RequestId{1})->tokens.share();
  for (uint32_t i = 0; i < 20; ++i) second.tokens.push_back(i);
  contexts.keep(RequestId{2}, std::move(second));
  contexts.check_invariants();
  EXPECT_EQ(contexts.tokens(), 60);
  const auto keep = [&](uint64_t id, uint32_t count) {
    Context one;
    for (uint32_t i = 0; i < count; ++i) one.tokens.push_back(i);
    contexts.keep(RequestId{id}, std::move(one));
    contexts.check_invariants();
  };
  keep(3, 1);
  keep(4, 1);  // the first goes; its tokens stay with the second
  EXPECT_EQ(contexts.look(RequestId{1}), nullptr);
  EXPECT_EQ(contexts.tokens(), 62);
  contexts.find(RequestId{2});
  keep(5, 40);  // the third goes for the number, the fourth for the tokens
  EXPECT_EQ(contexts.look(RequestId{3}), nullptr);
  EXPECT_EQ(contexts.look(RequestId{4}), nullptr);
  EXPECT_NE(contexts.look(RequestId{2}), nullptr);
  EXPECT_EQ(contexts.tokens(), 100);
  keep(6, 90);  // more than there is room for beside anything
  EXPECT_EQ(contexts.count(), 1);
  keep(7, 101);
  EXPECT_EQ(contexts.count(), 0);
}

}  // namespace
}  // namespace weft::controlplane
