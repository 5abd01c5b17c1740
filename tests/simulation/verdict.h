// The checkers by name, and how one of them says that something is wrong.
//
// A checker that finds something throws Failure: the run ends there. One can be left out, to show that the
// others do not see what it sees (planted_test.cc).
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "proto/vocab/check.h"

namespace weft::simulation {

enum class Checker : uint8_t {
  kInvariants,  // ControlPlane::check_invariants(): holders match pools, locks balance. By CHECK, not by
                // Failure
  kPools,       // free + used + cached + in flight = total; what tables name is used
  kPages,       // no page in two places; none is handed out while a plan in flight names it
  kReturns,     // with nothing in flight, no page is in flight; at the end, none is used
  kPlan,        // a plan is well formed and within the limits
  kCopies,      // copies carried = copies priced; none that is not needed
  kStored,      // bytes told to be stored = bytes that the residency implies
  kBytes,       // every slot that is read holds what the sequence put there; readers hold what they read
  kHost,        // a copy on the host is loaded once it is there; nobody else writes what is spilled or loaded
  kHostBytes,   // what is loaded is the block that the request asked for
  kPins,        // what is pinned is found
  kTokens,      // tokens equal the oracle's, and an attempt's those of the attempts before it
  kNotices,     // every token once and in order, every request ended once, for a reason that it had
  kCounters,    // what the control plane counts is what it said
  kDeadlines,   // nothing outlives its deadline
  kEpochs,      // an epoch begins with every old process gone or out of its step
  kProgress,    // after faults stop, everything ends
};
inline constexpr int kCheckers = 17;

constexpr const char* checker_name(Checker checker) {
  constexpr std::array<const char*, kCheckers> kNames = {
      "invariants", "pools", "pages",  "returns", "plan",     "copies",    "stored", "bytes",   "host",
      "host bytes", "pins",  "tokens", "notices", "counters", "deadlines", "epochs", "progress"};
  return kNames[static_cast<size_t>(checker)];
}

struct Failure : std::runtime_error {
  Failure(Checker by, const std::string& text)
      : std::runtime_error(std::string(checker_name(by)) + ": " + text), checker(by) {}
  Checker checker;
};

class Verdict {
 public:
  bool on(Checker checker) const { return (left_out_ >> static_cast<int>(checker) & 1) == 0; }
  void leave_out(Checker checker) { left_out_ |= 1u << static_cast<int>(checker); }
  // The parts are joined only if `ok` is false.
  template <typename... Parts>
  void expect(Checker checker, bool ok, const Parts&... parts) const {
    if (!ok && on(checker)) [[unlikely]]
      throw Failure(checker, internal::join(parts...));
  }

 private:
  uint32_t left_out_ = 0;
};

}  // namespace weft::simulation
