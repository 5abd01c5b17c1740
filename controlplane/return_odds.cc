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

double back_at_start(double seconds, double middle) {
  if (seconds <= 0) return 0;
  return (1 - kNeverBack) / (1 + std::pow(seconds / middle, -kSteepness));
}

}  // namespace

// Learned on the half `train` of recorded agent sessions (docs/benchmarks.md): rows in the order of
// steps_of() in reuse_policy.cc, columns the parts of the ages.
// clang-format off
const ReturnOdds::Start ReturnOdds::kBegun = {{
    {{{4, 1, -4, -8, -8, -3}, {-2, 1, 3, 1, -2, -3}, {4, 3, 1, 0, 3, 0}}},
    {{{0, -2, -3, -2, -1, -6}, {4, 1, 0, 0, 0, -1}, {0, 2, 2, 1, 1, 3}}},
    {{{1, -1, -2, -3, -2, -8}, {2, 1, 1, 0, 0, -1}, {0, 1, 2, 0, 3, 2}}},
    {{{-4, -3, -2, -2, -1, -2}, {3, 1, 1, 0, -2, -5}, {-2, 2, 4, 2, 2, 0}}},
    {{{1, 0, -1, -2, -5, -8}, {0, 1, 1, 1, 1, -1}, {1, 1, 2, 0, 1, 4}}},
    {{{2, -1, 0, -2, -3, -8}, {2, 0, 1, 0, 0, -1}, {2, 2, 4, 3, 1, -1}}},
    {{{-1, -3, -1, 0, -3, -3}, {-1, 0, 0, 1, 1, -1}, {4, 2, 2, 1, 2, 0}}},
    {{{3, -1, -2, -5, -7, -9}, {-3, 0, 0, 1, 1, 0}, {3, 5, 1, 2, -1, 1}}},
}};
const ReturnOdds::Start ReturnOdds::kEnded = {{
    {{{-1, -1, 0, -1, -2, -1}, {-3, -1, 0, 1, 0, -5}, {2, 2, 0, 1, 2, 1}}},
    {{{1, 0, -1, -1, -1, -2}, {3, 1, -1, -1, 0, -1}, {-1, 2, 2, 1, 3, 3}}},
    {{{1, -1, 0, -1, -2, -3}, {-1, 0, -1, 0, 0, 0}, {-1, 2, 4, -1, 4, 3}}},
    {{{0, -1, -1, -2, -1, -3}, {3, 2, 2, 1, -2, -5}, {-2, 2, 4, 3, 3, 0}}},
    {{{2, 1, 0, -1, -2, -4}, {-3, -2, 0, 0, 1, 1}, {2, 1, 1, 0, 0, 4}}},
    {{{2, 0, 0, -1, 0, -3}, {0, 0, 1, 0, -1, 1}, {4, 2, 4, 3, -1, 0}}},
    {{{-1, -2, 0, 1, 0, 0}, {-2, -1, 0, 1, 3, -1}, {3, 3, 3, 2, 1, 0}}},
    {{{2, 0, -1, -4, -1, -3}, {2, 1, 1, -1, 0, -1}, {3, 2, 5, 5, 0, -1}}},
}};
// clang-format on

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
  static const int quick = ReturnOdds::age(10), middle = ReturnOdds::age(40);
  return age <= quick ? 0 : age <= middle ? 1 : 2;
}

ReturnOdds::ReturnOdds(const Start& start, double middle_seconds) {
  for (int age = 0; age < kAges; ++age) {
    const double before = back_at_start(begin(age), middle_seconds);
    const double after = back_at_start(begin(age + 1), middle_seconds);
    const auto at = static_cast<size_t>(age);
    odds_value_[at] = (after - before) / (1 - after);
    odds_[at] = {std::log(odds_value_[at]), kOddsStart};
  }
  for (size_t which = 0; which < start.size(); ++which) {
    for (size_t part = 0; part < kParts; ++part) {
      for (size_t step = 0; step < kSteps; ++step) {
        factors_[which][part][step] = {start[which][part][step] / 10.0, kFactorStart};
      }
    }
  }
}

void ReturnOdds::Weight::learn(double gradient, double rate) {
  squares += gradient * gradient;
  value -= rate * gradient / std::sqrt(squares);
}

double ReturnOdds::log_factor(const Steps& steps, int part) const {
  double sum = 0;
  for (size_t which = 0; which < steps.size(); ++which) {
    sum += factors_[which][static_cast<size_t>(part)][steps[which]].value;
  }
  return sum;
}

double ReturnOdds::chance(const Steps& steps, int age) const {
  const double odds = odds_value_[static_cast<size_t>(age)] * std::exp(log_factor(steps, part(age)));
  return odds / (1 + odds);
}

void ReturnOdds::learn(const Steps& steps, int age, bool back) {
  const double gradient = chance(steps, age) - (back ? 1 : 0);
  const auto at = static_cast<size_t>(age);
  odds_[at].learn(gradient, kOddsRate);
  odds_value_[at] = std::exp(odds_[at].value);
  for (size_t which = 0; which < steps.size(); ++which) {
    factors_[which][static_cast<size_t>(part(age))][steps[which]].learn(gradient, kFactorRate);
  }
}

double ReturnOdds::worth(const Steps& steps, int age, double price) const {
  std::array<double, kParts> factors;
  for (int part = 0; part < kParts; ++part) {
    factors[static_cast<size_t>(part)] = std::exp(log_factor(steps, part));
  }
  double left = 1, kept = 0, best = -1;
  for (int i = age; i < kAges; ++i) {
    const double odds = odds_value_[static_cast<size_t>(i)] * factors[static_cast<size_t>(part(i))];
    const double after = left / (1 + odds);
    double width = begin(i + 1) - begin(i);
    if (i == age) width *= 0.5;  // somewhere in it
    kept += 0.5 * (left + after) * width;
    left = after;
    best = std::max(best, 1 - left - price * kept);
    if (1 - price * kept <= best) break;  // even if all came back at once from here on
  }
  return best;
}

}  // namespace weft::controlplane
