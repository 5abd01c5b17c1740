// How likely an unused chain of blocks is to come back at each age, and what keeping it is worth.
//
// Ages are counted in quarter octaves of a second. What is known of a chain is ten steps (reuse_policy.h).
// The odds that a chain comes back within an age at which it is still unused are
//   odds(age) · product of factor(part of the ages, cell),
// where a cell is a step of one of the ten or the steps of a pair of them: a logistic regression of the
// discrete hazard. It learns from every age that every chain passes, with one step of AdaGrad (Duchi, Hazan,
// Singer, 2011) each: so chains that have not come back so far count, too. It starts from factors learned on
// recorded agent sessions, which give way slowly to what it sees, and from odds by age of a log-logistic law,
// which give way at once.
//
// The worth of a chain of some age is, of a block, the hits to be had for a second of room, at the best time
// to give up waiting: max over h of P(back within h) / (slack + E[time kept, at most h]). This is the index
// of Gittins (1979) for a chain that pays once; the slack keeps chains that are only seconds old, whose
// chance of the next second is known least, from being worth many times all others.
// Seconds and 1/seconds. Pure and deterministic. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace weft::controlplane {

// Of each of ten things that are known of a chain, which of six steps it is on.
constexpr int kKnown = 10, kSteps = 6;
using Steps = std::array<uint8_t, kKnown>;
// Of some, what two of them say together. In the order of steps_of() in reuse_policy.cc: the last gap and the
// share of long ones, the gap before and the last one, service and growth.
constexpr std::array<std::array<size_t, 2>, 3> kPairs = {{{0, 3}, {9, 0}, {7, 6}}};
constexpr int kFactors = kKnown + static_cast<int>(kPairs.size());  // that apply to a chain
constexpr int kCells = kKnown * kSteps + static_cast<int>(kPairs.size()) * kSteps * kSteps;

class ReturnOdds {
 public:
  static constexpr int kAges = 80;  // the last begins after ten days
  static int age(double seconds);
  static double begin(int age);  // in seconds; up to kAges

  // Parts of the ages that have factors of their own: up to 5, 10, 20 and 40 seconds, and above.
  static constexpr int kParts = 5;
  // Tenths of the logarithms of the factors at the start: by part and cell.
  using Start = std::array<std::array<int8_t, kCells>, kParts>;
  static const Start kBegun, kEnded;
  static constexpr double kBegunSeconds = 22, kEndedSeconds = 14;  // the middle of the gaps at the start

  ReturnOdds(const Start& start, double middle_seconds);
  // At the start, of requests that have begun and of those that have ended.
  static ReturnOdds begun() { return {kBegun, kBegunSeconds}; }
  static ReturnOdds ended() { return {kEnded, kEndedSeconds}; }

  // A chain that was unused at the beginning of this age came back within it, or did not.
  void learn(const Steps& steps, int age, bool back);
  // P(back within this age | unused at its beginning).
  double chance(const Steps& steps, int age) const;
  double worth(const Steps& steps, int age) const;
  // The factors as they are now, to start from.
  Start learned() const;

 private:
  struct Weight {
    double value = 0;    // logarithm of odds
    double squares = 0;  // of the gradients so far
    void learn(double gradient, double rate);
  };
  static int part(int age);
  static std::array<size_t, kFactors> cells(const Steps& steps);
  double log_factor(const std::array<size_t, kFactors>& cells, int part) const;

  std::array<Weight, kAges> odds_;
  std::array<double, kAges> odds_value_{};  // exp of their logarithms
  std::array<std::array<Weight, kCells>, kParts> factors_;
};

}  // namespace weft::controlplane
