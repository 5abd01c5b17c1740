// Goal: the ranks that compute change while requests run, and nobody's answer does. Method: exact cases on
// small pools, every read checked by the simulated workers; then random ones, with every event at any stage.
#include <gtest/gtest.h>

#include <algorithm>

#include "proto/vocab/random.h"
#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

Limits limits_of(int ranks, int64_t pages) {
  Limits limits = small_limits(ranks, pages);
  limits.table_count = 24;
  return limits;
}

class TopologyTest : public ::testing::Test {
 protected:
  void make(int ranks, int64_t pages, RankMask start = 0) {
    Limits limits = limits_of(ranks, pages);
    if (start != 0) limits.topology = kv::Topology(start);
    limits.host_pages = {host_pages_, host_pages_};
    if (host_pages_ % 2 == 0) limits.host_write = HostWrite::kThrough;
    if (host_pages_ % 3 == 0) limits.host_plan_bytes = 400;
    harness_.emplace(limits);
  }
  Harness& h() { return *harness_; }
  void change(int rank, bool joins) { h().feed(TopologyRequested{++commands_, rank, joins}); }
  // Runs plans until the change is decided; counts what they copy.
  TopologyNotice run_change() {
    const size_t before = h().topologies.size();
    copied_ = 0;
    while (h().topologies.size() == before) {
      if (!h().in_flight.empty()) {
        h().run_oldest();
        continue;
      }
      const auto plan = h().plan();
      CHECK(plan.has_value(), "a change that waits for nothing");
      CHECK(plan->spans.empty(), "nobody computes meanwhile");
      for (const PageCopy& copy : plan->copies) copied_ += h().limits.geometry.page_bytes(copy.stream);
      CHECK_LE(static_cast<int64_t>(plan->copies.size()), h().limits.max_copies());
    }
    return h().topologies.back();
  }
  int64_t used(int rank) {
    int64_t sum = 0;
    for (const kv::Stream stream : kv::kAllStreams) {
      const PoolCounts counts = h().plane.pool(stream, rank);
      sum += counts.pages - counts.free;
    }
    return sum;
  }
  std::vector<RequestId> submit_all() {
    std::vector<RequestId> ids;
    uint32_t seed = 2;
    for (const GroupingWish& one :
         {kTpWish, wish(kv::DecodeKind::kDcp, 4), wish(kv::DecodeKind::kDcp, 2, kv::IndexKind::kSplit),
          wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit), wish(kv::DecodeKind::kDp)}) {
      ids.push_back(h().submit(text(seed, 23 + 7 * seed), 20, one));
      ++seed;
    }
    return ids;
  }
  std::optional<Harness> harness_;
  uint64_t commands_ = 0;
  int64_t copied_ = 0;
  int64_t host_pages_ = 0;
};

TEST_F(TopologyTest, BlocksMoveOffARankAndEverybodyGoesOn) {
  make(4, 120);
  const auto ids = submit_all();
  for (int i = 0; i < 6; ++i) h().step();
  EXPECT_GT(used(2), 0);
  change(2, false);
  const TopologyNotice notice = run_change();
  EXPECT_EQ(notice.error.code, ErrorCode::kOk) << notice.error.text();
  EXPECT_EQ(notice.ranks, 0b1011u);
  EXPECT_EQ(notice.bytes_moved, copied_);
  EXPECT_GT(notice.bytes_moved, 0);
  EXPECT_EQ(used(2), 0);
  const auto next = h().plan();
  ASSERT_TRUE(next.has_value());
  EXPECT_EQ(next->ranks, 0b1011u);
  for (const Span& span : next->spans) EXPECT_LE(span.grouping.base + span.grouping.width, 3);
  h().run_oldest();
  h().run_all();
  EXPECT_EQ(used(2), 0);
  for (const RequestId id : ids) h().expect_right(id);
}

// It has left already: plans in flight are not waited for, and the others copy out of its pool.
TEST_F(TopologyTest, ARankThatIsGoneIsLeftBehind) {
  make(4, 120);
  const auto ids = submit_all();
  for (int i = 0; i < 6; ++i) h().step();
  ASSERT_TRUE(h().plan().has_value());
  h().in_flight.clear();
  h().feed(TopologyRequested{++commands_, 1, false, true});
  const auto moves = h().plan();
  ASSERT_TRUE(moves.has_value());
  EXPECT_EQ(moves->ranks, 0b1101u);
  EXPECT_TRUE(moves->spans.empty());
  h().run_oldest();
  while (h().topologies.empty()) h().step();
  EXPECT_EQ(h().topologies.back().error.code, ErrorCode::kOk);
  EXPECT_EQ(used(1), 0);
  h().run_all();
  for (const RequestId id : ids) h().expect_right(id);
}

TEST_F(TopologyTest, ARankThatIsGoneEndsAChangeThatWasUnderWay) {
  make(4, 200);
  const auto ids = submit_all();
  for (int i = 0; i < 6; ++i) h().step();
  change(2, false);
  while (!h().in_flight.empty()) h().run_oldest();
  ASSERT_TRUE(h().plan().has_value());
  h().in_flight.clear();
  h().feed(TopologyRequested{++commands_, 1, false, true});
  ASSERT_EQ(h().topologies.size(), 1u);
  EXPECT_EQ(h().topologies[0].command, 1u);
  EXPECT_EQ(h().topologies[0].error.code, ErrorCode::kUnavailable);
  EXPECT_EQ(h().topologies[0].error.message, "rank 1 was lost");
  EXPECT_EQ(h().topologies[0].ranks, 0b1111u);
  const TopologyNotice notice = run_change();
  EXPECT_EQ(notice.error.code, ErrorCode::kOk) << notice.error.text();
  EXPECT_EQ(notice.command, 2u);
  EXPECT_EQ(notice.ranks, 0b1101u);
  EXPECT_EQ(used(1), 0);
  h().run_all();
  for (const RequestId id : ids) h().expect_right(id);
}

TEST_F(TopologyTest, WhereARankThatIsGoneIsNeededNothingWaitsForPlansThatWereDropped) {
  make(2, 60);
  change(1, false);
  ASSERT_EQ(h().topologies.back().error.code, ErrorCode::kOk);
  const RequestId id = h().submit(text(1, 30), 8);
  for (int i = 0; i < 2; ++i) h().step();
  ASSERT_TRUE(h().plan().has_value());
  h().in_flight.clear();
  h().feed(TopologyRequested{++commands_, 0, false, true});
  EXPECT_EQ(h().topologies.back().error.message, "rank 0 is the last one that computes");
  h().run_all();
  h().expect_right(id);
}

// One that has come in and not run yet has no pages of its first placement, and its next one needs others.
TEST_F(TopologyTest, AChangeThatIsUndoneGivesBackWhatANewcomerTook) {
  make(4, 120);
  const auto prompt = text(1, 41);
  h().submit(prompt, 1, wish(kv::DecodeKind::kDp));
  h().run_all();
  const RequestId id = h().submit(prompt, 20, kTpWish);
  h().feed(PauseChanged{id, true});
  EXPECT_FALSE(h().plan().has_value());
  ASSERT_EQ(h().plane.running_count(), 1);
  RegroupRequested regroup{++commands_, id, false, true, false, wish(kv::DecodeKind::kDcp, 4)};
  h().feed(regroup);
  std::array<int64_t, 4> before{};
  for (int rank = 0; rank < 4; ++rank) before[static_cast<size_t>(rank)] = used(rank);
  change(3, false);
  ASSERT_TRUE(h().plan().has_value());
  h().in_flight.clear();
  h().feed(PlansAbandoned{});
  EXPECT_EQ(h().topologies.back().error.code, ErrorCode::kUnavailable);
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(used(rank), before[static_cast<size_t>(rank)]) << rank;
  h().feed(PauseChanged{id, false});
  h().run_all();
  h().expect_right(id);
}

TEST_F(TopologyTest, NothingIsPlannedBeforePlansInFlightAreAcknowledged) {
  make(4, 120);
  submit_all();
  ASSERT_TRUE(h().plan().has_value());
  ASSERT_TRUE(h().plan().has_value());
  change(3, false);
  EXPECT_FALSE(h().plan().has_value());
  h().run_oldest();
  EXPECT_FALSE(h().plan().has_value());
  EXPECT_TRUE(h().topologies.empty());
  h().run_oldest();
  EXPECT_EQ(run_change().ranks, 0b0111u);
}

TEST_F(TopologyTest, OneAfterTheOtherLeavesAndAllComeBack) {
  make(4, 200);
  const auto ids = submit_all();
  for (int i = 0; i < 4; ++i) h().step();
  for (const int rank : {3, 0, 1}) {
    change(rank, false);
    EXPECT_EQ(run_change().error.code, ErrorCode::kOk);
    EXPECT_EQ(used(rank), 0);
    h().step();
    h().step();
  }
  EXPECT_EQ(h().plane.limits().active().ranks(), 0b0100u);
  for (const int rank : {1, 3, 0}) {
    change(rank, true);
    const TopologyNotice notice = run_change();
    EXPECT_EQ(notice.error.code, ErrorCode::kOk) << notice.error.text();
    h().step();
  }
  // Its wish is met again.
  EXPECT_EQ(h().plane.request(ids[1])->placement.grouping, (kv::Grouping{0, 4, 4}));
  h().run_all();
  for (const RequestId id : ids) h().expect_right(id);
  EXPECT_EQ(h().plane.counters().topology_changes, 6);
}

TEST_F(TopologyTest, AWorkerThatWasNotThereAtStartComesIn) {
  make(4, 60, 0b0011);
  const RequestId id = h().submit(text(3, 50), 20, wish(kv::DecodeKind::kDcp, 2));
  for (int i = 0; i < 4; ++i) h().step();
  EXPECT_EQ(used(2) + used(3), 0);
  change(3, true);
  EXPECT_EQ(run_change().ranks, 0b1011u);
  h().step();
  EXPECT_GT(used(3), 0);
  h().run_all();
  h().expect_right(id);
}

TEST_F(TopologyTest, BadCommandsAreRefusedByName) {
  make(2, 60);
  const auto refusal = [&](int rank, bool joins) {
    change(rank, joins);
    return h().topologies.back().error;
  };
  EXPECT_EQ(refusal(2, false).code, ErrorCode::kNotFound);
  EXPECT_EQ(refusal(-1, false).code, ErrorCode::kNotFound);
  EXPECT_EQ(refusal(1, true).message, "rank 1 takes part already");
  change(1, false);
  EXPECT_EQ(h().topologies.back().error.code, ErrorCode::kOk);  // nothing runs: at once
  EXPECT_EQ(refusal(1, false).message, "rank 1 takes no part already");
  EXPECT_EQ(refusal(0, false).message, "rank 0 is the last one that computes");
  EXPECT_EQ(refusal(0, false).code, ErrorCode::kFailedPrecondition);
  h().submit(text(1, 9), 4);
  h().plan();
  change(1, true);
  change(1, true);
  EXPECT_EQ(h().topologies.back().error.message, "another change of workers is under way");
  run_change();
  h().run_all();
}

TEST_F(TopologyTest, WhereTheOthersHaveNoRoomNothingChanges) {
  make(2, 14);
  // Striped over both: 20 blocks and the answer fill 12 of 14 pages on each.
  const RequestId id = h().submit(text(5, 80), 14, wish(kv::DecodeKind::kDcp, 2, kv::IndexKind::kSplit));
  for (int i = 0; i < 3; ++i) h().step();
  const PoolCounts before = h().entries(0);
  change(1, false);
  const TopologyNotice notice = h().topologies.back();
  EXPECT_EQ(notice.error.code, ErrorCode::kResourceExhausted);
  EXPECT_NE(notice.error.message.find("request 1 cannot move: "), std::string::npos) << notice.error.message;
  EXPECT_NE(notice.error.message.find("rank 0 entries needs "), std::string::npos) << notice.error.message;
  EXPECT_EQ(notice.ranks, 0b11u);
  EXPECT_EQ(h().entries(0).free, before.free);
  EXPECT_EQ(h().entries(0).reserved, before.reserved);
  h().run_all();
  h().expect_right(id);
}

TEST_F(TopologyTest, AWaitingRequestThatWouldNeverComeInRefusesIt) {
  make(2, 14);
  h().submit(text(5, 80), 14, wish(kv::DecodeKind::kDcp, 2, kv::IndexKind::kSplit));
  h().step();
  const RequestId waits = h().submit(text(6, 90), 4, wish(kv::DecodeKind::kDcp, 2, kv::IndexKind::kSplit));
  h().step();
  EXPECT_EQ(h().plane.waiting_count(), 1);
  change(1, false);
  EXPECT_EQ(h().topologies.back().error.code, ErrorCode::kTooLarge);
  EXPECT_NE(h().topologies.back().error.message.find("request 2 waits, and would not fit"),
            std::string::npos);
  h().run_all();
  h().expect_right(waits);
}

TEST_F(TopologyTest, PlansThatFailWhileBlocksMoveLeaveTheOldTopology) {
  make(4, 200);
  const auto ids = submit_all();
  for (int i = 0; i < 5; ++i) h().step();
  std::array<int64_t, 4> before{};
  for (int rank = 0; rank < 4; ++rank) before[static_cast<size_t>(rank)] = used(rank);
  change(2, false);
  ASSERT_TRUE(h().plan().has_value());
  h().in_flight.clear();
  h().feed(PlansAbandoned{});
  EXPECT_EQ(h().topologies.back().error.code, ErrorCode::kUnavailable);
  EXPECT_EQ(h().plane.limits().active().ranks(), 0b1111u);
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(used(rank), before[static_cast<size_t>(rank)]) << rank;
  h().run_all();
  for (const RequestId id : ids) h().expect_right(id);
}

TEST_F(TopologyTest, ThePrefixCacheMovesWhereThereIsRoom) {
  make(4, 40);
  const auto prompt = text(9, 64);
  h().submit(prompt, 2, wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit));
  h().run_all();
  change(1, false);
  const TopologyNotice notice = run_change();
  EXPECT_EQ(notice.sequences_moved, 0);
  EXPECT_EQ(notice.blocks_moved, 4);  // of 16
  EXPECT_EQ(notice.blocks_dropped, 0);
  EXPECT_EQ(notice.bytes_moved, copied_);
  EXPECT_EQ(used(1), 0);
  auto longer = prompt;
  longer.push_back(1);
  const RequestId again = h().submit(longer, 3);
  h().run_all();
  h().expect_right(again);
  EXPECT_EQ(h().finished(again).cached_tokens, 64);
}

TEST_F(TopologyTest, WhatFindsNoRoomOfThePrefixCacheIsDroppedAndCounted) {
  make(2, 16);
  h().submit(text(9, 96), 2, wish(kv::DecodeKind::kDcp, 2, kv::IndexKind::kSplit));  // 12 pages on each
  h().run_all();
  change(1, false);
  const TopologyNotice notice = run_change();
  EXPECT_EQ(notice.blocks_moved, 4);  // the pages that were free
  EXPECT_GT(notice.blocks_dropped, 0);
  EXPECT_EQ(used(1), 0);
  const RequestId again = h().submit(text(9, 42), 1);
  h().run_all();
  h().expect_right(again);
  EXPECT_GE(h().finished(again).cached_tokens, 8 * 4);  // its beginning is there
}

TEST_F(TopologyTest, ARegroupMeanwhileComesAfterIt) {
  make(4, 200);
  const RequestId id = h().submit(text(4, 60), 12, wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit));
  h().step();
  change(3, false);
  RegroupRequested regroup;
  regroup.command = 7;
  regroup.request = id;
  regroup.has_decode = true;
  regroup.wish.decode = {kv::DecodeKind::kDcp, 3};
  h().feed(regroup);
  EXPECT_TRUE(h().regrouped.empty());
  run_change();
  ASSERT_EQ(h().regrouped.size(), 1u);
  EXPECT_EQ(h().regrouped[0].error.code, ErrorCode::kOk) << h().regrouped[0].error.text();
  h().run_all();
  h().expect_right(id);
}

TEST_F(TopologyTest, APinMeanwhileComesAfterIt) {
  make(4, 200);
  const RequestId ended = h().submit(text(9, 64), 2, wish(kv::DecodeKind::kDp));
  h().run_all();
  h().submit(text(4, 60), 12);
  ASSERT_TRUE(h().plan().has_value());  // in flight: the change waits for it
  change(3, false);
  h().feed(PinRequested{8, ended});
  EXPECT_TRUE(h().pins.empty()) << "its blocks may just be left behind";
  run_change();
  ASSERT_EQ(h().pins.size(), 1u);
  EXPECT_EQ(h().pins[0].error.code, ErrorCode::kOk) << h().pins[0].error.text();
  EXPECT_EQ(h().plane.pinned_blocks(), 16);
}

// Other requests count on the room that copies of pinned blocks took on the way.
TEST_F(TopologyTest, AChangeThatFailsGivesBackWhatPinnedBlocksTook) {
  make(4, 40);
  const RequestId ended = h().submit(text(9, 64), 2, wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit));
  h().run_all();
  h().feed(PinRequested{8, ended});
  ASSERT_EQ(h().pins.at(0).error.code, ErrorCode::kOk);
  std::array<int64_t, 4> before{};
  for (int rank = 0; rank < 4; ++rank) before[static_cast<size_t>(rank)] = used(rank);
  change(1, false);
  const auto plan = h().plan();
  ASSERT_TRUE(plan.has_value());
  EXPECT_FALSE(plan->copies.empty());
  h().in_flight.clear();
  h().feed(PlansAbandoned{});
  EXPECT_EQ(h().plane.limits().active().ranks(), 0b1111u);
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(used(rank), before[static_cast<size_t>(rank)]) << rank;
}

TEST_F(TopologyTest, ARequestMayEndWhileItMoves) {
  make(4, 200);
  const auto ids = submit_all();
  for (int i = 0; i < 5; ++i) h().step();
  change(0, false);
  ASSERT_TRUE(h().plan().has_value());
  h().feed(CancelRequested{ids[1]});
  h().run_oldest();
  while (h().topologies.empty()) h().step();
  EXPECT_EQ(h().topologies.back().error.code, ErrorCode::kOk);
  EXPECT_EQ(used(0), 0);
  h().run_all();
  for (const RequestId id : ids) {
    if (id != ids[1]) h().expect_right(id);
  }
}

TEST_F(TopologyTest, APausedRequestMovesToo) {
  make(2, 60);
  const RequestId id = h().submit(text(4, 30), 12, wish(kv::DecodeKind::kDcp, 2));
  h().step();
  h().step();
  h().feed(PauseChanged{id, true});
  change(1, false);
  EXPECT_EQ(run_change().error.code, ErrorCode::kOk);
  EXPECT_EQ(used(1), 0);
  h().feed(PauseChanged{id, false});
  h().run_all();
  h().expect_right(id);
}

// Everything at any time: arrivals, cancels, regroups, changes, plans that fail.
TEST_F(TopologyTest, AnyOrderOfEventsGivesEverybodyTheirOwnAnswer) {
  int64_t done = 0, refused = 0, failed = 0, moved = 0, loaded = 0;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    SplitMix64 random(seed);
    const int ranks = 2 + static_cast<int>(random.below(4));
    host_pages_ = random.below(3) == 0 ? 0 : 1 + static_cast<int64_t>(random.below(90));
    make(ranks, 20 + static_cast<int64_t>(random.below(host_pages_ == 0 ? 120 : 20)));
    std::vector<RequestId> ids;
    std::vector<RequestId> cancelled;
    int abandoned = 0;
    for (int event = 0; event < 160; ++event) {
      const int places = h().plane.limits().places();
      switch (random.below(12)) {
        case 0:
        case 1: {
          const std::vector<kv::DecodeWish> wishes = kv::decode_wishes(places);
          GroupingWish one;
          one.decode = wishes[random.below(wishes.size())];
          one.index = random.below(2) == 0 ? kv::IndexKind::kCopied : kv::IndexKind::kSplit;
          const auto seed_of_text = static_cast<uint32_t>(random.below(3));
          ids.push_back(h().submit(text(seed_of_text, 1 + static_cast<int64_t>(random.below(60))),
                                   1 + static_cast<int64_t>(random.below(12)), one));
          break;
        }
        case 2:
          if (!ids.empty() && random.below(3) == 0) {
            cancelled.push_back(ids[random.below(ids.size())]);
            h().feed(CancelRequested{cancelled.back()});
          }
          break;
        case 3:
          change(static_cast<int>(random.below(static_cast<uint64_t>(ranks))), random.below(2) == 0);
          break;
        case 4:
          if (!h().in_flight.empty() && random.below(4) == 0 && abandoned < 3) {
            ++abandoned;
            h().in_flight.clear();
            h().feed(PlansAbandoned{});
          }
          break;
        case 5:
          if (!ids.empty()) {
            RegroupRequested regroup;
            regroup.request = ids[random.below(ids.size())];
            regroup.has_decode = true;
            const std::vector<kv::DecodeWish> wishes = kv::decode_wishes(places);
            regroup.wish.decode = wishes[random.below(wishes.size())];
            h().feed(regroup);
          }
          break;
        case 6:
        case 7:
        case 8:
          h().plan();
          break;
        default:
          if (!h().in_flight.empty()) h().run_oldest();
      }
    }
    while (!h().in_flight.empty()) h().run_oldest();
    h().run_all();
    for (const RequestId id : ids) {
      const bool ended_early = std::find(cancelled.begin(), cancelled.end(), id) != cancelled.end() ||
                               (h().outcome(id).finished && h().finished(id).reason == FinishReason::kError);
      if (!ended_early) h().expect_right(id);
    }
    loaded += h().plane.counters().loaded_bytes;
    for (const TopologyNotice& notice : h().topologies) {
      if (notice.error.code == ErrorCode::kOk) {
        ++done;
        moved += notice.bytes_moved;
      } else if (notice.error.code == ErrorCode::kUnavailable) {
        ++failed;
      } else {
        ++refused;
      }
    }
    if (HasFailure()) return;
  }
  std::printf("%lld changes done, %lld bytes moved, %lld refused, %lld rolled back\n",
              static_cast<long long>(done), static_cast<long long>(moved), static_cast<long long>(refused),
              static_cast<long long>(failed));
  EXPECT_GT(done, 300);
  EXPECT_GT(moved, 0);
  EXPECT_GT(refused, 100);
  EXPECT_GT(failed, 5);
  EXPECT_GT(loaded, 0);
}

// A block has got a row's place but no page yet, because the free ones are still named by plans in flight.
// When a change of ranks fails then, what it took for that block on another rank is not left behind as if it
// had the rows to come.
TEST_F(TopologyTest, AChangeThatFailsLeavesNoPageOfABlockWithoutRows) {
  int moved = 0;
  for (int64_t i = 0; i < 14; ++i) {
    const int64_t left = 1 + i / 2;
    const int rank = static_cast<int>(i % 2);
    SCOPED_TRACE(testing::Message() << left << " pages left, without rank " << rank);
    Limits limits = limits_of(2, 400);
    for (auto& pages : limits.pool_pages) pages[0] = 40;  // of entries
    harness_.emplace(limits);
    // Somebody else takes most of a pool, and is gone while a plan names it.
    const RequestId other = h().submit(text(2, 4 * (40 - left) - 1), 2, wish(kv::DecodeKind::kDp));
    h().plan();
    h().feed(CancelRequested{other});
    const RequestId id = h().submit(text(1, 60), 40, wish(kv::DecodeKind::kDcp, 2));
    const int64_t rows = h().plan().value().spans[0].rows;
    EXPECT_LT(rows, 60) << "it waits for pages";
    change(rank, false);
    while (!h().in_flight.empty()) h().run_oldest();
    if (!h().topologies.empty()) continue;  // nothing lies there yet
    ++moved;
    ASSERT_TRUE(h().plan());
    h().in_flight.clear();
    h().feed(PlansAbandoned{});
    EXPECT_NE(h().topologies.back().error.code, ErrorCode::kOk);
    for (int step = 0; step < 3; ++step) h().step();
    change(rank, false);
    EXPECT_EQ(run_change().error.code, ErrorCode::kOk);
    h().run_all();
    h().expect_right(id);
  }
  EXPECT_GT(moved, 6);
}

// What was to be copied beside a pinned block that finds no room is as it was: not there.
TEST(Topology, AChangeThatFailsForAPinCopiesNothingOfTheOthers) {
  Harness harness(small_limits(2, 12));
  const RequestId runs = harness.submit(text(1, 28), 8, wish(kv::DecodeKind::kDp));  // nine blocks, rank 0
  harness.step();
  ASSERT_EQ(harness.entries(0).used, 7);
  const RequestId other = harness.submit(text(2, 16), 1, wish(kv::DecodeKind::kDp));
  const RequestId pinned = harness.submit(text(3, 16), 1, wish(kv::DecodeKind::kDp));
  while (!harness.outcome(other).finished || !harness.outcome(pinned).finished) harness.step();
  ASSERT_EQ(harness.entries(1).cached, 8);
  harness.feed(PinRequested{1, pinned});
  ASSERT_EQ(harness.pins.at(0).error.code, ErrorCode::kOk);
  harness.feed(TopologyRequested{1, 1, false});
  ASSERT_EQ(harness.topologies.size(), 1u);
  EXPECT_EQ(harness.topologies[0].error.code, ErrorCode::kResourceExhausted);
  EXPECT_EQ(harness.entries(0).cached, 0);
  harness.feed(CancelRequested{runs});
  // On both ranks: what rank 0 lacks is copied there.
  const RequestId again = harness.submit(text(2, 16), 3, kTpWish);
  harness.run_all();
  harness.expect_right(again);
  EXPECT_EQ(harness.finished(again).cached_tokens, 15);
}

// Heads lie where another request computed them, and its successor has come in but not run, when a rank joins
// and fails: what it found is where it was, not on the rank that joined alone.
TEST(Topology, AJoinThatFailsLeavesWhatARequestFound) {
  Limits limits = small_limits(3, 60);
  limits.geometry.streams[0].parts = limits.geometry.heads = 8;
  for (auto& pages : limits.pool_pages) pages[0] *= 8;
  limits.topology = kv::Topology(0b011);
  limits.host_pages = {1000, 100};
  limits.host_write = HostWrite::kThrough;
  limits.host_plan_bytes = 1;
  Harness harness(limits);
  harness.submit(text(1, 21), 1, wish(kv::DecodeKind::kDp));
  while (harness.step()) {
    if (harness.entries(0).cached == 40) break;
  }
  ASSERT_EQ(harness.entries(0).cached, 40) << "all heads of five blocks on rank 0";
  const RequestId next = harness.submit(text(1, 30), 4, kTpWish);
  harness.feed(PauseChanged{next, true});
  harness.step();  // it comes in
  ASSERT_EQ(harness.plane.request(next)->computed_tokens, 20);
  harness.feed(TopologyRequested{1, 2, true});
  ASSERT_GT(harness.plan().value().copies.size(), 0u);
  harness.run_oldest();
  ASSERT_TRUE(harness.topologies.empty()) << "not all is on the host yet";
  harness.workers.lose(2);
  harness.feed(MemoryLost{2});
  harness.feed(PauseChanged{next, false});
  ASSERT_EQ(harness.topologies.size(), 1u);
  EXPECT_NE(harness.topologies[0].error.code, ErrorCode::kOk);
  harness.run_all();
  harness.expect_right(next);
}

}  // namespace
}  // namespace weft::controlplane
