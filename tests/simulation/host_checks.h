// What plans do to the second tier, seen from outside: which pages of the host pool hold a copy by the plans
// that are done, and who else touches the pages that a plan spills or loads.
//
// Checker "host". A page of the host pool is there once the plan that spilled it is done; until then nobody
// loads it, and while a plan in flight names it, no other plan spills to it. A context on the host reads only
// pages that are there, and as long as it may read them again nobody may take them. A page of a device that
// is spilled or loaded is written by nobody else in that step, or in any other plan in flight; one that is
// loaded is in no use before. What plans that are done have moved goes to the book, for checker "counters".
#pragma once

#include <array>
#include <vector>

#include "tests/simulation/core.h"

namespace weft::simulation {

class HostChecks {
 public:
  explicit HostChecks(Core& core);

  void check(const Plan& plan);  // its tables are written; not among core.unapplied yet
  void done(const Plan& plan);
  void given_up();  // all that are unapplied

 private:
  enum class Copy : uint8_t { kNone, kSpilling, kThere };
  enum class Use : uint8_t { kRead, kWritten, kCopiedTo };
  // Of a device's page, in one look over the plans in flight.
  struct Touched {
    uint64_t look = 0;
    bool written = false, moved = false;
  };
  template <typename F>
  void for_each_page(const Plan& plan, F f) const;
  template <typename F>
  void for_each_host_page(const Plan& plan, F f) const;
  void check_readers(const Plan& plan);
  void check_copies(const Plan& plan);
  void check_pages(const Plan& plan);
  void count(const Plan& plan) const;
  void expects(bool ok, const Plan& plan, const char* what, const HostCopy& copy) const;
  Copy& host(const HostCopy& copy) {
    return host_[static_cast<size_t>(copy.stream)].at(number(copy.host_page));
  }
  Touched& touched(kv::Stream stream, int rank, PageId page);

  Core& core_;
  std::array<std::vector<Copy>, kv::kStreams> host_;
  std::vector<uint64_t> read_;  // by page of entries: the look in which a plan in flight reads it
  std::array<std::vector<std::vector<Touched>>, kv::kStreams> touched_;
  uint64_t looks_ = 0;
};

}  // namespace weft::simulation
