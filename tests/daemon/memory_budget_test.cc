// Arenas that do not fit the memory at hand are refused with the numbers, by the part that is too large.
#include "daemon/memory_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "proto/vocab/units.h"

namespace weft::daemon {
namespace {

// Four ranks with pools of 4 MiB: blocks of 8 tokens, two layers of 256 bytes, 1024 pages.
ArenaSizes sizes() {
  ArenaSizes sizes;
  sizes.weight_bytes = 3 * kMiB;
  sizes.mailbox_bytes = kMiB;
  sizes.geometry.block_tokens = 8;
  sizes.geometry.streams[0] = {2, 256};
  sizes.pool_pages.assign(4, {1024, 0});
  return sizes;
}

// The least that must be available for so much to be usable.
int64_t available_for(int64_t bytes) {
  int64_t available = bytes;
  while (usable_memory(available) < bytes) ++available;
  return available;
}

TEST(MemoryBudget, KeepsASixteenthFree) {
  EXPECT_EQ(usable_memory(16 * kGiB), 15 * kGiB);
  EXPECT_EQ(available_for(15 * kMiB), 16 * kMiB - 1);
  EXPECT_GT(usable_memory(std::numeric_limits<int64_t>::max()), int64_t{1} << 62);
}

TEST(MemoryBudget, FitsToTheByte) {
  ArenaSizes all = sizes();
  const int64_t pools = 4 * static_cast<int64_t>(kv::pool_bytes(all.geometry, all.pool_pages[0]));
  ASSERT_GE(pools, 16 * kMiB);
  EXPECT_TRUE(check_fits_memory(all, "--pool-tokens", available_for(pools + 7 * kMiB)).has_value());
  const auto refused = check_fits_memory(all, "--pool-tokens", available_for(pools + 7 * kMiB) - 1);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kResourceExhausted);
  EXPECT_EQ(refused.error().field, "--pool-tokens");
  EXPECT_THAT(refused.error().message, testing::HasSubstr("4.0 MiB of mailboxes and 3.0 MiB of weights"));
}

TEST(MemoryBudget, NamesTheLargestPart) {
  ArenaSizes mail = sizes();
  mail.mailbox_bytes = 100 * kMiB;
  EXPECT_EQ(check_fits_memory(mail, "--pool-tokens", kMiB).error().field, "--max-step-rows");
  ArenaSizes weights = sizes();
  weights.weight_bytes = 900 * kMiB;
  EXPECT_EQ(check_fits_memory(weights, "--pool-tokens", kMiB).error().field, "--model");
}

TEST(MemoryBudget, CountsTheHostPool) {
  ArenaSizes host = sizes();
  host.host_pages = {65536, 0};  // 256 MiB
  const int64_t rest = 4 * static_cast<int64_t>(kv::pool_bytes(host.geometry, host.pool_pages[0])) + 7 * kMiB;
  EXPECT_TRUE(check_fits_memory(host, "--pool-bytes", available_for(rest + host.host_bytes())).has_value());
  const auto refused = check_fits_memory(host, "--pool-bytes", available_for(rest + host.host_bytes()) - 1);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kResourceExhausted);
  EXPECT_EQ(refused.error().field, "--host-pool");
  EXPECT_THAT(refused.error().message, testing::HasSubstr("256.0 MiB of host pool"));
}

TEST(MemoryBudget, OneMoreRankTakesAPoolAndMailboxes) {
  ArenaSizes host = sizes();
  host.host_pages = {65536, 0};
  const int64_t own = static_cast<int64_t>(kv::pool_bytes(host.geometry, host.pool_pages[0])) + kMiB;
  EXPECT_TRUE(check_fits_memory(sizes_of_one_more(host), "device", available_for(own)).has_value());
  EXPECT_FALSE(check_fits_memory(sizes_of_one_more(host), "device", available_for(own) - 1).has_value());
}

TEST(MemoryBudget, ReadsTheKernelsNumber) {
  EXPECT_EQ(parse_available("MemTotal:  99 kB\nMemAvailable:      12 kB\nBuffers: 1 kB\n"), 12 * kKiB);
  EXPECT_EQ(parse_available("MemTotal:  99 kB\n"), std::nullopt);
  EXPECT_EQ(parse_available("MemAvailable: ?"), std::nullopt);
  EXPECT_GT(available_memory(), kMiB);
}

}  // namespace
}  // namespace weft::daemon
