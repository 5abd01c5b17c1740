#include "controlplane/reuse_policy.h"

#include <algorithm>
#include <cmath>

#include "proto/vocab/check.h"

namespace weft::controlplane {
namespace {

// ---- kinds. The numbers were chosen on one half of recorded agent sessions (docs/benchmarks.md).
constexpr double kForget = 0.8;      // weight of an older gap beside the next one
constexpr double kLongSeconds = 45;  // somebody thinks
constexpr double kTypicalLog = 2.7, kTypicalShortLog = 2.2;

uint32_t step_of(double value, double first, double width, uint32_t count) {
  const double step = std::floor((value - first) / width);
  return static_cast<uint32_t>(std::clamp(step, 0.0, static_cast<double>(count - 1)));
}

double mean_log(const ChainHistory& history) {
  return (history.sum + kTypicalLog) / (static_cast<double>(history.gaps) + 1);
}

// By the share of long gaps lately, the scale of the short ones, and the last gap.
uint32_t by_rhythm(const ChainHistory& history) {
  const uint32_t longs = step_of((history.longs + 0.25) / (history.weight + 1), 0, 0.125, 5);
  const double scale = (history.short_sum + 2 * kTypicalShortLog) / (history.short_weight + 2);
  const double last = std::exp(history.last);
  return (longs * 6 + step_of(scale, 1.5, 0.35, 6)) * 3 + (last >= kLongSeconds ? 2 : last > 12 ? 1 : 0);
}

// By the mean of all gaps, and the last one.
uint32_t by_mean(const ChainHistory& history) {
  const uint32_t last = step_of(history.last / std::log(2.0), std::log2(5.0) - 1, 1, 5);
  return last * 10 + step_of(mean_log(history), 1.6, 0.35, 10);
}

// ---- marks: every kMarkBlocks-th block of a prompt; the last two of a chain are remembered, for the very
// end of a prompt is often written anew.
constexpr int64_t kMarkBlocks = 4;

int64_t last_mark(int64_t blocks) {
  return blocks < kMarkBlocks ? blocks : blocks / kMarkBlocks * kMarkBlocks;
}
int64_t mark_before(int64_t mark) { return mark <= kMarkBlocks ? mark - 1 : mark - kMarkBlocks; }

constexpr double kPricePerTurnover = 0.67;
constexpr double kLongestTurnover = 24 * 3600;

}  // namespace

void ChainHistory::add(double seconds) {
  const double log = std::log(std::max(seconds, 1.0));
  const bool is_long = seconds >= kLongSeconds;
  ++gaps;
  last = log;
  sum += log;
  weight = weight * kForget + 1;
  longs = longs * kForget + (is_long ? 1 : 0);
  if (is_long) return;
  short_weight = short_weight * kForget + 1;
  short_sum = short_sum * kForget + log;
}

ChainHistory ReusePolicy::arrived(const Identities& prompt, Time now) {
  for (int64_t mark = last_mark(prompt.size()); mark > 0; mark = mark_before(mark)) {
    const auto found = by_mark_.find(prompt[mark - 1]);
    if (found == by_mark_.end()) continue;
    const auto record = found->second;
    ChainHistory history = record->history;
    for (const Unused* unused : {&record->begun, &record->ended}) {
      if (!unused->known) continue;
      for (const uint32_t kind : unused->kinds) table(kind).returned(unused->since, now);
    }
    const Unused& last = record->ended.known ? record->ended : record->begun;
    history.add(std::max(0.0, seconds(now - last.since)));
    drop_marks(record);
    records_.erase(record);
    return history;
  }
  return {};
}

Unused ReusePolicy::open(const ChainHistory& history, bool begun, Time now) {
  // Four groups of kinds: two systems, each for requests that have begun and those that have ended.
  constexpr uint32_t kGroup = 256;
  const uint32_t first = begun ? 2 * kGroup : 0;
  Unused unused{now, {first, first + kGroup}, true};
  if (history.gaps > 0) {
    unused.kinds[0] += 1 + by_rhythm(history);
    unused.kinds[1] += 1 + by_mean(history);
  }
  const double centre = history.gaps == 0 ? kTypicalLog : 0.75 * mean_log(history) + 0.25 * history.last;
  for (const uint32_t kind : unused.kinds) {
    tables_.try_emplace(kind, std::exp(centre)).first->second.opened(now);
  }
  return unused;
}

// A new record, or the one that begun() made.
ReusePolicy::Record& ReusePolicy::record_of(const ChainHistory& history, const Identities& identities,
                                            int64_t prompt) {
  const int64_t mark = last_mark(prompt);
  CHECK_GT(mark, 0);
  const auto found = by_mark_.find(identities[mark - 1]);
  if (found != by_mark_.end() && found->second->begun.known && !found->second->ended.known) {
    records_.splice(records_.end(), records_, found->second);
    return records_.back();
  }
  Record record;
  record.history = history;
  records_.push_back(record);
  const auto at = std::prev(records_.end());
  for (int64_t m = mark; m > 0 && at->mark_count < at->marks.size(); m = mark_before(m)) {
    // Of two chains that end alike the later one is known by it.
    by_mark_.insert_or_assign(identities[m - 1], at);
    at->marks[at->mark_count++] = identities[m - 1];
  }
  if (records_.size() > kHistories) {
    const auto oldest = records_.begin();
    for (const Unused* unused : {&oldest->begun, &oldest->ended}) {
      if (!unused->known) continue;
      for (const uint32_t kind : unused->kinds) table(kind).lost(unused->since, counted_);
    }
    drop_marks(oldest);
    records_.erase(oldest);
  }
  return *at;
}

void ReusePolicy::drop_marks(Records::iterator record) {
  for (size_t i = 0; i < record->mark_count; ++i) {
    const auto found = by_mark_.find(record->marks[i]);
    if (found != by_mark_.end() && found->second == record) by_mark_.erase(found);
  }
}

Unused ReusePolicy::ended(const ChainHistory& history, const Identities& identities, int64_t prompt,
                          Time now) {
  if (prompt == 0) return {};
  return record_of(history, identities, prompt).ended = open(history, false, now);
}

Unused ReusePolicy::begun(const ChainHistory& history, const Identities& identities, int64_t prompt,
                          Time now) {
  if (prompt == 0) return {};
  return record_of(history, identities, prompt).begun = open(history, true, now);
}

double ReusePolicy::worth(const Unused& unused, Time now) {
  const int age = GapTable::bucket(std::max(0.0, seconds(now - unused.since)));
  double sum = 0;
  for (const uint32_t kind : unused.kinds) {
    table(kind).refresh(now, price_);
    sum += table(kind).worth(age);
  }
  return sum / static_cast<double>(unused.kinds.size());
}

Time ReusePolicy::next_change(const Unused& unused, Time now) const {
  const int age = GapTable::bucket(std::max(0.0, seconds(now - unused.since)));
  const auto next = Duration(static_cast<int64_t>(GapTable::begin(age + 1) * 1e9));
  constexpr Duration kLeast = std::chrono::milliseconds(1);
  return std::max(unused.since + next, now + kLeast);
}

void ReusePolicy::evicted(int64_t blocks, int64_t cached, Time now) {
  constexpr double kWindowSeconds = 60;
  const double passed = std::max(0.0, seconds(now - counted_));
  counted_ = std::max(counted_, now);
  // Blocks a second, with older ones counting less.
  evictions_ = evictions_ * std::exp(-passed / kWindowSeconds) + static_cast<double>(blocks) / kWindowSeconds;
  const double turnover = static_cast<double>(cached) / std::max(evictions_, 1e-9);
  price_ = kPricePerTurnover / std::clamp(turnover, 1.0, kLongestTurnover);
}

}  // namespace weft::controlplane
