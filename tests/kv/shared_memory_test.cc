// Goal: shared memory keeps its size, is really shared, and refuses what does not fit; futex waits end for a
// changed word, a wake and a timeout.
#include "kv/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <thread>

namespace weft::kv {
namespace {

TEST(SharedMemory, IsZeroAndSharedBetweenMappings) {
  const Descriptor memory = create_memory("test", 10'000).value();
  const Mapping one = Mapping::map(memory.get(), 10'000).value();
  const Mapping two = Mapping::map(memory.get(), 10'000).value();
  for (size_t i = 0; i < 10'000; ++i) ASSERT_EQ(one.data()[i], std::byte{0});
  one.data()[9'999] = std::byte{7};
  EXPECT_EQ(two.data()[9'999], std::byte{7});
}

TEST(SharedMemory, SizeIsSealed) {
  const Descriptor memory = create_memory("test", 4096).value();
  EXPECT_NE(::ftruncate(memory.get(), 0), 0);
  EXPECT_NE(::ftruncate(memory.get(), 8192), 0);
}

TEST(SharedMemory, RefusesAMappingLargerThanTheMemory) {
  const Descriptor memory = create_memory("test", 4096).value();
  const auto mapping = Mapping::map(memory.get(), 4097);
  ASSERT_FALSE(mapping.has_value());
  EXPECT_EQ(mapping.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(Mapping::map(-1, 1).error().code, ErrorCode::kIo);
}

TEST(SharedMemory, ZeroBytes) {
  const Descriptor memory = create_memory("test", 0).value();
  const Mapping mapping = Mapping::map(memory.get(), 0).value();
  EXPECT_EQ(mapping.bytes(), 0u);
  EXPECT_TRUE(touch_pages(mapping.data(), 0).has_value());
}

TEST(SharedMemory, TouchingChangesNothing) {
  const size_t bytes = 1 << 20;
  const Descriptor memory = create_memory("test", bytes).value();
  const Mapping mapping = Mapping::map(memory.get(), bytes).value();
  for (size_t i = 0; i < bytes; i += 1000) mapping.data()[i] = std::byte(i % 251);
  ASSERT_TRUE(touch_pages(mapping.data(), bytes).has_value());
  for (size_t i = 0; i < bytes; ++i)
    ASSERT_EQ(mapping.data()[i], i % 1000 == 0 ? std::byte(i % 251) : std::byte{0});
}

TEST(SharedMemory, MovingLeavesOneOwner) {
  Descriptor memory = create_memory("test", 4096).value();
  const int fd = memory.get();
  Descriptor other = std::move(memory);
  EXPECT_FALSE(memory.valid());  // NOLINT(bugprone-use-after-move): that is the test
  other = Descriptor();
  EXPECT_EQ(::fcntl(fd, F_GETFD), -1);
}

class Futex : public ::testing::Test {
 protected:
  Futex() {
    memory_ = create_memory("futex", 4096).value();
    mapping_ = Mapping::map(memory_.get(), 4096).value();
    word_ = new (mapping_.data()) std::atomic<uint32_t>{0};
  }
  Descriptor memory_;
  Mapping mapping_;
  std::atomic<uint32_t>* word_;
};

TEST_F(Futex, ReturnsForAnotherValueAndForTimeouts) {
  futex_wait(*word_, 1, std::chrono::hours(1));
  futex_wait(*word_, 0, std::chrono::milliseconds(1));
  futex_wait(*word_, 0, Duration::zero());
  futex_wait(*word_, 0, Duration(-1));
}

TEST_F(Futex, WakesAThread) {
  std::thread waiter([&] {
    while (word_->load() == 0) futex_wait(*word_, 0, std::chrono::hours(1));
  });
  word_->store(1);
  futex_wake(*word_);
  waiter.join();
}

TEST_F(Futex, WakesAnotherProcess) {
  const pid_t child = ::fork();
  if (child == 0) {
    const auto mapping = Mapping::map(memory_.get(), 4096);  // at another address
    auto* word = reinterpret_cast<std::atomic<uint32_t>*>(mapping.value().data());
    while (word->load() == 0) futex_wait(*word, 0, std::chrono::hours(1));
    ::_exit(0);
  }
  word_->store(1);
  futex_wake(*word_);
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace weft::kv
