#include "controlplane/return_odds.h"

#include <algorithm>
#include <cmath>

namespace weft::controlplane {
namespace {

constexpr double kPerOctave = 4;
constexpr double kNeverBack = 0.03, kSteepness = 2;  // of the law at the start
// How fast odds and factors learn, and how firmly the start holds: as if so many squared gradients were seen.
constexpr double kOddsRate = 0.4, kOddsStart = 0.2;
constexpr double kFactorRate = 0.1, kFactorStart = 100;
constexpr double kSlackSeconds = 10;

double back_at_start(double seconds, double middle) {
  if (seconds <= 0) return 0;
  return (1 - kNeverBack) / (1 + std::pow(seconds / middle, -kSteepness));
}

}  // namespace

int ReturnOdds::age(double seconds) {
  if (seconds < 1) return 0;
  return std::min(kAges - 1, 1 + static_cast<int>(std::log2(seconds) * kPerOctave));
}

double ReturnOdds::begin(int age) {
  static const auto begins = [] {
    std::array<double, kAges + 1> all{};
    for (int i = 1; i <= kAges; ++i) all[static_cast<size_t>(i)] = std::exp2((i - 1) / kPerOctave);
    return all;
  }();
  return begins[static_cast<size_t>(age)];
}

int ReturnOdds::part(int age) {
  static const std::array<int, kParts - 1> lasts = {ReturnOdds::age(5), ReturnOdds::age(10),
                                                    ReturnOdds::age(20), ReturnOdds::age(40)};
  return static_cast<int>(std::lower_bound(lasts.begin(), lasts.end(), age) - lasts.begin());
}

ReturnOdds::ReturnOdds(const Start& start, double middle_seconds) {
  for (int age = 0; age < kAges; ++age) {
    const double before = back_at_start(begin(age), middle_seconds);
    const double after = back_at_start(begin(age + 1), middle_seconds);
    const auto at = static_cast<size_t>(age);
    odds_value_[at] = (after - before) / (1 - after);
    odds_[at] = {std::log(odds_value_[at]), kOddsStart};
  }
  for (size_t part = 0; part < kParts; ++part) {
    for (size_t cell = 0; cell < kCells; ++cell)
      factors_[part][cell] = {start[part][cell] / 10.0, kFactorStart};
  }
}

ReturnOdds::Start ReturnOdds::learned() const {
  Start start{};
  for (size_t part = 0; part < kParts; ++part) {
    for (size_t cell = 0; cell < kCells; ++cell)
      start[part][cell] =
          static_cast<int8_t>(std::clamp(std::lround(factors_[part][cell].value * 10), -100L, 100L));
  }
  return start;
}

void ReturnOdds::Weight::learn(double gradient, double rate) {
  squares += gradient * gradient;
  value -= rate * gradient / std::sqrt(squares);
}

// First those of each thing known, then those of the pairs.
std::array<size_t, kFactors> ReturnOdds::cells(const Steps& steps) {
  std::array<size_t, kFactors> cells{};
  for (size_t which = 0; which < kKnown; ++which) cells[which] = which * kSteps + steps[which];
  for (size_t pair = 0; pair < kPairs.size(); ++pair) {
    cells[kKnown + pair] = kKnown * kSteps + pair * kSteps * kSteps +
                           size_t{steps[kPairs[pair][0]]} * kSteps + steps[kPairs[pair][1]];
  }
  return cells;
}

double ReturnOdds::log_factor(const std::array<size_t, kFactors>& cells, int part) const {
  double sum = 0;
  for (const size_t cell : cells) sum += factors_[static_cast<size_t>(part)][cell].value;
  return sum;
}

double ReturnOdds::chance(const Steps& steps, int age) const {
  const double odds = odds_value_[static_cast<size_t>(age)] * std::exp(log_factor(cells(steps), part(age)));
  return odds / (1 + odds);
}

void ReturnOdds::learn(const Steps& steps, int age, bool back) {
  const double gradient = chance(steps, age) - (back ? 1 : 0);
  const auto at = static_cast<size_t>(age);
  odds_[at].learn(gradient, kOddsRate);
  odds_value_[at] = std::exp(odds_[at].value);
  for (const size_t cell : cells(steps))
    factors_[static_cast<size_t>(part(age))][cell].learn(gradient, kFactorRate);
}

double ReturnOdds::worth(const Steps& steps, int age) const {
  std::array<double, kParts> factors;
  const auto own = cells(steps);
  for (int part = 0; part < kParts; ++part)
    factors[static_cast<size_t>(part)] = std::exp(log_factor(own, part));
  double left = 1, kept = kSlackSeconds, best = 0;
  for (int i = age; i < kAges; ++i) {
    const double odds = odds_value_[static_cast<size_t>(i)] * factors[static_cast<size_t>(part(i))];
    const double after = left / (1 + odds);
    double width = begin(i + 1) - begin(i);
    if (i == age) width *= 0.5;  // somewhere in it
    kept += 0.5 * (left + after) * width;
    left = after;
    best = std::max(best, (1 - left) / kept);
    if (1 / kept <= best) break;  // even if all came back at once from here on
  }
  return best;
}

}  // namespace weft::controlplane
