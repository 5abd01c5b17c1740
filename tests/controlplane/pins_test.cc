// Goal: what is pinned stays whatever comes, and never so that the daemon stands still.
#include <gtest/gtest.h>

#include "proto/vocab/random.h"
#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

uint64_t pin(Harness& h, RequestId request) {
  h.feed(PinRequested{1, request});
  EXPECT_EQ(h.pins.back().error.code, ErrorCode::kOk) << h.pins.back().error.message;
  return h.pins.back().pin;
}

TEST(Pins, WhatIsPinnedOutlivesPressure) {
  Harness h(small_limits(1, 12));
  const RequestId kept = h.submit(text(1, 16), 1);
  h.run_all();
  const uint64_t number = pin(h, kept);
  EXPECT_EQ(h.plane.pinned_blocks(), 4);
  EXPECT_EQ(h.entries().used, 4);
  for (uint32_t i = 2; i < 8; ++i) {  // 8 blocks each: all that is left
    h.submit(text(i, 32), 1);
    h.run_all();
  }
  const RequestId again = h.submit(text(1, 16), 1);
  h.run_all();
  EXPECT_EQ(h.finished(again).cached_tokens, 15);
  h.feed(UnpinRequested{2, number});
  EXPECT_EQ(h.plane.pinned_blocks(), 0);
  EXPECT_EQ(h.entries().used, 0);
  for (uint32_t i = 2; i < 4; ++i) {
    h.submit(text(i, 40), 1);
    h.run_all();
  }
  const RequestId gone = h.submit(text(1, 16), 1);
  h.run_all();
  EXPECT_LT(h.finished(gone).cached_tokens, 15);
}

TEST(Pins, ARunningRequestIsPinnedAsFarAsItIs) {
  Harness h(small_limits(2, 64));
  const RequestId running = h.submit(text(1, 16), 12, wish(kv::DecodeKind::kDcp, 2));
  h.step();
  pin(h, running);
  ASSERT_EQ(h.plane.pins().size(), 1u);
  EXPECT_EQ(h.plane.pins()[0].blocks, 4);
  h.run_all();
  h.expect_right(running);
  EXPECT_EQ(h.entries().used + h.entries(1).used, 4);
  pin(h, running);  // all of it now
  EXPECT_EQ(h.plane.pinned_blocks(), (16 + 11) / 4);
}

TEST(Pins, ARequestThatFitsOnlyWithoutThemIsRefused) {
  Harness h(small_limits(1, 12));
  const RequestId kept = h.submit(text(1, 16), 1);
  h.run_all();
  const uint64_t number = pin(h, kept);
  const RequestId large = h.submit(text(2, 40), 1);
  EXPECT_FALSE(h.plan());
  EXPECT_EQ(h.plane.next_deadline(), Time{}) << "there is something to tell";
  h.pass_time(h.now);
  EXPECT_EQ(h.finished(large).reason, FinishReason::kError);
  EXPECT_EQ(h.finished(large).error.code, ErrorCode::kResourceExhausted);
  EXPECT_NE(h.finished(large).error.message.find("1 pins"), std::string::npos);
  h.feed(UnpinRequested{2, number});
  const RequestId again = h.submit(text(2, 40), 1);
  h.run_all();
  h.expect_right(again);
}

// Who used a pinned context under another grouping leaves copies of it, which would be kept as long as the
// pin.
TEST(Pins, WhatOthersSpreadThemToMakesRoom) {
  Harness h(small_limits(2, 14));
  const RequestId kept = h.submit(text(1, 40), 1, wish(kv::DecodeKind::kDp));
  h.run_all();
  pin(h, kept);
  const int64_t pinned = h.entries(0).used + h.entries(1).used;
  EXPECT_EQ(pinned, 10);
  const RequestId wide = h.submit(text(1, 42), 2, kTpWish);
  h.run_all();
  EXPECT_EQ(h.entries(0).used + h.entries(1).used, 2 * pinned);
  const RequestId large = h.submit(text(2, 44), 4, wish(kv::DecodeKind::kDp));  // 12 blocks on one rank
  h.run_all();
  EXPECT_EQ(h.entries(0).used + h.entries(1).used, pinned);
  const RequestId again = h.submit(text(1, 41), 1, wish(kv::DecodeKind::kDp));
  h.run_all();
  EXPECT_EQ(h.finished(again).cached_tokens, 40);
  for (const RequestId id : {wide, large, again}) h.expect_right(id);
}

// A page that a plan in flight fills is not there yet: what it is filled from stays.
TEST(Pins, NothingIsGivenBackForACopyThatMayBeUndone) {
  Harness h(small_limits(2, 14));
  const RequestId kept = h.submit(text(1, 40), 1, wish(kv::DecodeKind::kDp));
  h.run_all();
  const int home = h.entries(0).cached > 0 ? 0 : 1;
  pin(h, kept);
  h.submit(text(1, 42), 2, kTpWish);  // spreads it
  h.run_all();
  h.in_flight.clear();
  h.workers.lose(home);
  h.feed(MemoryLost{home});
  const RequestId back = h.submit(text(1, 42), 2, kTpWish);  // copies it back
  const auto copies = h.plan();
  ASSERT_TRUE(copies.has_value());
  ASSERT_GT(copies->copies.size(), 0u);
  h.feed(CancelRequested{back});
  const RequestId large = h.submit(text(2, 44), 4, wish(kv::DecodeKind::kDp));
  EXPECT_FALSE(h.plan().has_value());
  h.in_flight.clear();
  h.feed(PlansAbandoned{});
  const RequestId again = h.submit(text(1, 41), 1, wish(kv::DecodeKind::kDp));
  h.run_all();
  h.expect_right(again);
  EXPECT_EQ(h.finished(again).cached_tokens, 40);
  EXPECT_EQ(h.finished(large).error.code, ErrorCode::kResourceExhausted);
}

TEST(Pins, WhatIsNotThereIsRefused) {
  Harness h(small_limits(1, 64));
  const RequestId tiny = h.submit(text(1, 3), 1);  // no whole block
  h.run_all();
  h.feed(PinRequested{1, tiny});
  h.feed(PinRequested{2, RequestId{77}});
  h.feed(UnpinRequested{3, 5});
  ASSERT_EQ(h.pins.size(), 3u);
  for (const PinNotice& notice : h.pins) EXPECT_EQ(notice.error.code, ErrorCode::kNotFound);
}

TEST(Pins, CopiesOnTheHostStayToo) {
  Limits limits = small_limits(1, 12);
  limits.host_pages = {14, 14};
  Harness h(limits);
  const RequestId kept = h.submit(text(1, 40), 1);
  h.run_all();
  const RequestId other = h.submit(text(2, 44), 1);  // all that there is goes to the host
  h.run_all();
  h.feed(PinRequested{1, kept});
  ASSERT_EQ(h.pins.back().error.code, ErrorCode::kOk) << h.pins.back().error.message;
  ASSERT_EQ(h.plane.pins().size(), 1u);
  const PinSnapshot pinned = h.plane.pins()[0];
  EXPECT_EQ(pinned.blocks + pinned.host_blocks, 10);
  EXPECT_GE(pinned.host_blocks, 9);
  EXPECT_EQ(h.plane.pinned_host_blocks(), pinned.host_blocks);
  EXPECT_EQ(h.plane.host_pool(kv::Stream::kEntries).used, pinned.host_blocks);
  for (uint32_t seed = 3; seed < 9; ++seed) {  // more than the host holds
    h.submit(text(seed, 40), 1);
    h.run_all();
  }
  const int64_t computed = h.plane.counters().computed_prompt_tokens;
  const RequestId again = h.submit(text(1, 41), 1);
  h.run_all();
  h.expect_right(again);
  EXPECT_EQ(h.plane.counters().computed_prompt_tokens - computed, 1);
  h.feed(UnpinRequested{2, h.pins.back().pin});
  EXPECT_EQ(h.plane.host_pool(kv::Stream::kEntries).used, 0);
  for (uint32_t seed = 9; seed < 15; ++seed) {
    h.submit(text(seed, 40), 1);
    h.run_all();
  }
  const RequestId gone = h.submit(text(1, 41), 1);
  h.run_all();
  EXPECT_EQ(h.finished(gone).cached_tokens, 0);
  h.expect_right(other);
}

TEST(Pins, AContextThatIsPartlyOnTheHostIsPinnedWhole) {
  Limits limits = small_limits(1, 12);
  limits.host_pages = {14, 14};
  Harness h(limits);
  const RequestId kept = h.submit(text(1, 40), 1);
  h.run_all();
  h.submit(text(2, 20), 1);  // half of it makes room
  h.run_all();
  pin(h, kept);
  const PinSnapshot pinned = h.plane.pins()[0];
  EXPECT_GT(pinned.blocks, 0);
  EXPECT_GT(pinned.host_blocks, 0);
  EXPECT_EQ(pinned.blocks + pinned.host_blocks, 10);
  EXPECT_EQ(h.plane.pinned_blocks(), pinned.blocks);
  EXPECT_EQ(h.entries().used, pinned.blocks);
  h.feed(UnpinRequested{2, pinned.pin});
  EXPECT_EQ(h.entries().used, 0);
}

TEST(Pins, AtRandomNeverLoseAPage) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SplitMix64 random(seed);
    Limits limits = small_limits(1 + static_cast<int>(random.below(3)), 40);
    if (seed % 2 == 0) limits.host_pages = {20, 20};
    Harness h(limits);
    std::vector<RequestId> requests;
    for (int i = 0; i < 150; ++i) {
      switch (random.below(5)) {
        case 0:
        case 1: {
          std::vector<uint32_t> prompt = text(static_cast<uint32_t>(random.below(3)), 8);
          const auto rest =
              text(static_cast<uint32_t>(random.below(5)), static_cast<int64_t>(random.below(40)));
          prompt.insert(prompt.end(), rest.begin(), rest.end());
          requests.push_back(h.submit(prompt, 1 + static_cast<int64_t>(random.below(8))));
          break;
        }
        case 2:
          if (!requests.empty()) h.feed(PinRequested{1, requests[random.below(requests.size())]});
          break;
        case 3:
          if (const auto pins = h.plane.pins(); !pins.empty())
            h.feed(UnpinRequested{1, pins[random.below(pins.size())].pin});
          break;
        default:
          h.step();
          h.pass_time(h.now);
      }
    }
    for (const PinSnapshot& left : h.plane.pins()) h.feed(UnpinRequested{1, left.pin});
    h.run_all();
    h.pass_time(h.now);
    for (const RequestId id : requests) {
      ASSERT_TRUE(h.outcome(id).finished.has_value());
      if (h.finished(id).reason != FinishReason::kError) h.expect_right(id);
    }
    EXPECT_EQ(h.entries().used, 0);
  }
}

}  // namespace
}  // namespace weft::controlplane
