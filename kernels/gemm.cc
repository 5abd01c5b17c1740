// The blocking of the GEMM over dense panels, and how a product is cut into tasks: plain code around the
// register tiles of cpu/gemm_tile.h.
//
// A task is a range of rows × a range of panels. It goes through its panels a few at a time (a *strip*) and
// through k in blocks, so that a strip's block stays in L2 while every row tile passes over it; meanwhile the
// next block is prefetched, so that reading memory and computing overlap. Accumulators wait in y between
// blocks, exactly. A single tile of rows has no reuse: it streams each strip from end to end, as memory likes
// best.
#include "kernels/gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cpu/gemm_tile.h"
#include "kernels/gemm_work.h"
#include "kernels/quantised_panel.h"
#include "proto/vocab/check.h"

namespace weft::kernels {
namespace {

constexpr int64_t kBlockSteps = 1024;  // × 4 panels × 64 bytes = 256 KiB, twice of which fits a usual L2
// About 2 µs of work: less is not worth handing to a thread. In multiply-adds; a byte that comes from memory
// takes as long as four.
constexpr int64_t kTaskCost = int64_t{1} << 18;
constexpr int64_t kByteCost = 4;

// What one pass of row tiles needs to know besides the tile: where it is, and what comes after.
struct Block {
  int64_t panel_begin, panel_end;  // the strip
  int64_t step, steps;
  // The block after this one; no panels: none.
  int64_t next_panel = 0, next_panels = 0, next_step = 0, next_steps = 0;
};

// The share of row tile `index` of `count` in fetching the next block, panel by panel of the strip.
void share_fetch(const Work& work, const Block& block, int64_t index, int64_t count, int64_t panel,
                 GemmTile& tile) {
  const int64_t rounds = std::max<int64_t>(1, block.steps / kFetchEvery);
  tile.fetch_per_round = std::min(kFetchEvery, ceil_div(ceil_div(block.next_steps, rounds), count));
  const int64_t begin = index * rounds * tile.fetch_per_round;
  tile.fetch_steps = std::clamp<int64_t>(block.next_steps - begin, 0, rounds * tile.fetch_per_round);
  for (int i = 0; i < tile.panels; ++i) {
    // A narrower last strip: fetching its last panel again is harmless.
    const int64_t ahead = std::min(panel - block.panel_begin + i, block.next_panels - 1);
    tile.fetch[i] = work.panels.weights(work.p, block.next_panel + ahead, work.panel_bytes,
                                        work.step_begin + block.next_step + begin);
  }
}

// All panels of a strip for one tile of rows.
void run_row_tile(const Work& work, const Block& block, GemmTile& tile, int64_t row, int64_t index,
                  int64_t count) {
  const int64_t most = work.kernel.max_panels[tile.rows];
  for (int64_t panel = block.panel_begin; panel < block.panel_end; panel += tile.panels) {
    int64_t panels = std::min(most, block.panel_end - panel);
    if (panels > 4 && panels < kTilePanels) panels = 4;
    tile.panels = static_cast<int>(panels);
    for (int i = 0; i < tile.panels; ++i) {
      tile.w[i] = work.panels.weights(work.p, panel + i, work.panel_bytes, work.step_begin + block.step);
      tile.y[i] = work.panels.outputs(work.p, panel + i, row);
      tile.columns[i] = work.panels.columns(panel + i);
    }
    if (block.next_panels > 0) share_fetch(work, block, index, count, panel, tile);
    work.kernel.run(tile);
  }
}

// Every row tile over one block. `tail` set: the block is the lone last k of an odd bf16 matrix, which is
// paired with zero as the packed weights are.
void run_block(const Work& work, const Part& part, const Block& block, bool tail) {
  const int64_t row_bytes = work.p.x_stride * work.element_bytes;
  const char* x = static_cast<const char*>(work.p.x) + block.step * 4;
  const int64_t count = ceil_div(part.row_end - part.row_begin, kTileRows);
  for (int64_t row = part.row_begin, rows = 0, index = 0; row < part.row_end; row += rows, ++index) {
    rows = next_row_tile(part.row_end - row);
    GemmTile tile;
    tile.rows = static_cast<int>(rows);
    tile.steps = block.steps;
    tile.x = reinterpret_cast<const uint32_t*>(x + row * row_bytes);
    tile.x_stride_bytes = row_bytes;
    tile.y_stride = work.p.y_stride;
    tile.carry = block.step > 0;
    uint32_t last[kTileRows] = {};
    if (tail) {
      for (int64_t r = 0; r < rows; ++r) std::memcpy(&last[r], x + (row + r) * row_bytes, 2);
      tile.x = last;
      tile.x_stride_bytes = 4;
    }
    run_row_tile(work, block, tile, row, index, count);
  }
}

void run_part(const Work& work, const Part& part) {
  const int64_t rows = part.row_end - part.row_begin;
  const bool one_tile = rows <= kTileRows;
  const int64_t strip = rows <= kTileRows / 2 ? kTilePanels : kTilePanels / 2;
  const int64_t block_steps = one_tile ? std::max<int64_t>(work.steps, 1) : kBlockSteps;
  for (int64_t panel = part.panel_begin; panel < part.panel_end; panel += strip) {
    Block block{
        .panel_begin = panel, .panel_end = std::min(panel + strip, part.panel_end), .step = 0, .steps = 0};
    do {  // once even without steps: the outputs are then zeros
      block.steps = std::min(block_steps, work.steps - block.step);
      if (!one_tile) {
        const int64_t after = block.step + block.steps;
        const bool same_strip = after < work.steps;
        block.next_panel = same_strip ? panel : block.panel_end;
        block.next_panels = std::min(strip, part.panel_end - block.next_panel);
        block.next_step = same_strip ? after : 0;
        block.next_steps = std::min(block_steps, work.steps - block.next_step);
      }
      run_block(work, part, block, false);
      block.step += block.steps;
    } while (block.step < work.steps);
    if (work.odd_tail)
      run_block(work, part,
                {.panel_begin = panel, .panel_end = block.panel_end, .step = work.steps, .steps = 1}, true);
  }
}

Work resolve(const Gemm& p) {
  const PackedMatrix& m = p.weights;
  const int64_t k_end = p.k_end < 0 ? m.k : p.k_end;
  const int64_t output_end = p.output_end < 0 ? m.group_outputs : p.output_end;
  CHECK(p.group_begin >= 0 && p.group_begin <= p.group_end && p.group_end <= m.groups, "groups ",
        p.group_begin, " … ", p.group_end, " of ", m.groups);
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
      CHECK(p.k_begin % 2 == 0 && (k_end % 2 == 0 || k_end == m.k), "k ", p.k_begin, " … ", k_end,
            " splits a pair");
      work.kernel = bf16_tile();
      work.element_bytes = 2;
      work.panel_bytes = ceil_div(m.k, 2) * kStepBytes;
      work.step_begin = p.k_begin / 2;
      work.steps = k / 2;
      work.odd_tail = k % 2 != 0;
      break;
  }
  if (m.format != PanelFormat::kDense) work.panel_bytes = QuantisedPanel(m.format, m.k).bytes();
  work.panel_count = (p.group_end - p.group_begin) * work.panels.panels_per_group();
  return work;
}

// A product and how it is cut into tasks: ranges of panels first, because then each is read once.
struct Cut {
  Work work;
  int64_t panels = 1, panel_parts = 0;  // of a task; tasks side by side
  int64_t rows = 1;                     // of a task
  int64_t tasks = 0;
};

int64_t cost_of(const Work& work) {
  const int64_t k = std::max<int64_t>(1, work.steps * 4 / work.element_bytes);
  const int64_t macs = work.p.rows * work.panel_count * kPanel * k;
  const int64_t bytes = work.panel_count * work.panel_bytes * k / std::max<int64_t>(1, work.p.weights.k);
  return std::max(macs, bytes * kByteCost);
}

void cut(Cut& cut, int64_t wanted, int threads) {
  const Work& work = cut.work;
  int64_t strip = kTilePanels;
  while (strip > 1 && threads > 1 && work.panel_count < strip * threads) strip /= 2;
  cut.panels = ceil_div(ceil_div(work.panel_count, wanted), strip) * strip;
  cut.panel_parts = ceil_div(work.panel_count, cut.panels);
  const int64_t row_parts =
      std::clamp<int64_t>(wanted / cut.panel_parts, 1, ceil_div(work.p.rows, 4 * kTileRows));
  cut.rows = ceil_div(ceil_div(work.p.rows, row_parts), kTileRows) * kTileRows;
  cut.tasks = cut.panel_parts * ceil_div(work.p.rows, cut.rows);
}

void run_task(const Cut& cut, int64_t task) {
  const Work& work = cut.work;
  const int64_t panel = task % cut.panel_parts * cut.panels;
  const int64_t row = task / cut.panel_parts * cut.rows;
  const Part part{row, std::min(work.p.rows, row + cut.rows), panel,
                  std::min(work.panel_count, panel + cut.panels)};
  work.p.weights.format == PanelFormat::kDense ? run_part(work, part) : run_quantised_part(work, part);
}

}  // namespace

void gemm(std::span<const Gemm> products, Parallel& parallel) {
  const int threads = parallel.thread_count();
  std::vector<Cut> cuts;
  cuts.reserve(products.size());
  int64_t cost = 0;
  for (const Gemm& p : products) {
    Work work = resolve(p);
    if (p.rows == 0 || work.panel_count == 0) continue;
    cost += cost_of(work);
    cuts.push_back({.work = work});
  }
  // Four tasks a thread even out what else runs on the machine.
  const int64_t most = threads == 1 ? 1 : int64_t{4} * threads;
  const int64_t task_cost = std::max(kTaskCost, cost / most);
  std::vector<int64_t> ends;  // of each product's tasks among all
  ends.reserve(cuts.size());
  int64_t tasks = 0;
  for (Cut& each : cuts) {
    cut(each, std::clamp<int64_t>(cost_of(each.work) / task_cost, 1, most), threads);
    ends.push_back(tasks += each.tasks);
  }
  parallel.run(tasks, [&](int64_t task, int) {
    const auto at = static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), task) - ends.begin());
    run_task(cuts[at], task - (ends[at] - cuts[at].tasks));
  });
}

}  // namespace weft::kernels
