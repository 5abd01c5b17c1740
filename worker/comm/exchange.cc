#include "worker/comm/exchange.h"

#include <cstdio>
#include <string>

#include "proto/vocab/check.h"

namespace weft::worker {
namespace {

constexpr uint32_t kCountBits = 24;
constexpr uint32_t kCountMask = (1u << kCountBits) - 1;

// Bit 31 is always set, so that the zero of fresh memory is no flag of any epoch.
uint32_t flag_word(Epoch epoch, uint32_t point) {
  return 1u << 31 | (number(epoch) & 0x7f) << kCountBits | (point & kCountMask);
}

// True when `flag` says that its rank, in this epoch, has published point `target`. It may be one ahead.
bool reached(uint32_t flag, Epoch epoch, uint32_t target) {
  const uint32_t wanted = flag_word(epoch, target);
  return (flag & ~kCountMask) == (wanted & ~kCountMask) && ((flag - wanted) & kCountMask) <= 1;
}

std::string rank_list(RankMask mask) {
  std::string text = rank_count_of(mask) == 1 ? "rank " : "ranks ";
  const char* separator = "";
  for (; mask != 0; mask &= mask - 1) {
    text += separator + std::to_string(lowest_rank(mask));
    separator = ", ";
  }
  return text;
}

}  // namespace

const char* exchange_point_name(ExchangePoint point) {
  switch (point) {
    case ExchangePoint::kCopies:
      return "copies";
    case ExchangePoint::kEntries:
      return "entries";
    case ExchangePoint::kPartials:
      return "partials";
    case ExchangePoint::kAttentionSums:
      return "attention_sums";
    case ExchangePoint::kFeedForwardSums:
      return "feed_forward_sums";
    case ExchangePoint::kHeadRows:
      return "head_rows";
    case ExchangePoint::kLogits:
      return "logits";
  }
  return "?";
}

size_t mailbox_bytes(size_t outbox_bytes) { return 2 * ((outbox_bytes + 63) / 64 * 64); }

Exchange::Exchange(kv::ControlArena& control, std::vector<std::byte*> mailboxes, size_t mailbox_bytes,
                   int rank)
    : control_(control),
      mailboxes_(std::move(mailboxes)),
      outbox_bytes_(mailbox_bytes / 2 / 64 * 64),
      rank_(rank),
      spinner_(spin_time(rank_count())) {
  CHECK_EQ(rank_count(), control.limits().rank_count);
  CHECK(rank >= 0 && rank < rank_count(), "rank ", rank);
}

void Exchange::begin_epoch(Epoch epoch, const kv::Topology& ranks) {
  CHECK_NE(number(epoch), 0u);
  CHECK(ranks.contains(rank_), "rank ", rank_, " takes no part");
  topology_ = ranks;
  epoch_ = epoch;
  passed_ = 0;
  waited_ = Duration::zero();
  sleeps_ = 0;
  // The bit of a process that died asleep.
  control_.exchange_bell().sleepers.fetch_and(~mask_of(rank_), std::memory_order_seq_cst);
  kv::RankState& state = control_.rank_state(rank_);
  state.exchange.store(0, std::memory_order_relaxed);
  state.waiting_for.store(0, std::memory_order_relaxed);
  control_.exchange_flag(rank_).published.store(flag_word(epoch, 0), std::memory_order_seq_cst);
}

std::byte* Exchange::outbox_of(int rank, uint32_t point) const {
  return mailboxes_[static_cast<size_t>(rank)] + (point % 2) * outbox_bytes_;
}

std::span<std::byte> Exchange::outbox() { return {outbox_of(rank_, passed_ + 1), outbox_bytes_}; }

std::span<const std::byte> Exchange::inbox(int from) const {
  CHECK_NE(passed_, 0u);
  return {outbox_of(topology_.rank(from), passed_), outbox_bytes_};
}

RankMask Exchange::missing(uint32_t target) const {
  RankMask mask = 0;
  for (int place = 0; place < topology_.count(); ++place) {
    const int rank = topology_.rank(place);
    // All flags in one total order with all publishes: the rank that publishes last sees everybody.
    const uint32_t flag = control_.exchange_flag(rank).published.load(std::memory_order_seq_cst);
    if (!reached(flag, epoch_, target)) mask |= mask_of(rank);
  }
  return mask;
}

RankMask Exchange::wait_for_all(uint32_t target) {
  const Time start = monotonic_now();
  kv::RankState& state = control_.rank_state(rank_);
  kv::ExchangeBell& bell = control_.exchange_bell();
  RankMask absent = missing(target);
  auto finished = [&] { return (absent = missing(target)) == 0 || control_.aborted(epoch_); };
  state.waiting_for.store(absent, std::memory_order_relaxed);
  if (!spinner_.until(finished)) {
    bell.sleepers.fetch_or(mask_of(rank_), std::memory_order_seq_cst);
    for (;;) {
      const uint32_t heard = bell.rings.load(std::memory_order_seq_cst);
      if (finished()) break;
      state.waiting_for.store(absent, std::memory_order_relaxed);
      const Duration left = deadline_ - (monotonic_now() - start);
      if (left <= Duration::zero()) break;
      ++sleeps_;
      kv::futex_wait(bell.rings, heard, left);
    }
    bell.sleepers.fetch_and(~mask_of(rank_), std::memory_order_seq_cst);
  }
  state.waiting_for.store(0, std::memory_order_relaxed);
  waited_ += monotonic_now() - start;
  return absent;
}

Result<void> Exchange::pass(ExchangePoint point, int layer) {
  CHECK_NE(number(epoch_), 0u);
  const uint32_t target = passed_ + 1;
  kv::RankState& state = control_.rank_state(rank_);
  state.layer.store(static_cast<uint32_t>(layer), std::memory_order_relaxed);
  state.heartbeat.fetch_add(1, std::memory_order_relaxed);
  control_.exchange_flag(rank_).published.store(flag_word(epoch_, target), std::memory_order_seq_cst);

  RankMask absent = missing(target);
  if (absent == 0) {
    control_.ring_exchange_bell();
  } else {
    absent = wait_for_all(target);
  }
  if (control_.aborted(epoch_)) {
    return error(ErrorCode::kCancelled, "epoch " + std::to_string(number(epoch_)) + " was aborted");
  }
  if (absent != 0) {
    char limit[32];
    std::snprintf(limit, sizeof limit, "%.3g s", seconds(deadline_));
    return error(ErrorCode::kDeadlineExceeded, rank_list(absent) + " did not arrive at exchange point '" +
                                                   exchange_point_name(point) + "' of layer " +
                                                   std::to_string(layer) + " (number " +
                                                   std::to_string(target) + ") within " + limit);
  }
  passed_ = target;
  state.exchange.store(target, std::memory_order_relaxed);
  return {};
}

}  // namespace weft::worker
