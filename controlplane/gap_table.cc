#include "controlplane/gap_table.h"

#include <algorithm>
#include <cmath>

#include "proto/vocab/check.h"

namespace weft::controlplane {
namespace {

constexpr double kPerOctave = 4;
// Imagined chains: this many, of which a share never returns; the others' gaps are log-logistic.
constexpr double kImagined = 10, kNeverBack = 0.03, kSteepness = 2;

double seconds_since(Time since, Time now) { return std::max(0.0, seconds(now - since)); }

double imagined_back(double seconds, double centre) {
  if (seconds <= 0) return 0;
  return (1 - kNeverBack) / (1 + std::pow(seconds / centre, -kSteepness));
}

}  // namespace

int GapTable::bucket(double seconds) {
  if (seconds < 1) return 0;
  return std::min(kBuckets - 1, 1 + static_cast<int>(std::log2(seconds) * kPerOctave));
}

double GapTable::begin(int bucket) { return bucket == 0 ? 0 : std::exp2((bucket - 1) / kPerOctave); }

void GapTable::close(Time since) {
  const auto found = open_.find(since.ns);
  CHECK(found != open_.end(), "a chain that was never opened");
  open_.erase(found);
  ++events_;
}

void GapTable::returned(Time since, Time now) {
  close(since);
  ++returned_[static_cast<size_t>(bucket(seconds_since(since, now)))];
}

void GapTable::lost(Time since, Time now) {
  close(since);
  ++lost_[static_cast<size_t>(bucket(seconds_since(since, now)))];
}

// P(not back before the bucket begins).
GapTable::Row GapTable::survival(Time now) const {
  std::array<double, kBuckets> unknown = lost_;
  for (const int64_t since : open_) {
    ++unknown[static_cast<size_t>(bucket(seconds_since(Time{since}, now)))];
  }
  std::array<double, kBuckets> watched{};  // chains that got as far as this bucket
  double above = 0;
  for (size_t i = kBuckets; i-- > 0;) watched[i] = above += returned_[i] + unknown[i];
  Row left{};
  left[0] = 1;
  for (int i = 0; i < kBuckets; ++i) {
    const auto at = static_cast<size_t>(i);
    const double before = imagined_back(begin(i), centre_), after = imagined_back(begin(i + 1), centre_);
    const double back = returned_[at] + kImagined * (after - before);
    const double all = watched[at] - 0.5 * unknown[at] + kImagined * (1 - before);
    left[at + 1] = left[at] * (1 - std::min(1.0, back / all));
  }
  return left;
}

void GapTable::refresh(Time now, double price) {
  constexpr double kStaleSeconds = 60;
  const bool fresh = built_events_ >= 0 && (events_ - built_events_) * 16 <= events_ &&
                     std::abs(price - built_price_) <= 0.1 * built_price_ &&
                     seconds(now - built_at_) <= kStaleSeconds;
  if (fresh) return;
  built_events_ = events_;
  built_price_ = price;
  built_at_ = now;
  const Row left = survival(now);
  for (size_t age = 0; age < kBuckets; ++age) {
    double best = -1, back = 0, kept = 0;
    for (size_t i = age; i < kBuckets; ++i) {
      double width = begin(static_cast<int>(i) + 1) - begin(static_cast<int>(i));
      if (i == age) width *= 0.5;  // somewhere in it
      back += left[i] - left[i + 1];
      kept += 0.5 * (left[i] + left[i + 1]) * width;
      best = std::max(best, (back - price * kept) / std::max(left[age], 1e-9));
    }
    worth_[age] = best;
  }
}

}  // namespace weft::controlplane
