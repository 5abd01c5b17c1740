// Goal: a layer is there when wait_layer() says so and not before; a job that is left touches nothing any
// more. Method: the mover's own question whether the step was aborted is asked between pieces: a gate in it
// holds the mover where the test wants it.
#include "worker/page_mover.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>

namespace weft::worker {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kLayers = 4;
constexpr int64_t kPages = 3;

struct World {
  kv::CacheGeometry geometry;
  std::vector<std::byte> own_memory, host_memory;
  kv::PagePool own, host;

  World() {
    geometry.block_tokens = 64;
    geometry.streams[0] = {kLayers, 1152, 1};  // 72 KiB a layer: one at a time
    geometry.streams[1] = {2, 132, 1};         // 8 KiB: both at once
    const kv::PoolPages pages{kPages, kPages};
    own_memory.assign(kv::pool_bytes(geometry, pages), std::byte{0xff});
    host_memory.resize(own_memory.size());
    for (size_t i = 0; i < host_memory.size(); ++i)
      host_memory[i] = static_cast<std::byte>(i * 31 + i / 4096);
    own = kv::PagePool(own_memory.data(), geometry, pages);
    host = kv::PagePool(host_memory.data(), geometry, pages);
  }
  MoverSetup setup() const { return {{own}, host, {0, 1, 0, 1}, {}}; }
  bool same(kv::Stream stream, PageId page, PageId host_page, int64_t layer) const {
    return std::memcmp(own.layer(stream, page, layer), host.layer(stream, host_page, layer),
                       static_cast<size_t>(geometry.layer_bytes(stream))) == 0;
  }
};

const std::vector<HostMove> kLoads = {{kv::Stream::kEntries, PageId{0}, PageId{2}},
                                      {kv::Stream::kIndexKeys, PageId{2}, PageId{0}},
                                      {kv::Stream::kEntries, PageId{2}, PageId{1}}};

// Lets the mover ask so many times, then holds it until it is opened.
class Gate {
 public:
  explicit Gate(int free) : free_(free) {}
  bool operator()() {
    std::unique_lock lock(mutex_);
    if (free_-- > 0) return false;
    opened_.wait(lock, [&] { return open_; });
    return answer_;
  }
  void open(bool answer) {
    const std::lock_guard lock(mutex_);
    open_ = true;
    answer_ = answer;
    opened_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  int free_;
  bool open_ = false, answer_ = false;
};

TEST(PageMover, SmallLayersGoTogether) {
  const World world;
  EXPECT_EQ(layers_at_once(world.geometry, kv::Stream::kEntries), 1);
  EXPECT_EQ(layers_at_once(world.geometry, kv::Stream::kIndexKeys), 8);
}

TEST(PageMover, ALayerIsThereBeforeTheNextOnesAre) {
  World world;
  auto gate = std::make_shared<Gate>(3);  // entries of layers 0 and 1, index keys of layer 1
  PageMover mover(world.setup());
  mover.start(kLoads, {}, [gate] { return (*gate)(); });
  ASSERT_TRUE(mover.wait_layer(1, 60s));
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_EQ(world.same(kv::Stream::kEntries, PageId{0}, PageId{2}, layer), layer < 2) << layer;
    EXPECT_EQ(world.same(kv::Stream::kEntries, PageId{2}, PageId{1}, layer), layer < 2) << layer;
  }
  for (int64_t layer = 0; layer < 2; ++layer) {
    EXPECT_TRUE(world.same(kv::Stream::kIndexKeys, PageId{2}, PageId{0}, layer));
  }
  const auto late = mover.wait_layer(2, 1ms);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code, ErrorCode::kDeadlineExceeded);
  EXPECT_NE(late.error().message.find("layer 2"), std::string::npos) << late.error().message;
  gate->open(false);
  ASSERT_TRUE(mover.finish(60s));
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    EXPECT_TRUE(world.same(kv::Stream::kEntries, PageId{0}, PageId{2}, layer));
  }
}

TEST(PageMover, AnAbortedJobEndsInTheMiddleAndTheNextRunsWhole) {
  World world;
  auto gate = std::make_shared<Gate>(1);
  PageMover mover(world.setup());
  mover.start(kLoads, {}, [gate] { return (*gate)(); });
  ASSERT_TRUE(mover.wait_layer(0, 60s));
  gate->open(true);
  const auto left = mover.finish(60s);
  ASSERT_FALSE(left);
  EXPECT_EQ(left.error().code, ErrorCode::kCancelled);
  mover.stop();
  EXPECT_FALSE(world.same(kv::Stream::kEntries, PageId{0}, PageId{2}, 1));
  // What it was to write is the daemon's again.
  const std::vector<std::byte> before = world.own_memory;
  mover.start({}, {}, [] { return false; });
  ASSERT_TRUE(mover.finish(60s));
  EXPECT_EQ(world.own_memory, before);
  mover.start(kLoads, {}, [] { return false; });
  ASSERT_TRUE(mover.finish(60s));
  EXPECT_TRUE(world.same(kv::Stream::kEntries, PageId{2}, PageId{1}, kLayers - 1));
}

TEST(PageMover, AStoppedJobTouchesNothingAfterwards) {
  World world;
  PageMover mover(world.setup());
  for (int round = 0; round < 200; ++round) {
    std::fill(world.own_memory.begin(), world.own_memory.end(), std::byte{0xff});
    mover.start(kLoads, {}, [] { return false; });
    if (round % 2 == 0) {
      ASSERT_TRUE(mover.wait_layer(round % kLayers, 60s));
    }
    mover.stop();
    const std::vector<std::byte> left = world.own_memory;
    std::this_thread::yield();
    ASSERT_EQ(world.own_memory, left);
  }
}

TEST(PageMover, SpillsWhatItThenLoads) {
  World world;
  std::memcpy(world.own_memory.data(), world.host_memory.data(), world.own_memory.size());
  const std::vector<std::byte> truth = world.own_memory;
  std::fill(world.host_memory.begin(), world.host_memory.end(), std::byte{0});
  PageMover mover(world.setup());
  std::vector<HostMove> moves;
  for (const kv::Stream stream : kv::kAllStreams) {
    for (uint32_t page = 0; page < kPages; ++page) moves.push_back({stream, PageId{page}, PageId{2 - page}});
  }
  mover.start({}, moves, [] { return false; });
  EXPECT_TRUE(mover.wait_layer(kLayers - 1, 60s));  // there are no loads to wait for
  ASSERT_TRUE(mover.finish(60s));
  std::fill(world.own_memory.begin(), world.own_memory.end(), std::byte{0xff});
  mover.start(moves, {}, [] { return false; });
  ASSERT_TRUE(mover.finish(60s));
  EXPECT_EQ(world.own_memory, truth);
}

}  // namespace
}  // namespace weft::worker
