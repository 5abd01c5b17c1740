#include "controlplane/reuse_policy.h"

#include <algorithm>
#include <cmath>

#include "proto/vocab/check.h"

namespace weft::controlplane {
namespace {

// ---- what is known, in steps. The numbers were chosen on one half of recorded agent sessions
// (docs/benchmarks.md): each step has about as many requests.
constexpr double kRecently = 0.8, kLately = 0.95;  // weight of an older gap beside the next one
constexpr double kLongSeconds = 45;                // somebody thinks
constexpr double kTypicalGap = 2.7, kTypicalShortGap = 2.2, kTypicalService = 1.8;  // logarithms of seconds
constexpr int64_t kTypicalGrowth = 10;

using Edges = std::array<double, kSteps - 1>;  // where the next step begins
constexpr Edges kLast = {1.39, 1.79, 2.20, 2.83, 4.09};
constexpr Edges kRecent = {2.04, 2.29, 2.50, 2.70, 2.94};
constexpr Edges kAll = {2.03, 2.25, 2.43, 2.62, 2.84};
constexpr Edges kLongs = {0.05, 0.10, 0.15, 0.20, 0.30};
constexpr Edges kShorts = {1.87, 2.00, 2.13, 2.26, 2.43};
constexpr Edges kBlocks = {6.70, 7.05, 7.30, 7.55, 7.75};
constexpr Edges kGrowth = {1.39, 1.79, 2.30, 2.83, 3.60};
constexpr Edges kServices = {1.50, 1.68, 1.85, 2.04, 2.30};
constexpr Edges kGaps = {3, 7, 15, 31, 61};
constexpr Edges kService = {1.30, 1.56, 1.79, 2.06, 2.55};

double log_of(double at_least_one) { return std::log(std::max(at_least_one, 1.0)); }

uint8_t step_of(double value, const Edges& edges) {
  return static_cast<uint8_t>(std::upper_bound(edges.begin(), edges.end(), value) - edges.begin());
}

Steps steps_of(const ChainHistory& history, bool begun, double service) {
  return {
      step_of(history.gaps == 0 ? kTypicalGap : history.last, kLast),
      step_of(history.recent.mean(kTypicalGap, 1), kRecent),
      step_of(history.all.mean(kTypicalGap, 1), kAll),
      step_of(history.longs.mean(0.25, 1), kLongs),
      step_of(history.shorts.mean(kTypicalShortGap, 2), kShorts),
      step_of(log_of(static_cast<double>(history.blocks)), kBlocks),
      step_of(log_of(static_cast<double>(history.growth)), kGrowth),
      begun ? step_of(history.services.mean(kTypicalService, 1), kServices) : step_of(service, kService),
      step_of(static_cast<double>(history.gaps), kGaps),
      step_of(history.gaps < 2 ? kTypicalGap : history.before, kLast),
  };
}

// ---- marks: every kMarkBlocks-th block of a prompt; the last two of a chain are remembered, for the very
// end of a prompt is often written anew.
constexpr int64_t kMarkBlocks = 4;

int64_t last_mark(int64_t blocks) {
  return blocks < kMarkBlocks ? blocks : blocks / kMarkBlocks * kMarkBlocks;
}
int64_t mark_before(int64_t mark) { return mark <= kMarkBlocks ? mark - 1 : mark - kMarkBlocks; }

double age_seconds(const Unused& unused, Time now) { return std::max(0.0, seconds(now - unused.since)); }

Time end_of_age(const Unused& unused, int age) {
  return unused.since + Duration(static_cast<int64_t>(ReturnOdds::begin(age + 1) * 1e9));
}

}  // namespace

void ChainHistory::add_gap(double seconds) {
  const bool is_long = seconds >= kLongSeconds;
  ++gaps;
  before = last;
  last = log_of(seconds);
  recent.add(last, kRecently);
  all.add(last, kLately);
  longs.add(is_long ? 1 : 0, kLately);
  if (!is_long) shorts.add(last, kRecently);
}

ChainHistory ReusePolicy::arrived(const Identities& prompt, Time now) {
  ChainHistory history;
  history.growth = kTypicalGrowth;
  for (int64_t mark = last_mark(prompt.size()); mark > 0; mark = mark_before(mark)) {
    const auto found = by_mark_.find(prompt[mark - 1]);
    if (found == by_mark_.end()) continue;
    const auto record = found->second;
    history = record->history;
    for (const Watch* watch : {&record->begun, &record->ended}) returned(*watch, now);
    const Watch& last = record->ended.unused.known ? record->ended : record->begun;
    history.add_gap(age_seconds(last.unused, now));
    history.growth = std::max<int64_t>(0, prompt.size() - history.blocks);
    erase(record);
    break;
  }
  history.blocks = prompt.size();
  history.arrived = now;
  return history;
}

// Ages that advance() has not told of yet, too. (It may have told of more: a request counts from its arrival,
// but is known only when it is let in.)
void ReusePolicy::returned(const Watch& watch, Time now) {
  if (!watch.unused.known) return;
  const int last = ReturnOdds::age(age_seconds(watch.unused, now));
  for (int age = watch.age; age < last; ++age) odds(watch.unused.begun).learn(watch.unused.steps, age, false);
  odds(watch.unused.begun).learn(watch.unused.steps, last, true);
}

// A new record, or the one that begun() made.
ReusePolicy::Record& ReusePolicy::record_of(const Identities& identities, int64_t prompt) {
  const int64_t mark = last_mark(prompt);
  CHECK_GT(mark, 0);
  const auto found = by_mark_.find(identities[mark - 1]);
  if (found != by_mark_.end() && found->second->begun.unused.known && !found->second->ended.unused.known) {
    records_.splice(records_.end(), records_, found->second);
    return records_.back();
  }
  const auto at = records_.emplace(records_.end());
  at->number = ++numbers_;
  by_number_[at->number] = at;
  for (int64_t m = mark; m > 0 && at->mark_count < at->marks.size(); m = mark_before(m)) {
    // Of two chains that end alike the later one is known by it.
    by_mark_.insert_or_assign(identities[m - 1], at);
    at->marks[at->mark_count++] = identities[m - 1];
  }
  if (records_.size() > kHistories) erase(records_.begin());
  return *at;
}

void ReusePolicy::erase(Records::iterator record) {
  for (const Watch* watch : {&record->begun, &record->ended}) unfollow(*record, *watch);
  for (size_t i = 0; i < record->mark_count; ++i) {
    const auto found = by_mark_.find(record->marks[i]);
    if (found != by_mark_.end() && found->second == record) by_mark_.erase(found);
  }
  by_number_.erase(record->number);
  records_.erase(record);
}

ReusePolicy::Due ReusePolicy::due(const Record& record, const Watch& watch) {
  return {end_of_age(watch.unused, watch.age), record.number, watch.unused.begun};
}

void ReusePolicy::follow(const Record& record, const Watch& watch) {
  if (watch.age < ReturnOdds::kAges) due_.insert(due(record, watch));
}

void ReusePolicy::unfollow(const Record& record, const Watch& watch) {
  if (watch.unused.known && watch.age < ReturnOdds::kAges) CHECK_EQ(due_.erase(due(record, watch)), 1u);
}

Unused ReusePolicy::begin_watch(Record& record, Watch& watch, const Unused& unused) {
  unfollow(record, watch);
  watch = {unused, 0};
  follow(record, watch);
  return unused;
}

Unused ReusePolicy::ended(const ChainHistory& history, const Identities& identities, int64_t prompt,
                          Time now) {
  if (prompt == 0) return {};
  Record& record = record_of(identities, prompt);
  const double service = log_of(seconds(now - history.arrived));
  record.history = history;
  record.history.services.add(service, kRecently);
  return begin_watch(record, record.ended, {now, steps_of(history, false, service), true, false});
}

Unused ReusePolicy::begun(const ChainHistory& history, const Identities& identities, int64_t prompt,
                          Time now) {
  if (prompt == 0) return {};
  Record& record = record_of(identities, prompt);
  record.history = history;
  return begin_watch(record, record.begun, {now, steps_of(history, true, 0), true, true});
}

double ReusePolicy::worth(const Unused& unused, Time now) {
  return odds(unused.begun).worth(unused.steps, ReturnOdds::age(age_seconds(unused, now)));
}

Time ReusePolicy::next_change(const Unused& unused, Time now) const {
  constexpr Duration kLeast = std::chrono::milliseconds(1);
  return std::max(end_of_age(unused, ReturnOdds::age(age_seconds(unused, now))), now + kLeast);
}

void ReusePolicy::advance(Time now) {
  while (!due_.empty() && due_.begin()->when <= now) {
    const Due next = *due_.begin();
    due_.erase(due_.begin());
    Record& record = *by_number_.at(next.record);
    Watch& watch = next.begun ? record.begun : record.ended;
    odds(next.begun).learn(watch.unused.steps, watch.age, false);
    ++watch.age;
    follow(record, watch);
  }
}

}  // namespace weft::controlplane
