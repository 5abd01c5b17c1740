#include "tools/demo/progress.h"

#include <ostream>
#include <string>

#include "proto/vocab/units.h"
#include "tools/ctl/table.h"

namespace weft::demo {

void ProgressBar::show(uint64_t done, uint64_t total) {
  if (total == 0 || done > total) return;
  // A prompt out of the prefix cache is done at the first look: nothing to draw.
  if (done == total && !shown_) return;
  shown_ = true;
  const auto elapsed = static_cast<uint64_t>((monotonic_now() - started_).count());
  const std::string text = std::to_string(100 * done / total) + " %  " +
                           human_count(static_cast<int64_t>(done)) + " of " +
                           human_count(static_cast<int64_t>(total)) + " tokens read, " +
                           ctl::human_rate(done, elapsed) + " tokens/s";
  if (terminal_.error_is_terminal) {
    constexpr uint64_t kCells = 30;
    std::string bar;
    for (uint64_t cell = 0; cell < kCells; ++cell) bar += cell * total < done * kCells ? "\u2588" : "\u2591";
    out_ << "\r\033[K      " << bar << " " << text << std::flush;
    drawn_ = true;
  } else if (10 * done / total > tenths_shown_) {
    tenths_shown_ = 10 * done / total;
    out_ << "      " << text << "\n" << std::flush;
  }
}

void ProgressBar::clear() {
  if (drawn_) out_ << "\r\033[K" << std::flush;
  drawn_ = false;
}

}  // namespace weft::demo
