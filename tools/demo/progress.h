// How far a prompt has been read, on the standard error: a bar that redraws itself on a terminal, a line per
// tenth elsewhere.
#pragma once

#include <cstdint>
#include <iosfwd>

#include "proto/vocab/clock.h"
#include "tools/ctl/context.h"

namespace weft::demo {

class ProgressBar {
 public:
  ProgressBar(std::ostream& out, const ctl::Terminal& terminal) : out_(out), terminal_(terminal) {}
  void start() { started_ = monotonic_now(); }
  void show(uint64_t done, uint64_t total);
  void clear();

 private:
  std::ostream& out_;
  const ctl::Terminal& terminal_;
  Time started_ = monotonic_now();
  uint64_t tenths_shown_ = 0;
  bool shown_ = false;  // anything at all
  bool drawn_ = false;  // a bar stands on the terminal's line
};

}  // namespace weft::demo
