// How far the start of the workers is, all ranks together: a figure that only grows.
//
// A rank tells how many tensors it has to load only when it has begun; until then it is taken to have as many
// as the rank with the most. A better guess, or a worker that died and begins again, would take progress
// back: the best figure so far is kept instead. Everything is loaded when the whole is done, and not before.
// Pure.
#pragma once

#include <cstdint>
#include <span>

namespace weft::daemon {

struct TensorCount {
  uint64_t done = 0;
  uint64_t total = 0;  // 0: not known yet
};

class StartProgress {
 public:
  void update(std::span<const TensorCount> ranks);
  void begin_again() { shown_ = {}; }
  TensorCount shown() const { return shown_; }

 private:
  TensorCount shown_;
};

}  // namespace weft::daemon
