// What both blockings of the GEMM (gemm.cc, gemm_quantised.cc) know of a product: its panels, its outputs,
// its range of k, and the parts that tasks take.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/gemm_tile.h"
#include "kernels/gemm.h"

namespace weft::kernels {

inline constexpr int64_t kStepBytes = 64;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The panels of a product in output order, and how to reach each.
class PanelRange {
 public:
  explicit PanelRange(const Gemm& p)
      : output_end_(p.output_end < 0 ? p.weights.group_outputs : p.output_end),
        group_panels_(ceil_div(p.weights.group_outputs, kPanel)),
        first_panel_(p.output_begin / kPanel),
        panels_per_group_(ceil_div(output_end_, kPanel) - first_panel_),
        width_(output_end_ - p.output_begin) {}
  int64_t panels_per_group() const { return panels_per_group_; }

  const uint32_t* weights(const Gemm& p, int64_t panel, int64_t panel_bytes, int64_t step) const {
    const int64_t stored = (p.group_begin + panel / panels_per_group_) * group_panels_ + first_panel_ +
                           panel % panels_per_group_;
    const char* data = static_cast<const char*>(p.weights.data) + stored * panel_bytes + step * kStepBytes;
    return reinterpret_cast<const uint32_t*>(data);
  }
  float* outputs(const Gemm& p, int64_t panel, int64_t row) const {
    return p.y + row * p.y_stride + panel / panels_per_group_ * width_ + panel % panels_per_group_ * kPanel;
  }
  int columns(int64_t panel) const {
    return static_cast<int>(
        std::min(kPanel, output_end_ - (first_panel_ + panel % panels_per_group_) * kPanel));
  }

 private:
  int64_t output_end_, group_panels_, first_panel_, panels_per_group_, width_;
};

// A product with every default resolved.
struct Work {
  const Gemm& p;
  PanelRange panels;
  TileKernel kernel;
  int64_t element_bytes = 4;
  int64_t panel_bytes = 0;
  int64_t panel_count = 0;
  int64_t step_begin = 0;  // inside a panel
  int64_t steps = 0;       // whole ones
  bool odd_tail = false;   // bf16: a last k without a partner
};

inline int64_t next_row_tile(int64_t rows_left) {
  if (rows_left <= kTileRows) return rows_left;
  // Two even tiles rather than a full one and a sliver.
  return rows_left < 2 * kTileRows ? ceil_div(rows_left, 2) : kTileRows;
}

// A task.
struct Part {
  int64_t row_begin, row_end, panel_begin, panel_end;
};

// For quantised panels: every output of the part, decoded a few panels and a piece of k at a time.
void run_quantised_part(const Work& work, const Part& part);

}  // namespace weft::kernels
