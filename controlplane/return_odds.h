// How likely an unused chain of blocks is to come back at each age, and what keeping it is worth.
//
// Ages are counted in quarter octaves of a second. What is known of a chain is eight steps (reuse_policy.h).
// The odds that a chain comes back within an age at which it is still unused are
//   odds(age) · product over the eight of factor(which, part of the ages, step),
// a logistic regression of the discrete hazard. It learns from every age that every chain passes, with one
// step of AdaGrad (Duchi, Hazan, Singer, 2011) each: so chains that have not come back so far count, too. It
// starts from factors learned on recorded agent sessions, which give way slowly to what it sees, and from
// odds by age of a log-logistic law, which give way at once.
//
// The worth of a chain of some age is, of a block, the hits to be had less the price of the room taken,
// at the best time to give up waiting: max over h of P(back within h) − price · E[time kept, at most h].
// Seconds and 1/seconds. Pure and deterministic. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>

namespace weft::controlplane {

// Of each of eight things that are known of a chain, which of six steps it is on.
constexpr int kKnown = 8, kSteps = 6;
using Steps = std::array<uint8_t, kKnown>;

class ReturnOdds {
 public:
  static constexpr int kAges = 80;  // the last begins after ten days
  static int age(double seconds);
  static double begin(int age);  // in seconds; up to kAges

  // Parts of the ages that have factors of their own: up to 10 s, up to 40 s, above.
  static constexpr int kParts = 3;
  // Tenths of the logarithms of the factors at the start.
  using Start = std::array<std::array<std::array<int8_t, kSteps>, kParts>, kKnown>;
  static const Start kBegun, kEnded;
  static constexpr double kBegunSeconds = 22, kEndedSeconds = 14;  // the middle of the gaps at the start

  ReturnOdds(const Start& start, double middle_seconds);

  // A chain that was unused at the beginning of this age came back within it, or did not.
  void learn(const Steps& steps, int age, bool back);
  // P(back within this age | unused at its beginning).
  double chance(const Steps& steps, int age) const;
  double worth(const Steps& steps, int age, double price) const;

 private:
  struct Weight {
    double value = 0;    // logarithm of odds
    double squares = 0;  // of the gradients so far
    void learn(double gradient, double rate);
  };
  static int part(int age);
  double log_factor(const Steps& steps, int part) const;

  std::array<Weight, kAges> odds_;
  std::array<double, kAges> odds_value_{};  // exp of their logarithms
  std::array<std::array<std::array<Weight, kSteps>, kParts>, kKnown> factors_;
};

}  // namespace weft::controlplane
