// Goal: thinning is free, widening costs Σ |new − old holders| pages, in the middle of a block too; a refusal
// changes nothing; shared blocks keep what others need; the answer is always the one of the undisturbed run.
#include "controlplane/regroup.h"

#include <gtest/gtest.h>

#include "proto/vocab/random.h"
#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

RegroupRequested to(RequestId id, const GroupingWish& wish, bool dry_run = false) {
  return {1, id, false, true, true, wish, dry_run};
}

int64_t used(const Harness& h) {
  int64_t pages = 0;
  for (int rank = 0; rank < h.limits.rank_count; ++rank) pages += h.entries(rank).used;
  return pages;
}

class Regroup : public testing::Test {
 protected:
  // 18 prompt rows and some of the answer: the last block is partial.
  RequestId decoding(Harness& h, const GroupingWish& wish) {
    const RequestId id = h.submit(text(1, 18), 24, wish);
    for (int i = 0; i < 5; ++i) h.step();
    return id;
  }
};

TEST_F(Regroup, ThinningCopiesNothingAndGivesPagesBack) {
  Harness h(small_limits(4, 100));
  const RequestId id = decoding(h, kTpWish);
  const int64_t before = used(h);
  h.feed(to(id, wish(kv::DecodeKind::kDcp, 4)));
  const RegroupedNotice& notice = h.regrouped.at(0);
  EXPECT_EQ(notice.error.code, ErrorCode::kOk);
  EXPECT_EQ(notice.before, "tp, index copied");
  EXPECT_EQ(notice.after, "dcp(4), index copied");
  EXPECT_EQ(notice.bytes_moved, 0);
  EXPECT_EQ(notice.pages_dropped, 6 * 3);
  const Plan plan = h.plan().value();
  EXPECT_TRUE(plan.copies.empty());
  EXPECT_EQ(plan.spans[0].grouping.c, 4);
  EXPECT_EQ(used(h), before) << "pages are dropped when the step is acknowledged";
  h.run_oldest();
  EXPECT_EQ(used(h), before - 6 * 3);
  EXPECT_FALSE(h.plane.request(id)->switching);
  h.run_all();
  h.expect_right(id);
}

TEST_F(Regroup, WideningCopiesExactlyTheMissingPages) {
  Harness h(small_limits(4, 100));
  const RequestId id = decoding(h, wish(kv::DecodeKind::kDcp, 4));
  const uint32_t old_version = h.plan()->spans[0].table_version;
  h.run_oldest();
  h.feed(to(id, kTpWish));
  const int64_t blocks = 6;  // 18 + 5 rows, the last one partial
  EXPECT_EQ(h.regrouped.at(0).bytes_moved, blocks * 3 * h.limits.geometry.page_bytes(kv::Stream::kEntries));
  EXPECT_EQ(h.regrouped.at(0).pages_dropped, 0);
  const Plan plan = h.plan().value();
  EXPECT_EQ(static_cast<int64_t>(plan.copies.size()), blocks * 3);
  EXPECT_NE(plan.spans[0].table_version, old_version) << "a new table, or an old one written anew";
  h.run_oldest();
  h.run_all();
  h.expect_right(id);
}

// A plan carries two blocks: the sequence goes on as it was, plan by plan, until all is copied.
class SpreadRegroup : public Regroup {
 protected:
  static Limits limits(int64_t pages) {
    Limits limits = small_limits(4, pages);
    limits.copy_plan_bytes = 2 * 3 * limits.geometry.page_bytes(kv::Stream::kEntries) / limits.rank_count;
    return limits;
  }
};

TEST_F(SpreadRegroup, GoesOnUnderTheOldGroupingMeanwhile) {
  Harness h(limits(100));
  const RequestId id = decoding(h, wish(kv::DecodeKind::kDcp, 4));  // 23 rows, the sixth block is partial
  const uint32_t version = h.plan()->spans[0].table_version;
  h.run_oldest();
  h.feed(to(id, kTpWish));
  EXPECT_EQ(h.regrouped.at(0).bytes_moved, 6 * 3 * h.limits.geometry.page_bytes(kv::Stream::kEntries));
  for (int i = 0; i < 3; ++i) {  // a sixth block is complete in the third one
    const Plan plan = h.plan().value();
    EXPECT_EQ(std::ssize(plan.copies), 2 * 3);
    EXPECT_EQ(plan.spans[0].grouping.c, 4);
    EXPECT_EQ(plan.spans[0].table_version, version);
    EXPECT_TRUE(h.plane.request(id)->change_waits);
    h.run_oldest();
  }
  const Plan last = h.plan().value();  // the block that is being written
  EXPECT_EQ(std::ssize(last.copies), 3);
  EXPECT_EQ(last.spans[0].grouping.c, 1);
  EXPECT_FALSE(h.plane.request(id)->change_waits);
  h.run_oldest();
  EXPECT_FALSE(h.plane.request(id)->switching);
  h.run_all();
  h.expect_right(id);
}

TEST_F(SpreadRegroup, AllAtOnceWhereThereIsNoRoomForBoth) {
  Harness h(limits(11));  // 41 rows of tp
  const RequestId id = decoding(h, wish(kv::DecodeKind::kDcp, 4));
  h.feed(to(id, kTpWish));
  const Plan plan = h.plan().value();
  EXPECT_EQ(std::ssize(plan.copies), 6 * 3);
  EXPECT_EQ(plan.spans[0].grouping.c, 1);
  h.run_oldest();
  h.run_all();
  h.expect_right(id);
}

TEST_F(SpreadRegroup, EndsWellWhateverHappensInTheMiddle) {
  enum What { kCancel, kAbandon, kBack, kOther, kLost, kWhats };
  for (int what = 0; what < kWhats; ++what) {
    for (int after = 0; after < 4; ++after) {
      SCOPED_TRACE(testing::Message() << "what " << what << " after " << after << " plans");
      Harness h(limits(100));
      const RequestId id = decoding(h, wish(kv::DecodeKind::kDcp, 4));
      h.feed(to(id, kTpWish));
      for (int i = 0; i < after; ++i) h.step();
      if (what == kCancel) {
        ASSERT_TRUE(h.plan());
        h.feed(CancelRequested{id});
        h.run_all();
        EXPECT_EQ(used(h), 0);
        continue;
      }
      if (what == kAbandon) {
        ASSERT_TRUE(h.plan());
        h.in_flight.clear();
        h.feed(PlansAbandoned{});
      }
      if (what == kBack) h.feed(to(id, wish(kv::DecodeKind::kDcp, 4)));
      if (what == kOther) h.feed(to(id, wish(kv::DecodeKind::kDcp, 2)));
      if (what == kLost) {
        h.in_flight.clear();
        h.workers.lose(2);
        h.feed(MemoryLost{2});
      }
      h.run_all();
      h.expect_right(id);
      EXPECT_EQ(used(h), 0);
    }
  }
}

// Sequences of several parts: other heads are needed, so no way is free but one that only drops.
TEST_F(Regroup, PartsMoveToTheRanksThatReadThem) {
  Limits limits = small_limits(4, 200);
  limits.geometry.streams[0].parts = 4;
  limits.geometry.heads = 8;
  Harness h(limits);
  const RequestId id = decoding(h, kTpWish);
  const int64_t blocks = 6, page = h.limits.geometry.page_bytes(kv::Stream::kEntries);
  EXPECT_EQ(used(h), blocks * 4) << "every rank has its KV head of every block";
  // Each block comes together on one rank: three parts arrive, and leave the others.
  h.feed(to(id, wish(kv::DecodeKind::kDcp, 4)));
  EXPECT_EQ(h.regrouped.at(0).bytes_moved, blocks * 3 * page);
  EXPECT_EQ(h.regrouped.at(0).pages_dropped, blocks * 3);
  EXPECT_EQ(std::ssize(h.plan().value().copies), blocks * 3);
  h.run_oldest();
  EXPECT_EQ(used(h), blocks * 4);
  // dcp(2): two parts of every block on one rank of each half. One rank has them, the other lacks its two.
  h.feed(to(id, wish(kv::DecodeKind::kDcp, 2)));
  EXPECT_EQ(h.regrouped.at(1).bytes_moved, blocks * 2 * page);
  h.step();
  h.feed(to(id, kTpWish));
  EXPECT_EQ(h.regrouped.at(2).bytes_moved, blocks * 2 * page);
  h.step();
  EXPECT_EQ(used(h), (blocks + 1) * 4) << "a row has begun one more";
  h.run_all();
  h.expect_right(id);
}

// Price, copies and drops are those of the rule, part by part, for even and uneven heads.
TEST_F(Regroup, PriceIsTheDifferenceOfHolders) {
  for (const auto& [heads, parts, ranks] :
       {std::tuple{9, 3, 4}, {9, 3, 8}, {16, 8, 4}, {8, 2, 8}, {8, 8, 6}}) {
    Limits limits = small_limits(ranks, 400);
    limits.geometry.streams[0].parts = parts;
    limits.geometry.heads = heads;
    std::vector<GroupingWish> wishes = {kTpWish, wish(kv::DecodeKind::kDp)};
    for (int c = 2; c <= ranks; ++c) {
      if (ranks % c == 0) wishes.push_back(wish(kv::DecodeKind::kDcp, c, kv::IndexKind::kSplit));
    }
    for (const GroupingWish& from : wishes) {
      for (const GroupingWish& into : wishes) {
        Harness h(limits);
        const RequestId id = decoding(h, from);
        const kv::Residency before = h.plane.request(id)->placement.residency;
        const auto origin = h.plane.request(id)->origin;
        h.feed(to(id, into));
        const kv::Residency after = h.plane.request(id)->placement.residency;
        int64_t bytes = 0, copies = 0;
        for (int64_t block = 0; block < 6; ++block) {
          for (int part = 0; part < limits.geometry.parts(); ++part) {
            const auto holders = [&](const kv::Residency& residency) {
              return kv::part_holders(limits.geometry, residency, block, part, origin, ranks);
            };
            const int lacking = rank_count_of(holders(after) & ~holders(before));
            copies += lacking;
            bytes += lacking * limits.geometry.page_bytes(limits.geometry.stream_of(part));
          }
        }
        EXPECT_EQ(h.regrouped.at(0).bytes_moved, bytes);
        EXPECT_EQ(std::ssize(h.plan().value().copies), copies);
        h.run_oldest();
        EXPECT_EQ(h.plane.request(id)->stored_bytes,
                  kv::stored_bytes(limits.geometry, after, 23, origin, ranks));
        h.run_all();
        h.expect_right(id);
      }
    }
  }
}

TEST_F(Regroup, EveryChangeBackAndForthKeepsTheAnswer) {
  std::vector<GroupingWish> wishes;
  for (const kv::IndexKind index : {kv::IndexKind::kCopied, kv::IndexKind::kSplit}) {
    for (const int c : {1, 2, 4}) wishes.push_back(wish(kv::DecodeKind::kDcp, c, index));
    wishes.push_back(wish(kv::DecodeKind::kDp, 1, index));
  }
  for (const GroupingWish& from : wishes) {
    for (const GroupingWish& other : wishes) {
      Harness h(small_limits(4, 100));
      const RequestId id = h.submit(text(1, 18), 24, from);
      for (int i = 0; i < 4; ++i) h.step();
      h.feed(to(id, other));
      for (int i = 0; i < 3; ++i) h.step();
      h.feed(to(id, from));
      h.run_all();
      h.expect_right(id);
    }
  }
}

TEST_F(Regroup, BetweenTwoPlansInFlightAndTwiceBeforeOneIsMade) {
  Harness h(small_limits(4, 100));
  const RequestId id = h.submit(text(1, 18), 24);
  h.plan();
  h.plan();
  h.feed(to(id, wish(kv::DecodeKind::kDcp, 4)));
  h.feed(to(id, wish(kv::DecodeKind::kDp)));
  h.run_oldest();
  h.plan();
  h.feed(to(id, kTpWish));
  h.run_oldest();
  h.plan();
  h.feed(to(id, wish(kv::DecodeKind::kDcp, 2)));
  while (h.plane.request(id)) {
    h.run_oldest();
    h.plan();
  }
  h.expect_right(id);
  for (const auto& notice : h.regrouped) EXPECT_EQ(notice.error.code, ErrorCode::kOk);
}

// What was announced is what the plans copy, for every change that a plan has applied; a change that another
// replaced first, or that came after the last row was planned, moves nothing, and the latter is told.
TEST_F(Regroup, AnnouncedBytesAreCopiedOnceApplied) {
  const uint64_t seed = 77;
  SplitMix64 random(seed);
  const auto bytes_of = [](const Harness& h, const Plan& plan) {
    int64_t bytes = 0;
    for (const PageCopy& copy : plan.copies) bytes += h.limits.geometry.page_bytes(copy.stream);
    return bytes;
  };
  int applied = 0, replaced = 0, late = 0;
  for (int round = 0; round < 200; ++round) {
    SCOPED_TRACE("seed " + std::to_string(seed) + " round " + std::to_string(round));
    Harness h(small_limits(4, 200));
    const RequestId id = h.submit(text(1, 18), 24);
    int64_t announced = 0;  // by the change that waits
    bool waits = false;
    while (h.plane.request(id)) {
      if (random.below(3) == 0) {
        const auto index = random.below(2) == 0 ? kv::IndexKind::kCopied : kv::IndexKind::kSplit;
        const int c = 1 << random.below(3);
        const kv::DecodeKind kind = random.below(4) == 0 ? kv::DecodeKind::kDp
                                    : c == 1             ? kv::DecodeKind::kTp
                                                         : kv::DecodeKind::kDcp;
        const auto before = h.plane.request(id)->placement;
        h.feed(to(id, wish(kind, kind == kv::DecodeKind::kDcp ? c : 1, index)));
        if (!(h.plane.request(id)->placement == before)) {
          replaced += waits ? 1 : 0;
          announced = h.regrouped.back().bytes_moved;
          waits = true;
        }
      }
      if (const auto plan = h.plan()) {
        EXPECT_EQ(bytes_of(h, *plan), announced);
        applied += announced > 0 ? 1 : 0;
        announced = 0;
        waits = false;
      }
      EXPECT_EQ(h.plane.request(id)->change_waits, waits);
      if (h.in_flight.size() == 2 || (!h.in_flight.empty() && random.below(2) == 0)) h.run_oldest();
    }
    EXPECT_EQ(h.finished(id).change_waits, waits);
    late += waits ? 1 : 0;
    h.expect_right(id);
  }
  EXPECT_GT(applied, 100);
  EXPECT_GT(replaced, 10);
  EXPECT_GT(late, 10);
}

TEST_F(Regroup, ADryRunTellsThePriceAndChangesNothing) {
  Harness h(small_limits(4, 100));
  const RequestId id = decoding(h, wish(kv::DecodeKind::kDcp, 4));
  h.feed(to(id, kTpWish, true));
  EXPECT_GT(h.regrouped.at(0).bytes_moved, 0);
  EXPECT_EQ(h.plane.price(id, kTpWish)->bytes_moved, h.regrouped.at(0).bytes_moved);
  EXPECT_EQ(h.plane.request(id)->placement.grouping.c, 4);
  EXPECT_TRUE(h.plan()->copies.empty());
}

TEST_F(Regroup, ARefusalNamesPagesAndChangesNothing) {
  Harness h(small_limits(4, 12));
  const RequestId id = h.submit(text(1, 60), 20, wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit));
  for (int i = 0; i < 3; ++i) h.step();
  h.feed(to(id, kTpWish));
  const RegroupedNotice& notice = h.regrouped.at(0);
  EXPECT_EQ(notice.error.code, ErrorCode::kResourceExhausted);
  EXPECT_NE(notice.error.message.find("rank 0 entries needs"), std::string::npos) << notice.error.message;
  EXPECT_NE(notice.error.message.find("free"), std::string::npos);
  EXPECT_EQ(notice.before, notice.after);
  EXPECT_EQ(h.plane.request(id)->placement.grouping.c, 4);
  h.run_all();
  h.expect_right(id);
}

TEST_F(Regroup, SharedBlocksKeepWhatOthersNeed) {
  Harness h(small_limits(4, 100));
  const RequestId stays = decoding(h, kTpWish);
  const RequestId goes = h.submit(text(1, 18), 24);
  h.step();
  ASSERT_EQ(h.plane.request(goes)->cached_tokens, 16);
  h.feed(to(goes, wish(kv::DecodeKind::kDp)));
  h.step();
  const RequestSnapshot kept = *h.plane.request(stays);
  const int64_t rows = kept.prompt_tokens + kept.completion_tokens - 1;
  EXPECT_EQ(kept.stored_bytes,
            kv::stored_bytes(h.limits.geometry, kept.placement.residency, rows, kept.origin, 4));
  h.run_all();
  h.expect_right(stays);
  h.expect_right(goes);
}

TEST_F(Regroup, DroppedPagesWaitForAPlanInFlightThatReadsThem) {
  Harness h(small_limits(2, 100));
  const RequestId goes = decoding(h, kTpWish);
  h.feed(to(goes, wish(kv::DecodeKind::kDp)));
  h.plan();
  const RequestId reader = h.submit(text(1, 18), 24);
  ASSERT_EQ(h.plan()->spans.size(), 2u);
  ASSERT_EQ(h.plane.request(reader)->cached_tokens, 16);
  h.feed(CancelRequested{reader});  // its row still reads the shared blocks
  const int left = 1 - h.plane.request(goes)->placement.grouping.base;
  const int64_t free = h.entries(left).free;
  h.run_oldest();
  EXPECT_EQ(h.entries(left).used, 0);
  EXPECT_EQ(h.entries(left).free, free);
  h.run_oldest();
  EXPECT_EQ(h.entries(left).free, 100);
  h.run_all();
  h.expect_right(goes);
}

TEST_F(Regroup, APrefixHitIsWidenedByTheFirstPlan) {
  Harness h(small_limits(4, 100));
  h.submit(text(1, 16), 1, wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit));
  h.run_all();
  const RequestId id = h.submit(text(1, 18), 4);
  const Plan plan = h.plan().value();
  EXPECT_EQ(h.plane.request(id)->cached_tokens, 16);
  EXPECT_EQ(plan.copies.size(), 4u * 3 * 2);
  h.run_oldest();
  h.run_all();
  h.expect_right(id);
}

TEST_F(Regroup, DpStaysOnItsRank) {
  Harness h(small_limits(4, 100));
  h.submit(text(9, 40), 30, wish(kv::DecodeKind::kDp));
  const RequestId id = decoding(h, wish(kv::DecodeKind::kDp));
  const int rank = h.plane.request(id)->placement.grouping.base;
  h.feed(to(id, wish(kv::DecodeKind::kDp)));
  EXPECT_EQ(h.regrouped.at(0).bytes_moved, 0);
  EXPECT_EQ(h.plane.request(id)->placement.grouping.base, rank);
}

TEST_F(Regroup, UnknownRequestsAndBadWishesAreRefused) {
  Harness h(small_limits(4, 100));
  h.feed(to(RequestId{77}, kTpWish));
  EXPECT_EQ(h.regrouped.at(0).error.code, ErrorCode::kNotFound);
  const RequestId id = decoding(h, kTpWish);
  h.feed(to(id, wish(kv::DecodeKind::kDcp, 3)));
  EXPECT_EQ(h.regrouped.at(1).error.code, ErrorCode::kInvalidArgument);
}

// A waiting request that comes to fit by another grouping comes in at once, though nothing else has changed.
TEST(RegroupWaiting, ComesInWhenItsNewGroupingFits) {
  Harness h(small_limits(2, 8));
  const RequestId a = h.submit(text(1, 8), 1);  // tp: 2 pages on both ranks
  h.plan();
  // dp with split index: 7 pages on one rank, where 6 are free; dcp(2): 4 and 3.
  const RequestId b = h.submit(text(2, 24), 5, wish(kv::DecodeKind::kDp, 1, kv::IndexKind::kSplit));
  h.plan();
  ASSERT_EQ(h.plane.request(b)->state, RequestState::kWaiting);
  RegroupRequested event;
  event.command = 1;
  event.request = b;
  event.has_decode = event.has_index = true;
  event.wish = wish(kv::DecodeKind::kDcp, 2, kv::IndexKind::kSplit);
  h.feed(event);
  h.plan();
  EXPECT_NE(h.plane.request(b)->state, RequestState::kWaiting);
  while (!h.in_flight.empty()) h.run_oldest();
  h.run_all();
  for (const RequestId id : {a, b}) h.expect_right(id);
}

TEST_F(Regroup, PrefillSplitChangesForTheChunksToCome) {
  Limits limits = small_limits(4, 100);
  limits.max_chunk_rows = 16;
  Harness h(limits);
  const RequestId id = h.submit(text(1, 48), 2);
  EXPECT_EQ(h.plan()->spans[0].split, kv::Split::kZigzag);
  h.run_oldest();
  RegroupRequested request{1, id, true, false, false, {}, false};
  request.wish.prefill = kv::Split::kInterleave;
  h.feed(request);
  EXPECT_EQ(h.regrouped.at(0).after, "tp, index copied, prefill interleave");
  EXPECT_EQ(h.plan()->spans[0].split, kv::Split::kInterleave);
}

TEST_F(Regroup, ResidencyIsAQuarterUnderDcp4) {
  Harness h(small_limits(4, 100));
  const RequestId id = h.submit(text(1, 128), 2, wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit));
  h.step();
  const RequestSnapshot snapshot = *h.plane.request(id);
  EXPECT_EQ(snapshot.stored_bytes, kv::stored_bytes(h.limits.geometry, snapshot.placement.residency, 128,
                                                    snapshot.origin, h.limits.rank_count));
  for (size_t rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(snapshot.stored_bytes[0][rank] + snapshot.stored_bytes[1][rank],
              128 / 4 * h.limits.geometry.token_bytes());
  }
}

}  // namespace
}  // namespace weft::controlplane
