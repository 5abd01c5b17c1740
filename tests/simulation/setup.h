// What a seed decides before anything happens: sizes, how often what happens, how bad the workers are.
#pragma once

#include "controlplane/limits.h"
#include "daemon/supervisor.h"
#include "proto/vocab/random.h"
#include "tests/simulation/act.h"

namespace weft::simulation {

struct Draw {
  explicit Draw(uint64_t seed) : random(seed) {}
  int64_t below(int64_t bound) { return static_cast<int64_t>(random.below(static_cast<uint64_t>(bound))); }
  bool chance(int64_t percent) { return below(100) < percent; }
  template <typename T, size_t N>
  T one_of(const std::array<T, N>& values) {
    return values[static_cast<size_t>(below(static_cast<int64_t>(N)))];
  }
  SplitMix64 random;
};

struct Setup {
  uint64_t seed = 0;
  controlplane::Limits limits;
  daemon::SupervisorLimits supervisor;
  std::array<int64_t, kActKinds> weights{};
  Duration tick{};  // the most that passes with an act; the other times follow it
  Duration hang_deadline{};
  int64_t short_answers = 0, turns = 0;            // percent
  int64_t on_host = 0, on_device = 0;              // requests that ask for their context there, percent
  int64_t poison = 0, nan = 0, with_deadline = 0;  // requests, percent
  int64_t max_live = 0;                            // requests at once
};
Setup setup_of(uint64_t seed);
// The run of a seed, until so many acts did something.
Script script_of(const Setup& setup, int64_t events);

}  // namespace weft::simulation
