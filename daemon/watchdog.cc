#include "daemon/watchdog.h"

#include <algorithm>

#include "proto/vocab/check.h"

namespace weft::daemon {
namespace {

bool same_place(const RankProgress& a, const RankProgress& b) {
  return a.step_low == b.step_low && a.layer == b.layer && a.exchange == b.exchange &&
         a.results_written == b.results_written;
}

// Those that somebody waits for and that wait for nobody themselves.
RankMask blamed(std::span<const RankProgress> ranks, RankMask running) {
  RankMask awaited = 0, waiting = 0;
  for (size_t r = 0; r < ranks.size(); ++r) {
    awaited |= ranks[r].waiting_for;
    if (ranks[r].waiting_for != 0) waiting |= mask_of(static_cast<int>(r));
  }
  const RankMask all = all_ranks(static_cast<int>(ranks.size())) & running;
  const RankMask culprits = awaited & ~waiting & all;
  return culprits != 0 ? culprits : all;
}

}  // namespace

Duration step_allowance(const controlplane::Plan& plan, Duration base) {
  int64_t rows = 0, pairs = 0;
  for (const controlplane::Span& span : plan.spans) {
    rows += span.rows;
    pairs += span.rows * (span.start + span.rows);
  }
  // Each of some megabytes at most.
  const auto copies = std::ssize(plan.copies) + std::ssize(plan.loads) + std::ssize(plan.spills);
  return base + std::chrono::milliseconds(5) * (rows + copies) + std::chrono::microseconds(1) * pairs;
}

Duration longest_wait(Duration allowance) {
  return std::max(2 * allowance, Duration(std::chrono::minutes(1)));
}

Watchdog::Watchdog(int rank_count, Duration heartbeat_deadline)
    : rank_count_(rank_count), heartbeat_deadline_(heartbeat_deadline) {}

void Watchdog::forget(int rank) {
  heartbeat_[static_cast<size_t>(rank)].reset();
  silence_[static_cast<size_t>(rank)] = Duration(0);
  still_ = Duration(0);
}

RankMask Watchdog::look(Time now, std::span<const RankProgress> ranks, RankMask watched,
                        std::optional<Duration> allowance, RankMask running) {
  CHECK_EQ(static_cast<int>(ranks.size()), rank_count_);
  const Duration elapsed = looked_ ? std::min(now - last_look_, 2 * kLookInterval) : Duration(0);
  last_look_ = now;
  looked_ = true;

  RankMask hung = 0;
  bool moved = false;
  for (size_t r = 0; r < ranks.size(); ++r) {
    moved = moved || !same_place(progress_[r], ranks[r]);
    progress_[r] = ranks[r];
    const int rank = static_cast<int>(r);
    if (!holds(watched, rank) || heartbeat_[r] != ranks[r].heartbeat) {
      heartbeat_[r] = ranks[r].heartbeat;
      silence_[r] = Duration(0);
      continue;
    }
    silence_[r] += elapsed;
    if (silence_[r] >= heartbeat_deadline_) hung |= mask_of(rank);
  }
  still_ = moved || !allowance ? Duration(0) : still_ + elapsed;
  if (allowance && still_ >= *allowance) hung |= blamed(ranks, running);
  return hung;
}

}  // namespace weft::daemon
