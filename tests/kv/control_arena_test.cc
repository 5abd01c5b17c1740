// Goal: what one side writes into the control arena the other reads, in order and once; every wait ends for
// its reason, for an abort and for its timeout; broken use dies at once, a broken worker's leavings do not.
#include "kv/control_arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>

#include "proto/vocab/random.h"

namespace weft::kv {
namespace {

using namespace std::chrono_literals;
constexpr Duration kLong = 1h;
constexpr Epoch kEpoch{1};

std::vector<std::byte> as_bytes(const std::string& text) {
  const auto* data = reinterpret_cast<const std::byte*>(text.data());
  return {data, data + text.size()};
}
std::string as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// One daemon's arena and one worker's, of the same memory at two addresses.
class ControlArenaTest : public ::testing::Test {
 protected:
  static ControlLimits small() {
    ControlLimits limits;
    limits.rank_count = 3;
    limits.block_tokens = 64;
    limits.parts = 2;
    limits.table_count = 5;
    limits.table_blocks = 7;
    limits.host_parts = 1;
    limits.hot_pages = 2;
    limits.max_samples = 4;
    limits.plan_bytes_max = 100;
    limits.result_bytes_max = 50;
    return limits;
  }
  Mapping map() { return Mapping::map(memory_.get(), control_arena_bytes(small())).value(); }

  Descriptor memory_ = create_memory("control", control_arena_bytes(small())).value();
  ControlArena daemon_ = ControlArena::format(map(), small()).value();
  ControlArena worker_ = ControlArena::open(map()).value();
};

TEST_F(ControlArenaTest, OpenReadsTheLimits) {
  EXPECT_EQ(worker_.limits().rank_count, 3);
  EXPECT_EQ(worker_.limits().table_blocks, 7);
  EXPECT_EQ(worker_.limits().result_bytes_max, 50);
}

TEST_F(ControlArenaTest, RefusesWhatIsNoArena) {
  const size_t bytes = control_arena_bytes(small());
  const Descriptor zeros = create_memory("zeros", bytes).value();
  EXPECT_EQ(ControlArena::open(Mapping::map(zeros.get(), bytes).value()).error().code,
            ErrorCode::kBadMessage);
  EXPECT_EQ(ControlArena::open(Mapping::map(zeros.get(), 16).value()).error().code, ErrorCode::kBadMessage);
  EXPECT_EQ(ControlArena::open(Mapping::map(memory_.get(), bytes - 1).value()).error().code,
            ErrorCode::kBadMessage);
  EXPECT_EQ(ControlArena::format(Mapping::map(zeros.get(), bytes - 1).value(), small()).error().code,
            ErrorCode::kInvalidArgument);
  ControlLimits limits = small();
  limits.rank_count = kMaxRanks + 1;
  const auto refused = ControlArena::format(Mapping::map(zeros.get(), bytes).value(), limits);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(refused.error().field, "rank_count");
}

// ---- plans

TEST_F(ControlArenaTest, PlansArriveInOrderAtEveryRank) {
  constexpr uint32_t kPlans = 2000;
  std::atomic<int> wrong{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      ControlArena arena = ControlArena::open(map()).value();
      for (uint32_t sequence = 0; sequence < kPlans; ++sequence) {
        const auto plan = arena.wait_plan(sequence, kEpoch, kLong);
        if (!plan || plan->epoch != kEpoch || as_text(plan->bytes) != "plan " + std::to_string(sequence))
          ++wrong;
        arena.plan_read(rank, sequence + 1);
        if (!arena.publish_result(rank, as_bytes(std::to_string(sequence)), kLong)) ++wrong;
      }
    });
  }
  // At most two in flight, as the daemon does it.
  std::vector<uint32_t> acknowledged(3, 0);
  for (uint32_t published = 0; *std::min_element(acknowledged.begin(), acknowledged.end()) < kPlans;) {
    const uint32_t slowest = *std::min_element(acknowledged.begin(), acknowledged.end());
    if (published < kPlans && published - slowest < 2) {
      daemon_.publish_plan(kEpoch, as_bytes("plan " + std::to_string(published++)));
      continue;
    }
    const auto behind =
        static_cast<int>(std::min_element(acknowledged.begin(), acknowledged.end()) - acknowledged.begin());
    const auto& written = daemon_.rank_state(behind).results_written;
    futex_wait(written, acknowledged[static_cast<size_t>(behind)], kLong);
    while (const auto result = daemon_.take_result(behind)) {
      EXPECT_EQ(as_text(*result), std::to_string(acknowledged[static_cast<size_t>(behind)]++));
    }
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(ControlArenaTest, PlanWaitEndsByTimeoutAndByAbort) {
  EXPECT_FALSE(worker_.wait_plan(0, kEpoch, 1ms).has_value());
  std::thread waiter([&] { EXPECT_FALSE(worker_.wait_plan(0, kEpoch, kLong).has_value()); });
  daemon_.abort_epoch(kEpoch);
  waiter.join();
  // A plan of an epoch that was given up is not run; the next epoch's is.
  daemon_.publish_plan(kEpoch, as_bytes("old"));
  EXPECT_FALSE(worker_.wait_plan(0, kEpoch, kLong).has_value());
  daemon_.publish_plan(Epoch{2}, as_bytes("new"));
  EXPECT_EQ(as_text(worker_.wait_plan(1, Epoch{2}, kLong)->bytes), "new");
}

TEST_F(ControlArenaTest, AbortIsOfOneEpochAndAllBefore) {
  EXPECT_FALSE(worker_.aborted(kEpoch));
  daemon_.abort_epoch(Epoch{3});
  EXPECT_TRUE(worker_.aborted(kEpoch));
  EXPECT_TRUE(worker_.aborted(Epoch{3}));
  EXPECT_FALSE(worker_.aborted(Epoch{4}));
  daemon_.abort_epoch(Epoch{2});  // late: changes nothing
  EXPECT_TRUE(worker_.aborted(Epoch{3}));
  EXPECT_FALSE(worker_.aborted(Epoch{4}));
}

TEST_F(ControlArenaTest, PublishingOverAnUnreadPlanDies) {
  for (int i = 0; i < kPlanCells; ++i) daemon_.publish_plan(kEpoch, as_bytes("x"));
  worker_.plan_read(0, 1);
  worker_.plan_read(1, 1);
  EXPECT_DEATH(daemon_.publish_plan(kEpoch, as_bytes("x")), "rank 2 has yet to read plan 0");
  worker_.plan_read(2, 1);
  daemon_.publish_plan(kEpoch, as_bytes("x"));
  EXPECT_DEATH(daemon_.publish_plan(kEpoch, as_bytes("x")), "yet to read plan 1");
  daemon_.abort_epoch(kEpoch);  // then nobody reads them any more
  for (int i = 0; i < 4; ++i) daemon_.publish_plan(Epoch{2}, as_bytes("y"));
  EXPECT_DEATH(daemon_.publish_plan(Epoch{2}, std::vector<std::byte>(101)), "101 against 100");
}

// ---- results

TEST_F(ControlArenaTest, ResultsOfOneRankWaitForRoom) {
  for (int i = 0; i < kResultCells; ++i)
    ASSERT_TRUE(worker_.publish_result(1, as_bytes(std::to_string(i)), 0ms));
  EXPECT_FALSE(worker_.publish_result(1, as_bytes("full"), 1ms));
  EXPECT_TRUE(worker_.publish_result(2, {}, 0ms));  // another rank has its own
  std::thread writer([&] { EXPECT_TRUE(worker_.publish_result(1, as_bytes("8"), kLong)); });
  EXPECT_EQ(as_text(daemon_.take_result(1).value()), "0");
  writer.join();
  for (int i = 1; i <= kResultCells; ++i)
    EXPECT_EQ(as_text(daemon_.take_result(1).value()), std::to_string(i));
  EXPECT_FALSE(daemon_.take_result(1).has_value());
  EXPECT_EQ(daemon_.take_result(2).value().size(), 0u);
  EXPECT_FALSE(daemon_.take_result(0).has_value());
}

TEST_F(ControlArenaTest, ABrokenResultRingIsSkipped) {
  worker_.rank_state(0).results_written.store(1'000'000);
  EXPECT_EQ(daemon_.take_result(0).value().size(), 0u);
  EXPECT_FALSE(daemon_.take_result(0).has_value());
  ASSERT_TRUE(worker_.publish_result(0, as_bytes("again"), 0ms));
  EXPECT_EQ(as_text(daemon_.take_result(0).value()), "again");
}

// ---- tokens

TEST_F(ControlArenaTest, TokensBelongToTheirStep) {
  EXPECT_FALSE(worker_.read_token(StepId{9}, 2).has_value());
  worker_.write_token(StepId{9}, 2, 4711);
  EXPECT_EQ(daemon_.read_token(StepId{9}, 2), 4711u);
  EXPECT_FALSE(daemon_.read_token(StepId{9}, 1).has_value());
  EXPECT_FALSE(daemon_.read_token(StepId{9 + kTokenSteps}, 2).has_value());
  worker_.write_token(StepId{9 + kTokenSteps}, 2, 0);
  EXPECT_FALSE(daemon_.read_token(StepId{9}, 2).has_value());
  EXPECT_EQ(daemon_.read_token(StepId{9 + kTokenSteps}, 2), 0u);
  worker_.write_token(StepId{(uint64_t{1} << 32) + 3}, 0, 0xffffffff);
  EXPECT_EQ(daemon_.read_token(StepId{(uint64_t{1} << 32) + 3}, 0), 0xffffffffu);
  EXPECT_DEATH(worker_.write_token(StepId{9}, 4, 0), "4 against 4");
}

TEST_F(ControlArenaTest, TokensPassFromRankToRank) {
  // Each of three ranks in turn samples a token made from the one before.
  constexpr uint64_t kSteps = 3000;
  auto token_of = [](uint64_t step, uint32_t before) { return static_cast<uint32_t>(mix64(step ^ before)); };
  std::vector<std::thread> ranks;
  worker_.write_token(StepId{1}, 3, 5);
  for (uint64_t rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      ControlArena arena = ControlArena::open(map()).value();
      for (uint64_t step = 2; step <= kSteps; ++step) {
        if (step % 3 != rank) continue;
        const auto before = arena.wait_token(StepId{step - 1}, 3, kEpoch, kLong);
        arena.write_token(StepId{step}, 3, token_of(step, before.value()));
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  uint32_t expected = 5;
  for (uint64_t step = 2; step <= kSteps; ++step) expected = token_of(step, expected);
  EXPECT_EQ(daemon_.read_token(StepId{kSteps}, 3), expected);
}

TEST_F(ControlArenaTest, TokenWaitEndsByTimeoutAndByAbort) {
  EXPECT_FALSE(worker_.wait_token(StepId{1}, 0, kEpoch, 1ms).has_value());
  std::thread waiter([&] { EXPECT_FALSE(worker_.wait_token(StepId{1}, 0, kEpoch, kLong).has_value()); });
  daemon_.abort_epoch(kEpoch);
  waiter.join();
}

// ---- tables and ranks

PageId page_of(uint32_t table, uint32_t block, uint32_t part, uint32_t rank) {
  return PageId{table << 24 | block << 16 | part << 8 | rank};
}

TEST_F(ControlArenaTest, TablesDoNotOverlap) {
  for (uint32_t id = 0; id < 5; ++id) {
    std::vector<PageId> pages;
    for (uint32_t block = 0; block < 7; ++block) {
      for (uint32_t part = 0; part < 2; ++part) {
        for (uint32_t rank = 0; rank < 3; ++rank) pages.push_back(page_of(id, block, part, rank));
      }
    }
    daemon_.write_table(TableId{id}, 0, std::span(pages).first(2 * 6));
    daemon_.write_table(TableId{id}, 2, std::span(pages).subspan(2 * 6));
    daemon_.set_table_version(TableId{id}, id + 100);
  }
  const ControlArena& reader = worker_;
  for (uint32_t id = 0; id < 5; ++id) {
    EXPECT_EQ(reader.table_version(TableId{id}), id + 100);
    for (uint32_t block = 0; block < 7; ++block) {
      for (uint32_t part = 0; part < 2; ++part) {
        const auto pages = reader.pages(TableId{id}, block, static_cast<int>(part));
        ASSERT_EQ(pages.size(), 3u);
        for (uint32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(pages[rank], page_of(id, block, part, rank));
      }
    }
  }
  const std::vector<PageId> two_blocks(2 * 6, kNoPage);
  EXPECT_DEATH(daemon_.write_table(TableId{5}, 0, two_blocks), "5 against 5");
  EXPECT_DEATH(daemon_.write_table(TableId{4}, 6, two_blocks), "8 against 7");
  EXPECT_DEATH((void)worker_.pages(TableId{4}, 7, 0), "7 against 7");
  EXPECT_DEATH((void)worker_.pages(TableId{4}, 6, 2), "part 2");
  EXPECT_DEATH((void)daemon_.rank_state(3), "rank 3");
}

TEST_F(ControlArenaTest, HostTablesDoNotOverlap) {
  for (uint32_t id = 0; id < 5; ++id) {
    std::vector<PageId> pages, hot;
    for (uint32_t block = 0; block < 7; ++block) pages.push_back(PageId{id * 100 + block});
    for (uint32_t i = 0; i < 6; ++i) hot.push_back(PageId{id * 100 + 50 + i});
    hot[5] = kNoPage;  // the last rank has one page only
    daemon_.write_host_table(TableId{id}, 0, std::span(pages).first(3));
    daemon_.write_host_table(TableId{id}, 3, std::span(pages).subspan(3));
    daemon_.write_hot_pages(TableId{id}, hot);
  }
  for (uint32_t id = 0; id < 5; ++id) {
    for (uint32_t block = 0; block < 7; ++block)
      EXPECT_EQ(worker_.host_page(TableId{id}, block, 0), PageId{id * 100 + block});
    const auto hot = [&](uint32_t i) { return PageId{id * 100 + 50 + i}; };
    EXPECT_EQ(worker_.hot_pages(TableId{id}, 0), (std::vector<PageId>{hot(0), hot(3)}));
    EXPECT_EQ(worker_.hot_pages(TableId{id}, 2), std::vector<PageId>{hot(2)});
  }
  daemon_.write_hot_pages(TableId{1}, {});
  EXPECT_TRUE(worker_.hot_pages(TableId{1}, 0).empty()) << "what an earlier table had";
  EXPECT_FALSE(worker_.hot_pages(TableId{2}, 0).empty());
  const std::vector<PageId> two(2, kNoPage);
  EXPECT_DEATH(daemon_.write_host_table(TableId{4}, 6, two), "");
  EXPECT_DEATH((void)worker_.host_page(TableId{4}, 7, 0), "block 7");
}

TEST_F(ControlArenaTest, PartsAreApart) {
  // Everything that has a place of its own, written full: nothing else changes.
  for (int rank = 0; rank < 3; ++rank) {
    std::memset(static_cast<void*>(&worker_.rank_state(rank)), 0x55, sizeof(RankState));
    worker_.rank_state(rank).results_written.store(0);
    worker_.rank_state(rank).results_read.store(0);
    worker_.rank_state(rank).plans_read.store(0);
    worker_.exchange_flag(rank).published.store(0x66666666);
  }
  for (uint32_t sample = 0; sample < 4; ++sample) {
    for (uint64_t step = 1; step <= kTokenSteps; ++step)
      worker_.write_token(StepId{step}, sample, 0x77777777);
  }
  for (int i = 0; i < kPlanCells; ++i)
    daemon_.publish_plan(kEpoch, std::vector<std::byte>(100, std::byte{0x88}));
  for (int rank = 0; rank < 3; ++rank) {
    for (int i = 0; i < kResultCells; ++i)
      worker_.publish_result(rank, std::vector<std::byte>(50, std::byte(rank)), 0ms);
  }
  EXPECT_EQ(daemon_.rank_state(2).layer.load(), 0x55555555u);
  EXPECT_EQ(daemon_.exchange_flag(1).published.load(), 0x66666666u);
  EXPECT_EQ(daemon_.read_token(StepId{kTokenSteps}, 3), 0x77777777u);
  for (uint32_t i = 0; i < kPlanCells; ++i) {
    EXPECT_EQ(as_text(worker_.wait_plan(i, kEpoch, 0ms)->bytes), std::string(100, '\x88'));
  }
  for (int rank = 0; rank < 3; ++rank) {
    for (int i = 0; i < kResultCells; ++i) {
      EXPECT_EQ(daemon_.take_result(rank).value(), std::vector<std::byte>(50, std::byte(rank)));
    }
  }
  for (uint32_t id = 0; id < 5; ++id) {
    EXPECT_EQ(daemon_.table_version(TableId{id}), 0u);
    EXPECT_EQ(worker_.pages(TableId{id}, 6, 1)[2], PageId{0});
  }
}

}  // namespace
}  // namespace weft::kv
