// Goal: a context that lies on the host is read from there, whatever the grouping and whatever happens;
// device pools hold a window of it, and the room in the host pool that it needs is its own. Method: exact
// scenes on small pools, then random ones; the fake workers check every byte that a row reads, and spoil the
// pages of hot buffers whenever a row may use them.
#include <gtest/gtest.h>

#include <algorithm>

#include "proto/vocab/random.h"
#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

constexpr auto kEntries = kv::Stream::kEntries;
constexpr int64_t kKeyBytes = 4 * 8;  // index keys of one block

// Device pools for 12 blocks of entries, and index keys for all of a context of 256 tokens.
Limits limits_of(int ranks, int64_t host) {
  Limits limits = small_limits(ranks, 12);
  for (auto& pages : limits.pool_pages) pages[1] = 70;
  limits.index_topk = 8;
  limits.hot_tokens = 8;
  limits.host_window = 6;
  limits.host_pages = {host, host};
  return limits;
}

const std::vector<GroupingWish>& wishes() {
  static const std::vector<GroupingWish> all = {
      kTpWish, wish(kv::DecodeKind::kDcp, 2), wish(kv::DecodeKind::kDcp, 4, kv::IndexKind::kSplit),
      wish(kv::DecodeKind::kTp, 1, {kv::IndexKind::kSplit, 4}), wish(kv::DecodeKind::kDp)};
  return all;
}

std::vector<uint32_t> joined(std::vector<uint32_t> a, const std::vector<uint32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

RequestArrived on_host(Harness& harness, const std::vector<uint32_t>& prompt, int64_t max_tokens,
                       const GroupingWish& grouping = kTpWish) {
  RequestArrived arrived = harness.arrival(prompt, max_tokens, grouping);
  arrived.context = ContextPlace::kHost;
  return arrived;
}

void expect_all_given_back(Harness& harness) {
  while (!harness.in_flight.empty()) harness.run_oldest();
  for (int rank = 0; rank < harness.limits.rank_count; ++rank) {
    for (const kv::Stream stream : kv::kAllStreams) {
      const PoolCounts counts = harness.plane.pool(stream, rank);
      EXPECT_EQ(counts.free + counts.cached, counts.pages) << "rank " << rank;
      EXPECT_EQ(counts.reserved, 0) << "rank " << rank;
    }
  }
  EXPECT_EQ(harness.plane.host_pool(kEntries).used, 0);
}

TEST(HostContext, LargerThanAllPoolsTogetherItDecodes) {
  for (const GroupingWish& grouping : wishes()) {
    Harness harness(limits_of(4, 64));
    const RequestId id = harness.submit(text(1, 209), 40, grouping);  // 62 blocks; all pools hold 48
    int64_t most = 0;
    while (const auto plan = harness.plan()) {
      for (const Span& span : plan->spans) {
        EXPECT_GE(span.host_blocks, most) << "of plans one after the other";
        EXPECT_LE(span.host_blocks * 4, span.start);
        most = span.host_blocks;
      }
      harness.run_oldest();
    }
    harness.expect_right(id);
    EXPECT_GE(most, 58);
    expect_all_given_back(harness);
    EXPECT_EQ(harness.plane.host_pool(kEntries).cached, 61) << "all but the one that the answer ends in";
  }
}

TEST(HostContext, WhatFitsOnDevicesStaysThere) {
  Harness harness(limits_of(1, 64));
  const RequestId id = harness.submit(text(1, 40), 4);
  while (const auto plan = harness.plan()) {
    for (const Span& span : plan->spans) EXPECT_EQ(span.host_blocks, 0);
    EXPECT_TRUE(plan->host_writes.empty());
    harness.run_oldest();
  }
  harness.expect_right(id);
}

TEST(HostContext, PlansInFlightFindThePagesThatGoToTheHost) {
  Limits limits = limits_of(1, 64);
  limits.max_chunk_rows = 8;
  Harness harness(limits);
  RequestArrived arrived = harness.arrival(text(1, 41), 8);
  arrived.context = ContextPlace::kHost;
  const RequestId id = harness.submit(arrived);
  int overlapping = 0;
  std::vector<PageId> table;  // entries, by block
  // Pages of entries that a plan's rows read or write on the device, and of which block.
  const auto pages_of = [&](const std::optional<Plan>& plan) {
    std::map<PageId, int64_t> out;
    if (!plan) return out;
    for (const TableWrite& write : plan->table_writes) {
      table.resize(static_cast<size_t>(write.first_block));
      for (size_t i = 0; i < write.pages.size(); i += 2) table.push_back(write.pages[i]);
    }
    for (const Span& span : plan->spans) {
      for (int64_t block = span.host_blocks; block * 4 < span.start + span.rows; ++block)
        out[table.at(static_cast<size_t>(block))] = block;
    }
    return out;
  };
  std::optional<Plan> last = harness.plan();
  std::map<PageId, int64_t> last_pages = pages_of(last);
  while (last) {
    const auto next = harness.plan();  // two in flight
    const std::map<PageId, int64_t> next_pages = pages_of(next);
    for (const auto& [page, block] : next_pages) {
      const auto named = last_pages.find(page);
      EXPECT_TRUE(named == last_pages.end() || named->second == block)
          << "page " << number(page) << " is handed out while a plan in flight names it";
    }
    if (next && !next->spans.empty() && !last->spans.empty() &&
        next->spans[0].host_blocks > last->spans[0].host_blocks)
      ++overlapping;
    harness.run_oldest();
    last = next ? next : harness.plan();
    last_pages = next ? next_pages : pages_of(last);
  }
  harness.expect_right(id);
  EXPECT_GT(overlapping, 0);
}

TEST(HostContext, AnAbandonedSpillLeavesThePagesWhereTheyAre) {
  Limits limits = limits_of(2, 64);
  limits.max_chunk_rows = 8;
  Harness harness(limits);
  const RequestId id = harness.submit(text(1, 201), 12, wish(kv::DecodeKind::kDcp, 2));
  int abandoned = 0, since = 0;
  while (abandoned < 3) {
    const auto plan = harness.plan();
    ASSERT_TRUE(plan.has_value());
    if (plan->spills.empty() || ++since % 6 != 0) {  // it runs alone for a while, and must not fail then
      harness.run_oldest();
      continue;
    }
    harness.execute(*plan, 3);
    harness.in_flight.clear();
    harness.feed(PlansAbandoned{});
    ++abandoned;
  }
  harness.run_all();
  harness.expect_right(id);
  expect_all_given_back(harness);
}

TEST(HostContext, ASuspectCarriesNoCopiesOfOthers) {
  Limits limits = limits_of(1, 64);
  limits.max_chunk_rows = 8;
  Harness harness(limits);
  const RequestId other = harness.submit(text(2, 5), 11);
  harness.step();
  const RequestId id = harness.submit(on_host(harness, text(1, 201), 4));
  auto plan = harness.plan();
  for (; plan && plan->spills.empty(); plan = harness.plan()) harness.run_oldest();
  ASSERT_TRUE(plan.has_value());
  ASSERT_EQ(plan->spans.size(), 2u);
  harness.in_flight.clear();
  harness.feed(PlansAbandoned{});
  plan = harness.plan();
  ASSERT_TRUE(plan.has_value());
  ASSERT_EQ(plan->spans.size(), 1u);
  EXPECT_EQ(plan->spans[0].request, other) << "it came first";
  EXPECT_TRUE(plan->spills.empty());
  harness.run_oldest();
  plan = harness.plan();
  ASSERT_TRUE(plan.has_value());
  EXPECT_FALSE(plan->spills.empty());
  for (const Span& span : plan->spans) EXPECT_EQ(span.request, id);
  harness.run_oldest();
  harness.run_all();
  harness.expect_right(other);
  harness.expect_right(id);
  expect_all_given_back(harness);
}

TEST(HostContext, TheNextOneLoadsIndexKeysAlone) {
  Harness harness(limits_of(4, 64));
  const RequestId first = harness.submit(text(1, 200), 2);
  harness.run_all();
  harness.expect_right(first);
  uint32_t seed = 90;
  for (const GroupingWish& grouping : wishes()) {
    const Counters before = harness.plane.counters();
    const RequestId again = harness.submit(joined(text(1, 200), text(++seed, 9)), 5, grouping);
    harness.run_all();
    harness.expect_right(again);
    EXPECT_EQ(harness.finished(again).cached_tokens, 200);
    const Counters after = harness.plane.counters();
    EXPECT_EQ(after.computed_prompt_tokens - before.computed_prompt_tokens, 9);
    EXPECT_EQ(after.host_hit_tokens - before.host_hit_tokens, 200);
    const bool split =
        grouping.index.kind == kv::IndexKind::kSplit || grouping.decode.kind == kv::DecodeKind::kDp;
    EXPECT_EQ(after.loaded_bytes - before.loaded_bytes, 50 * kKeyBytes * (split ? 1 : 4));
    expect_all_given_back(harness);
  }
}

// The last row runs again and is written nowhere; its block is on the host.
TEST(HostContext, AFullHitComputesItsLastRow) {
  Harness harness(limits_of(2, 64));
  harness.submit(text(1, 200), 2);
  harness.run_all();
  const RequestId again = harness.submit(text(1, 200), 6);
  harness.run_all();
  harness.expect_right(again);
  EXPECT_EQ(harness.finished(again).cached_tokens, 199);
}

TEST(HostContext, RequestsOnDevicesFindItsCopies) {
  Harness harness(limits_of(2, 64));
  RequestArrived arrived = harness.arrival(text(1, 24), 2);
  arrived.context = ContextPlace::kHost;
  harness.submit(arrived);
  harness.run_all();
  const RequestId again = harness.submit(joined(text(1, 24), text(80, 3)), 2);
  harness.run_all();
  harness.expect_right(again);
  EXPECT_EQ(harness.finished(again).cached_tokens, 24);
}

TEST(HostContext, RefusalsNameWhatIsMissing) {
  const auto refused = [](const Limits& limits, ContextPlace place, int64_t prompt, bool cached = true) {
    Harness harness(limits);
    RequestArrived arrived = harness.arrival(text(1, prompt), 4);
    arrived.context = place;
    arrived.use_prefix_cache = cached;
    const RequestId id = harness.submit(arrived);
    return harness.finished(id).error;
  };
  const auto has = [](const Error& failure, const std::string& part) {
    return failure.message.find(part) != std::string::npos;
  };
  const Limits usual = limits_of(1, 64);
  Error failure = refused(usual, ContextPlace::kDevice, 200);
  EXPECT_EQ(failure.code, ErrorCode::kTooLarge);
  EXPECT_FALSE(has(failure, "host")) << failure.message;
  Limits limits = limits_of(1, 30);
  failure = refused(limits, ContextPlace::kAuto, 200);
  EXPECT_EQ(failure.code, ErrorCode::kTooLarge);
  EXPECT_EQ(failure.field, "prompt");
  EXPECT_TRUE(has(failure, "50 blocks of the host pool, which has 30")) << failure.message;
  EXPECT_TRUE(has(failure, "entries on rank 0")) << failure.message;
  failure = refused(limits_of(1, 0), ContextPlace::kHost, 20);
  EXPECT_EQ(failure.code, ErrorCode::kFailedPrecondition);
  EXPECT_EQ(failure.field, "context");
  failure = refused(limits_of(1, 0), ContextPlace::kAuto, 200);
  EXPECT_EQ(failure.code, ErrorCode::kTooLarge);
  EXPECT_FALSE(has(failure, "host")) << failure.message;
  limits = usual;
  limits.index_topk = 0;
  failure = refused(limits, ContextPlace::kHost, 20);
  EXPECT_EQ(failure.code, ErrorCode::kUnsupported);
  EXPECT_EQ(failure.field, "context");
  failure = refused(usual, ContextPlace::kHost, 20, false);
  EXPECT_EQ(failure.code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(failure.field, "context");
  // Index keys and the hot buffer must fit the devices.
  limits = usual;
  limits.pool_pages[0][1] = 20;
  failure = refused(limits, ContextPlace::kHost, 200);
  EXPECT_EQ(failure.code, ErrorCode::kTooLarge);
  EXPECT_TRUE(has(failure, "pages of index keys on rank 0")) << failure.message;
  limits = usual;
  limits.hot_tokens = 48;
  failure = refused(limits, ContextPlace::kHost, 200);
  EXPECT_EQ(failure.code, ErrorCode::kTooLarge);
  EXPECT_TRUE(has(failure, "pages of entries on rank 0")) << failure.message;
}

// With a narrower window than usual it fits.
TEST(HostContext, TheWindowShrinksToWhatThereIs) {
  Limits limits = limits_of(1, 64);
  limits.hot_tokens = 40;  // ten of the twelve pages
  Harness harness(limits);
  const RequestId id = harness.submit(text(1, 120), 8);
  harness.run_all();
  harness.expect_right(id);
  expect_all_given_back(harness);
}

TEST(HostContext, RoomOnTheHostIsPromised) {
  Harness harness(limits_of(1, 60));
  const RequestId first = harness.submit(text(1, 120), 8);   // 31 blocks
  const RequestId second = harness.submit(text(2, 120), 8);  // as many: they do not fit together
  harness.step();
  EXPECT_EQ(harness.plane.waiting_count(), 1);
  // What fits on devices comes and goes meanwhile, and is written back where there is room.
  std::vector<RequestId> others;
  for (uint32_t seed = 10; seed < 14; ++seed) others.push_back(harness.submit(text(seed, 16), 2));
  while (!harness.outcome(first).finished) ASSERT_TRUE(harness.step());
  harness.expect_right(first);
  harness.run_all();
  harness.expect_right(second);
  for (const RequestId id : others) harness.expect_right(id);
  expect_all_given_back(harness);
}

TEST(HostContext, ItIsRegroupedBetweenAllGroupings) {
  for (const GroupingWish& before : wishes()) {
    for (const GroupingWish& after : wishes()) {
      Harness harness(limits_of(4, 64));
      const RequestId id = harness.submit(text(1, 180), 30, before);
      for (int round = 0; !harness.outcome(id).finished; ++round) {
        if (round % 5 == 3) {
          RegroupRequested event;
          event.command = static_cast<uint64_t>(round);
          event.request = id;
          event.has_decode = event.has_index = true;
          event.wish = round % 2 == 0 ? before : after;
          harness.feed(event);
          EXPECT_EQ(harness.regrouped.back().error.code, ErrorCode::kOk)
              << harness.regrouped.back().error.message;
        }
        ASSERT_TRUE(harness.step());
      }
      harness.expect_right(id);
      expect_all_given_back(harness);
    }
  }
}

// An answer that is not trusted leaves no copy that others could find; who read it goes on.
TEST(HostContext, WhatAFailedRequestComputedIsNotFound) {
  Harness harness(limits_of(1, 64));
  const RequestId failed = harness.submit(harness.arrival(text(1, 121), 9), 125);
  harness.run_all();
  ASSERT_EQ(harness.finished(failed).reason, FinishReason::kError);
  expect_all_given_back(harness);
  EXPECT_EQ(harness.plane.host_pool(kEntries).cached, 0);
  const RequestId again = harness.submit(text(1, 121), 4);
  harness.run_all();
  harness.expect_right(again);
  EXPECT_EQ(harness.finished(again).cached_tokens, 0);
}

// The whole host pool is needed while a plan still brings copies for somebody who has left: it waits for
// them.
TEST(HostContext, TheWholePoolIsWaitedForWhileSpillsAreOnTheirWay) {
  for (const bool abandoned : {false, true}) {
    Limits limits = limits_of(1, 50);
    limits.host_write = HostWrite::kThrough;
    Harness harness(limits);
    const RequestId left = harness.submit(text(9, 17), 6);
    ASSERT_TRUE(harness.step());
    const auto spills = harness.plan();
    ASSERT_TRUE(spills && !spills->spills.empty());
    harness.feed(CancelRequested{left});
    const RequestId id = harness.submit(text(1, 200), 1);  // all 50
    EXPECT_FALSE(harness.plan());
    EXPECT_EQ(harness.plane.waiting_count(), 1);
    if (abandoned) {
      harness.in_flight.clear();
      harness.feed(PlansAbandoned{});
    }
    while (!harness.in_flight.empty()) harness.run_oldest();
    harness.run_all();
    harness.expect_right(id);
    expect_all_given_back(harness);
  }
}

// Who lost its memory needs the room again that it had: no pin takes it meanwhile.
TEST(HostContext, NothingIsPinnedInTheRoomOfOneThatComesInAgain) {
  Harness harness(limits_of(2, 64));
  const RequestId first = harness.submit(on_host(harness, text(1, 121), 4));
  harness.run_all();
  harness.expect_right(first);
  const GroupingWish split = wish(kv::DecodeKind::kDcp, 2, kv::IndexKind::kSplit);
  const RequestId again = harness.submit(on_host(harness, text(2, 201), 40, split));  // 60 of 64
  while (harness.outcome(again).tokens.size() < 6) ASSERT_TRUE(harness.step());
  harness.workers.lose(0);
  harness.feed(MemoryLost{0});
  ASSERT_EQ(harness.plane.waiting_count(), 1);
  harness.feed(PinRequested{7, first});
  ASSERT_EQ(harness.pins.size(), 1u);
  EXPECT_NE(harness.pins[0].error.code, ErrorCode::kOk);
  harness.run_all();
  harness.expect_right(again);
  expect_all_given_back(harness);
}

// What a failed request computed cannot be found: a pin keeps no room for it.
TEST(HostContext, APinKeepsNoCopiesThatAreNotTrusted) {
  Harness harness(limits_of(1, 64));
  const RequestId failed = harness.submit(on_host(harness, text(1, 121), 20), 130);
  while (harness.outcome(failed).tokens.size() < 8) ASSERT_TRUE(harness.step());
  harness.feed(PinRequested{7, failed});
  ASSERT_EQ(harness.pins.at(0).error.code, ErrorCode::kOk);
  EXPECT_GT(harness.plane.pinned_host_blocks(), 20);
  harness.run_all();
  ASSERT_EQ(harness.finished(failed).reason, FinishReason::kError);
  EXPECT_EQ(harness.plane.pinned_host_blocks(), 0);
  expect_all_given_back(harness);
}

// Who read copies of a failed request goes on; but what it adds behind them nobody else may find.
TEST(HostContext, WhatLiesBehindCopiesThatAreNotTrustedIsNotFound) {
  Limits limits = limits_of(1, 200);
  limits.pool_pages[0] = {30, 200};
  Harness harness(limits);
  const RequestId failed = harness.submit(on_host(harness, text(1, 81), 60), 95);
  while (harness.outcome(failed).tokens.size() < 8) ASSERT_TRUE(harness.step());
  const RequestId reader = harness.submit(on_host(harness, text(1, 81), 100));
  while (!harness.outcome(failed).finished) ASSERT_TRUE(harness.step());
  ASSERT_FALSE(harness.outcome(reader).finished);
  harness.run_all();
  harness.expect_right(reader);
  EXPECT_EQ(harness.finished(reader).cached_tokens, 80);
  // One that computes all of it spills all of it.
  const auto& truth = harness.workers.truth(reader);
  const RequestId other =
      harness.submit(on_host(harness, {truth.tokens.begin(), truth.tokens.begin() + 161}, 2));
  size_t spilled = 0;
  while (const auto plan = harness.plan()) {
    spilled += plan->spills.size();
    harness.run_oldest();
  }
  harness.expect_right(other);
  EXPECT_EQ(harness.finished(other).cached_tokens, 0);
  EXPECT_EQ(spilled, 2 * 40u);
  expect_all_given_back(harness);
}

// Its index keys are its own: a request on devices has nothing to wait for.
TEST(HostContext, OthersDoNotWaitForWhatItLoads) {
  Limits limits = limits_of(1, 64);
  limits.pool_pages[0] = {40, 80};
  Harness harness(limits);
  harness.submit(on_host(harness, text(1, 81), 2));
  harness.run_all();
  const RequestId loading = harness.submit(on_host(harness, joined(text(1, 81), text(50, 9)), 2));
  ASSERT_TRUE(harness.plan());
  const RequestId other = harness.submit(joined(text(1, 81), text(60, 9)), 2);
  ASSERT_TRUE(harness.plan());
  EXPECT_EQ(harness.plane.waiting_count(), 0);
  while (!harness.in_flight.empty()) harness.run_oldest();
  harness.run_all();
  harness.expect_right(loading);
  harness.expect_right(other);
}

// While somebody still reads copies that are not trusted, another one keeps copies of its own.
TEST(HostContext, CopiesThatAreNotTrustedStandInNobodysWay) {
  Limits limits = limits_of(1, 140);
  limits.pool_pages[0] = {24, 140};
  Harness harness(limits);
  const auto on_host = [&](int64_t max_tokens, int64_t nan_row) {
    RequestArrived arrived = harness.arrival(text(1, 81), max_tokens);
    arrived.context = ContextPlace::kHost;
    return harness.submit(arrived, nan_row);
  };
  const RequestId failed = on_host(60, 100);
  while (harness.outcome(failed).tokens.size() < 8) ASSERT_TRUE(harness.step());
  const RequestId reader = on_host(50, -1);  // of its copies
  while (!harness.outcome(failed).finished) ASSERT_TRUE(harness.step());
  EXPECT_EQ(harness.finished(failed).reason, FinishReason::kError);
  ASSERT_FALSE(harness.outcome(reader).finished);
  harness.feed(PauseChanged{reader, true});  // it keeps them
  const RequestId other = on_host(6, -1);
  harness.run_all();
  harness.expect_right(other);
  EXPECT_EQ(harness.finished(other).cached_tokens, 0);
  harness.feed(PauseChanged{reader, false});
  harness.run_all();
  harness.expect_right(reader);
  EXPECT_EQ(harness.finished(reader).cached_tokens, 80);
  expect_all_given_back(harness);
}

TEST(HostContext, CancelledAtAnyStepItGivesBackEverything) {
  for (int steps = 0; steps < 60; ++steps) {
    Harness harness(limits_of(2, 64));
    const RequestId id = harness.submit(text(1, 150), 20, wish(kv::DecodeKind::kDcp, 2));
    for (int i = 0; i < steps; ++i) harness.step();
    harness.plan();
    if (harness.outcome(id).finished) break;
    harness.feed(CancelRequested{id});
    expect_all_given_back(harness);
  }
}

// ---- whatever happens -----------------------------------------------------------------------------------

class Scene {
 public:
  explicit Scene(uint64_t seed) : random_(seed), harness_(make_limits()) {}

  void run() {
    for (int event = 0; event < 150; ++event) act();
    for (const RequestId id : submitted_) harness_.feed(PauseChanged{id, false});
    unpin_all();
    for (int rounds = 0; !harness_.in_flight.empty() || harness_.step(); ++rounds) {
      ASSERT_LT(rounds, 20000);
      while (!harness_.in_flight.empty()) harness_.run_oldest();
    }
    harness_.pass_time(harness_.now);
    unpin_all();  // those that a change of workers held up
    for (const RequestId id : submitted_) {
      ASSERT_TRUE(harness_.outcome(id).finished) << number(id);
      const FinishedNotice& notice = harness_.finished(id);
      if (notice.reason == FinishReason::kCancelled) continue;
      if (notice.reason == FinishReason::kError && notice.error.code != ErrorCode::kNumerical) {
        // Its plan was abandoned when it ran alone, or it was late; or it was refused, for the ranks or the
        // pins there were, and had no token yet.
        const bool fails =
            notice.error.code == ErrorCode::kInternal || notice.error.code == ErrorCode::kDeadlineExceeded;
        const bool refused =
            harness_.outcome(id).tokens.empty() &&
            (notice.error.code == ErrorCode::kInvalidArgument || notice.error.code == ErrorCode::kTooLarge ||
             notice.error.code == ErrorCode::kResourceExhausted);
        EXPECT_TRUE(fails || refused) << notice.error.message;
        continue;
      }
      ++ended_;
      harness_.expect_right(id);
    }
    expect_all_given_back(harness_);
  }
  int64_t host_spans() const { return host_spans_; }
  int64_t ended() const { return ended_; }

 private:
  Limits make_limits() {
    Limits limits = limits_of(4, 20 + static_cast<int64_t>(random_.below(120)));
    limits.hot_tokens = static_cast<int64_t>(random_.below(20));
    limits.host_window = 1 + static_cast<int64_t>(random_.below(8));
    limits.host_write = random_.below(2) == 0 ? HostWrite::kBack : HostWrite::kThrough;
    limits.host_plan_bytes = static_cast<int64_t>(200 + random_.below(4000));
    limits.max_chunk_rows = static_cast<int64_t>(4 + random_.below(60));
    limits.table_count = 40;
    limits.copy_plan_bytes = static_cast<int64_t>(random_.below(2000));
    limits.eviction = random_.below(2) == 0 ? Eviction::kLru : Eviction::kReuse;
    limits.on_pressure = static_cast<OnPressure>(random_.below(3));
    limits.calm_plans = static_cast<int64_t>(1 + random_.below(20));
    return limits;
  }
  void submit() {
    if (harness_.plane.waiting_count() > 4) return;
    // A few beginnings that requests share.
    auto prompt =
        text(1 + static_cast<uint32_t>(random_.below(3)), static_cast<int64_t>(1 + random_.below(150)));
    prompt = joined(std::move(prompt), text(20 + static_cast<uint32_t>(random_.below(9)), 5));
    RequestArrived arrived = harness_.arrival(std::move(prompt), static_cast<int64_t>(1 + random_.below(30)),
                                              wishes()[random_.below(wishes().size())]);
    arrived.context = random_.below(3) == 0 ? ContextPlace::kHost : ContextPlace::kAuto;
    if (random_.below(4) == 0) arrived.speculation = {DraftSource::kLookup, 3, {}};
    arrived.priority = static_cast<int>(random_.below(3));
    if (random_.below(8) == 0) arrived.deadline = Duration(1 + static_cast<int64_t>(random_.below(60)));
    arrived.use_prefix_cache = random_.below(12) > 0;
    const int64_t row = std::ssize(arrived.prompt) - 1 + static_cast<int64_t>(random_.below(30));
    submitted_.push_back(harness_.submit(arrived, random_.below(8) == 0 ? row : -1));
  }
  RequestId any() { return submitted_[random_.below(submitted_.size())]; }
  void unpin_all() {
    for (const PinSnapshot& pin : harness_.plane.pins()) harness_.feed(UnpinRequested{0, pin.pin});
  }
  void pin() {
    const auto pins = harness_.plane.pins();
    if (pins.empty() || random_.below(2) == 0) return harness_.feed(PinRequested{++commands_, any()});
    harness_.feed(UnpinRequested{++commands_, pins[random_.below(pins.size())].pin});
  }
  void act() {
    harness_.now = harness_.now + Duration(1);
    const auto what = random_.below(106);
    if (submitted_.empty() || what < 8) return submit();
    if (what >= 100) return pin();
    if (what < 11) return harness_.feed(CancelRequested{any()});
    if (what < 20) {
      RegroupRequested event;
      event.request = any();
      event.has_decode = event.has_index = true;
      event.wish = wishes()[random_.below(wishes().size())];
      return harness_.feed(event);
    }
    if (what < 23) {
      if (harness_.in_flight.empty()) return;
      if (random_.below(2) == 0)
        harness_.execute(harness_.in_flight.front(), static_cast<int64_t>(random_.below(40)));
      harness_.in_flight.clear();
      return harness_.feed(PlansAbandoned{});
    }
    if (what < 25) {
      const int rank = static_cast<int>(random_.below(4));
      harness_.in_flight.clear();
      harness_.workers.lose(rank);
      return harness_.feed(MemoryLost{rank});
    }
    if (what < 29) return harness_.feed(PauseChanged{any(), random_.below(4) == 0});
    if (what < 32) {
      const int rank = static_cast<int>(random_.below(4));
      const bool joins = !harness_.plane.limits().active().contains(rank);
      const bool changing = changes_ > harness_.topologies.size();
      const bool gone = !joins && !changing && harness_.plane.limits().places() > 1 && random_.below(3) == 0;
      if (gone) harness_.in_flight.clear();
      ++changes_;
      return harness_.feed(TopologyRequested{++commands_, rank, joins, gone});
    }
    if (what < 66 || harness_.in_flight.empty()) {
      if (const auto plan = harness_.plan()) {
        for (const Span& span : plan->spans) host_spans_ += span.host_blocks > 0 ? 1 : 0;
      }
      return;
    }
    harness_.run_oldest();
  }

  SplitMix64 random_;
  Harness harness_;
  std::vector<RequestId> submitted_;
  uint64_t commands_ = 0;
  size_t changes_ = 0;
  int64_t host_spans_ = 0, ended_ = 0;
};

TEST(HostContext, WhateverHappensEveryByteIsRight) {
  int64_t host_spans = 0, ended = 0;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Scene scene(seed);
    try {
      scene.run();
    } catch (const std::exception& failure) {  // of the fake workers
      ADD_FAILURE() << failure.what();
    }
    host_spans += scene.host_spans();
    ended += scene.ended();
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(host_spans, 2000);
  EXPECT_GT(ended, 500);
}

}  // namespace
}  // namespace weft::controlplane
