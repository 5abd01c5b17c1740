// The blocking of the GEMM: plain code around the register tiles of cpu/gemm_tile.h.
//
// A task is a range of rows × a range of panels. Inside it k is cut into blocks so that the panels' part of a block
// (kBlockBytes) stays in L2 while every row tile passes over it; accumulators wait in y between blocks, exactly. Up to
// one tile of rows needs no such reuse: it streams each panel from end to end, as memory likes best.
#include "kernels/gemm.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/gemm_tile.h"
#include "proto/vocab/check.h"

namespace weft::kernels {
namespace {

constexpr int64_t kBlockSteps = 512;
constexpr int64_t kBlockPanels = 16;            // × kBlockSteps × 64 bytes = 512 KiB, half of a usual L2
constexpr int64_t kTaskMacs = int64_t{1} << 18;  // about 2 µs of work: less is not worth handing to a thread
constexpr int64_t kStepBytes = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

  void fill(const Gemm& p, int64_t panel, int64_t panel_bytes, int64_t step_begin, int slot, GemmTile& tile) const {
    const int64_t group = panel / panels_per_group_;
    const int64_t inside = panel % panels_per_group_;
    const int64_t stored = (p.group_begin + group) * group_panels_ + first_panel_ + inside;
    const char* data = static_cast<const char*>(p.weights.data) + stored * panel_bytes + step_begin * kStepBytes;
    tile.w[slot] = reinterpret_cast<const uint32_t*>(data);
    tile.y[slot] = p.y + group * width_ + inside * kPanel;
    tile.columns[slot] =
        static_cast<int>(std::min(kPanel, output_end_ - (first_panel_ + inside) * kPanel));
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

int64_t next_row_tile(int64_t rows_left) {
  if (rows_left <= kTileRows) return rows_left;
  // Two even tiles rather than a full one and a sliver.
  return rows_left < 2 * kTileRows ? ceil_div(rows_left, 2) : kTileRows;
}

struct Part {
  int64_t row_begin, row_end, panel_begin, panel_end;
};

// All panels of a part for one tile of rows. x points at the first row's first step.
void run_row_tile(const Work& work, const Part& part, GemmTile& tile, int64_t row, int64_t step) {
  const int64_t most = work.kernel.max_panels[tile.rows];
  for (int64_t panel = part.panel_begin; panel < part.panel_end; panel += tile.panels) {
    int64_t count = std::min(most, part.panel_end - panel);
    if (count > 4 && count < kTilePanels) count = 4;
    tile.panels = static_cast<int>(count);
    for (int slot = 0; slot < tile.panels; ++slot) {
      work.panels.fill(work.p, panel + slot, work.panel_bytes, work.step_begin + step, slot, tile);
      tile.y[slot] += row * work.p.y_stride;
    }
    work.kernel.run(tile);
  }
}

void run_steps(const Work& work, const Part& part, int64_t step, int64_t steps) {
  const int64_t row_bytes = work.p.x_stride * work.element_bytes;
  for (int64_t row = part.row_begin, rows = 0; row < part.row_end; row += rows) {
    rows = next_row_tile(part.row_end - row);
    GemmTile tile;
    tile.rows = static_cast<int>(rows);
    tile.steps = steps;
    tile.x = reinterpret_cast<const uint32_t*>(static_cast<const char*>(work.p.x) + row * row_bytes + step * 4);
    tile.x_stride_bytes = row_bytes;
    tile.y_stride = work.p.y_stride;
    tile.carry = step > 0;
    run_row_tile(work, part, tile, row, step);
  }
}

// The last k of an odd bf16 matrix, paired with zero as the packed weights are.
void run_odd_tail(const Work& work, const Part& part) {
  for (int64_t row = part.row_begin, rows = 0; row < part.row_end; row += rows) {
    rows = next_row_tile(part.row_end - row);
    uint32_t last[kTileRows] = {};
    for (int64_t r = 0; r < rows; ++r) {
      last[r] = static_cast<const uint16_t*>(work.p.x)[(row + r) * work.p.x_stride + 2 * work.steps];
    }
    GemmTile tile;
    tile.rows = static_cast<int>(rows);
    tile.steps = 1;
    tile.x = last;
    tile.x_stride_bytes = 4;
    tile.y_stride = work.p.y_stride;
    tile.carry = work.steps > 0;
    run_row_tile(work, part, tile, row, work.steps);
  }
}

void run_part(const Work& work, const Part& part) {
  const int64_t rows = part.row_end - part.row_begin;
  const int64_t block = rows <= kTileRows ? std::max<int64_t>(work.steps, 1) : kBlockSteps;
  if (work.steps > 0 || !work.odd_tail) {
    int64_t step = 0;
    do {  // once even without steps: the outputs are then zeros
      run_steps(work, part, step, std::min(block, work.steps - step));
      step += block;
    } while (step < work.steps);
  }
  if (work.odd_tail) run_odd_tail(work, part);
}

Work resolve(const Gemm& p) {
  const PackedMatrix& m = p.weights;
  const int64_t k_end = p.k_end < 0 ? m.k : p.k_end;
  const int64_t output_end = p.output_end < 0 ? m.group_outputs : p.output_end;
  CHECK(p.group_begin >= 0 && p.group_begin <= p.group_end && p.group_end <= m.groups, "groups ", p.group_begin, " … ",
        p.group_end, " of ", m.groups);
  CHECK(p.output_begin % kPanel == 0 && p.output_begin >= 0 && p.output_begin <= output_end &&
            output_end <= m.group_outputs,
        "outputs ", p.output_begin, " … ", output_end, " of ", m.group_outputs);
  CHECK(p.k_begin >= 0 && p.k_begin <= k_end && k_end <= m.k, "k ", p.k_begin, " … ", k_end, " of ", m.k);
  Work work{.p = p, .panels = PanelRange(p), .kernel = {}};
  const int64_t k = k_end - p.k_begin;
  switch (m.dtype) {
    case DType::kF32:
      work.kernel = f32_tile();
      work.panel_bytes = m.k * kStepBytes;
      work.step_begin = p.k_begin;
      work.steps = k;
      break;
    case DType::kBF16:
      CHECK(p.k_begin % 2 == 0 && (k_end % 2 == 0 || k_end == m.k), "k ", p.k_begin, " … ", k_end, " splits a pair");
      work.kernel = bf16_tile();
      work.element_bytes = 2;
      work.panel_bytes = ceil_div(m.k, 2) * kStepBytes;
      work.step_begin = p.k_begin / 2;
      work.steps = k / 2;
      work.odd_tail = k % 2 != 0;
      break;
  }
  work.panel_count = (p.group_end - p.group_begin) * work.panels.panels_per_group();
  return work;
}

}  // namespace

void gemm(const Gemm& p, Parallel& parallel) {
  const Work work = resolve(p);
  if (p.rows == 0 || work.panel_count == 0) return;
  const int64_t macs = p.rows * work.panel_count * kPanel * std::max<int64_t>(1, work.steps * 4 / work.element_bytes);
  // Four tasks a thread even out what else runs on the machine; panels first, because then each is read once.
  const int64_t wanted = parallel.thread_count() == 1
                             ? 1
                             : std::clamp<int64_t>(macs / kTaskMacs, 1, int64_t{4} * parallel.thread_count());
  const int64_t even = ceil_div(ceil_div(work.panel_count, wanted), 4) * 4;
  const int64_t panels = std::min(even, kBlockPanels);
  const int64_t panel_parts = ceil_div(work.panel_count, panels);
  const int64_t row_parts = std::clamp<int64_t>(wanted / panel_parts, 1, ceil_div(p.rows, 4 * kTileRows));
  const int64_t rows = ceil_div(ceil_div(p.rows, row_parts), kTileRows) * kTileRows;
  const int64_t tasks = panel_parts * ceil_div(p.rows, rows);
  parallel.run(tasks, [&](int64_t task, int) {
    const int64_t panel = task % panel_parts * panels;
    const int64_t row = task / panel_parts * rows;
    run_part(work, {row, std::min(p.rows, row + rows), panel, std::min(work.panel_count, panel + panels)});
  });
}

}  // namespace weft::kernels
