// Goal: a hot buffer has exactly what was used last, never gives one slot to two entries, and takes none from
// an entry that the same step reads. Method: the same random uses of a list that is walked from end to end.
#include "worker/model/hot_buffer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <list>
#include <set>

#include "proto/vocab/random.h"

namespace weft::worker {
namespace {

// (position, slot), the latest use first.
class SlowBuffer {
 public:
  explicit SlowBuffer(int64_t slots) : slots_(slots) {}

  struct Used {
    int64_t hits = 0;
    std::set<int32_t> placed;
  };
  Used use(const std::vector<int32_t>& positions) {
    Used out;
    for (const int32_t position : positions) {
      const auto found = std::find(order_.begin(), order_.end(), position);
      if (found == order_.end()) continue;
      order_.splice(order_.begin(), order_, found);
      ++out.hits;
    }
    for (const int32_t position : positions) {
      if (std::find(order_.begin(), order_.end(), position) != order_.end()) continue;
      if (std::ssize(order_) == slots_) {
        if (std::find(positions.begin(), positions.end(), order_.back()) != positions.end()) break;
        order_.pop_back();
      }
      order_.push_front(position);
      out.placed.insert(position);
    }
    return out;
  }
  const std::list<int32_t>& order() const { return order_; }

 private:
  int64_t slots_;
  std::list<int32_t> order_;
};

void check_uses(uint64_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  SplitMix64 random(seed);
  const int64_t slots = 1 + static_cast<int64_t>(random.below(24));
  const auto range = 1 + random.below(80);
  HotBuffer buffer(3, slots);
  std::vector<SlowBuffer> slow(3, SlowBuffer(slots));
  for (int step = 0; step < 200; ++step) {
    const auto layer = random.below(3);
    std::set<int32_t> chosen;
    for (auto n = random.below(40); n > 0; --n) chosen.insert(static_cast<int32_t>(random.below(range)));
    const std::vector<int32_t> positions(chosen.begin(), chosen.end());
    std::vector<HotBuffer::Miss> misses;
    const int64_t hits = buffer.use(static_cast<int64_t>(layer), positions, misses);
    const SlowBuffer::Used expected = slow[layer].use(positions);
    ASSERT_EQ(hits, expected.hits) << "step " << step;
    std::set<int32_t> placed;
    for (const HotBuffer::Miss& miss : misses) placed.insert(miss.position);
    ASSERT_EQ(placed, expected.placed) << "step " << step;
    std::set<int32_t> there(slow[layer].order().begin(), slow[layer].order().end()), taken;
    for (int32_t position = 0; position < static_cast<int32_t>(range); ++position) {
      const int32_t slot = buffer.slot_of(static_cast<int64_t>(layer), position);
      ASSERT_EQ(slot >= 0, there.contains(position)) << "step " << step << ", position " << position;
      if (slot < 0) continue;
      ASSERT_LT(slot, slots);
      ASSERT_TRUE(taken.insert(slot).second) << "step " << step << ": slot " << slot << " twice";
    }
    for (const HotBuffer::Miss& miss : misses)
      ASSERT_EQ(buffer.slot_of(static_cast<int64_t>(layer), miss.position), miss.slot);
  }
}

TEST(HotBuffer, HasWhatWasUsedLast) {
  for (uint64_t seed = 1; seed <= 300; ++seed) check_uses(seed);
}

TEST(HotBuffers, ForgetAnotherVersionOfATable) {
  HotBuffers buffers;
  std::vector<HotBuffer::Miss> misses;
  const std::vector<int32_t> positions{1, 2};
  buffers.of(TableId{3}, 1, 2, 4).use(0, positions, misses);
  EXPECT_GE(buffers.of(TableId{3}, 1, 2, 4).slot_of(0, 1), 0);
  EXPECT_EQ(buffers.of(TableId{4}, 1, 2, 4).slot_of(0, 1), -1);
  EXPECT_EQ(buffers.of(TableId{3}, 2, 2, 8).slot_of(0, 1), -1);
}

// A repeated plan may name a table whose successor has used the same pages since.
TEST(HotBuffers, KnowNothingInANewEpoch) {
  HotBuffers buffers;
  std::vector<HotBuffer::Miss> misses;
  const std::vector<int32_t> positions{1};
  buffers.sweep(Epoch{4});
  buffers.of(TableId{0}, 1, 1, 4).use(0, positions, misses);
  buffers.sweep(Epoch{4});
  EXPECT_GE(buffers.of(TableId{0}, 1, 1, 4).slot_of(0, 1), 0);
  buffers.sweep(Epoch{5});
  EXPECT_EQ(buffers.of(TableId{0}, 1, 1, 4).slot_of(0, 1), -1);
}

TEST(HotBuffers, DropWhatNoStepAskedFor) {
  HotBuffers buffers;
  buffers.sweep(Epoch{1});
  std::vector<HotBuffer::Miss> misses;
  const std::vector<int32_t> positions{1};
  buffers.of(TableId{0}, 1, 1, 4).use(0, positions, misses);
  for (int step = 0; step < 2000; ++step) {
    buffers.sweep(Epoch{1});
    if (step < 1000) (void)buffers.of(TableId{1}, 1, 1, 4);
  }
  EXPECT_EQ(buffers.of(TableId{0}, 1, 1, 4).slot_of(0, 1), -1);
}

}  // namespace
}  // namespace weft::worker
