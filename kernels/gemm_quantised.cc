// The blocking of the GEMM over quantised panels: a few panels and a piece of k are decoded once into a
// buffer that looks like dense panels, then every tile of rows walks over it. With one tile of rows the
// buffer is small enough to stay in L1 and is used once: decoding then costs less than reading the codes from
// memory.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/decode.h"
#include "kernels/cpu/dispatch.h"
#include "kernels/gemm_work.h"
#include "kernels/quantised.h"
#include "kernels/quantised_panel.h"

namespace weft::kernels {
namespace {

constexpr int64_t kStrip = 4;                              // panels decoded together
constexpr int64_t kPieceSteps = 1024;                      // decoded at a time: whole records of every kind
constexpr int64_t kPieceKOneTile = 128;                    // when nothing is used twice
constexpr int64_t kPieceBytes = kPieceSteps * kStepBytes;  // of one panel; all of a strip lie in L2

class QuantisedPart {
 public:
  QuantisedPart(const Work& work, const Part& part)
      : work_(work),
        part_(part),
        layout_(work.p.weights.format, work.p.weights.k),
        decode_(decode_record(work.p.weights.format, work.p.weights.dtype)),
        by_block_(work.p.weights.format == PanelFormat::kFp8),
        k_begin_(work.p.k_begin),
        k_end_(work.p.k_end < 0 ? work.p.weights.k : work.p.k_end),
        k_per_step_(4 / work.element_bytes) {}

  void run() {
    const int64_t piece =
        part_.row_end - part_.row_begin <= kTileRows ? kPieceKOneTile : kPieceSteps * k_per_step_;
    for (panel_begin_ = part_.panel_begin; panel_begin_ < part_.panel_end; panel_begin_ = panel_end_) {
      panel_end_ = std::min(panel_begin_ + kStrip, part_.panel_end);
      if (k_begin_ == k_end_) write_zeros();
      for (piece_begin_ = k_begin_; piece_begin_ < k_end_; piece_begin_ = piece_end_) {
        piece_end_ = std::min(k_end_, (piece_begin_ / piece + 1) * piece);
        decode_piece();
        for (int64_t row = part_.row_begin, rows = 0; row < part_.row_end; row += rows) {
          rows = next_row_tile(part_.row_end - row);
          run_row_tile(row, rows);
        }
      }
    }
  }

 private:
  const std::byte* stored(int64_t panel) const {
    return reinterpret_cast<const std::byte*>(work_.panels.weights(work_.p, panel, work_.panel_bytes, 0));
  }
  // The k index that the buffer starts with.
  int64_t buffer_begin() const { return piece_begin_ / layout_.quantum() * layout_.quantum(); }
  std::byte* decoded(int64_t panel, int64_t k) {
    return buffer_ + (panel - panel_begin_) * kPieceBytes + (k - buffer_begin()) / k_per_step_ * kStepBytes;
  }

  void decode_piece() {
    const int64_t record_k = layout_.record_k();
    for (int64_t panel = panel_begin_; panel < panel_end_; ++panel) {
      for (int64_t k = buffer_begin(); k < piece_end_;) {
        const int64_t base = k / record_k * record_k;
        const int64_t end =
            std::min(base + record_k, ceil_div(piece_end_, layout_.quantum()) * layout_.quantum());
        const std::byte* record = stored(panel) + layout_.record(k);
        // What is decoded next of this panel, or of the one behind it.
        const int64_t ahead = layout_.record(record_k) - layout_.record(0);
        for (int64_t at = 0; at < ahead; at += 64) __builtin_prefetch(record + ahead + at, 0, 3);
        decode_(record, k - base, end - base, decoded(panel, k));
        k = end;
      }
    }
  }

  void write_zeros() {
    for (int64_t panel = panel_begin_; panel < panel_end_; ++panel) {
      for (int64_t row = part_.row_begin; row < part_.row_end; ++row) {
        std::fill_n(work_.panels.outputs(work_.p, panel, row), work_.panels.columns(panel), 0.0f);
      }
    }
  }

  void run_row_tile(int64_t row, int64_t rows) {
    for (int64_t panel = panel_begin_, panels = 0; panel < panel_end_; panel += panels) {
      panels = std::min<int64_t>(work_.kernel.max_panels[rows], panel_end_ - panel);
      GemmTile tile;
      tile.rows = static_cast<int>(rows);
      tile.panels = static_cast<int>(panels);
      for (int i = 0; i < tile.panels; ++i) {
        tile.y[i] = work_.panels.outputs(work_.p, panel + i, row);
        tile.columns[i] = work_.panels.columns(panel + i);
      }
      tile.y_stride = work_.p.y_stride;
      by_block_ ? scale_blocks(tile, panel) : scale_sum(tile, panel);
      walk(tile, row, panel);
    }
  }

  // kFp8: each block of k sums up from +0 and is added with its scale.
  void scale_blocks(GemmTile& tile, int64_t panel) const {
    for (int i = 0; i < tile.panels; ++i) {
      tile.scales[i] = reinterpret_cast<const float*>(stored(panel + i) + layout_.record(piece_begin_));
    }
    tile.add = piece_begin_ != k_begin_;
    tile.block_steps = kFp8Block / k_per_step_;
    tile.first_steps = (kFp8Block - piece_begin_ % kFp8Block) / k_per_step_;
    tile.scale_stride = (layout_.record(kFp8Block) - layout_.record(0)) / static_cast<int64_t>(sizeof(float));
  }

  // kFp4: the sum waits in y between pieces, and is scaled when it is whole.
  void scale_sum(GemmTile& tile, int64_t panel) const {
    tile.carry = piece_begin_ != k_begin_;
    for (int i = 0; i < tile.panels && piece_end_ == k_end_; ++i) {
      tile.scales[i] = reinterpret_cast<const float*>(stored(panel + i));
    }
  }

  // The accumulators of a tile over the piece.
  void walk(GemmTile& tile, int64_t row, int64_t panel) {
    const int64_t row_bytes = work_.p.x_stride * work_.element_bytes;
    const int64_t count = piece_end_ - piece_begin_;
    const char* x = static_cast<const char*>(work_.p.x) + row * row_bytes +
                    (piece_begin_ - k_begin_) * work_.element_bytes;
    tile.x = reinterpret_cast<const uint32_t*>(x);
    tile.x_stride_bytes = row_bytes;
    tile.steps = ceil_div(count, k_per_step_);
    for (int i = 0; i < tile.panels; ++i) {
      tile.w[i] = reinterpret_cast<const uint32_t*>(decoded(panel + i, piece_begin_));
    }
    if (count % k_per_step_ != 0) pair_with_zero(tile, x, row_bytes, count * work_.element_bytes);
    work_.kernel.run(tile);
  }

  // bf16: the last k of an odd number has no partner in x.
  void pair_with_zero(GemmTile& tile, const char* x, int64_t row_bytes, int64_t bytes) {
    constexpr int64_t kStride = kPieceSteps * 4;
    for (int r = 0; r < tile.rows; ++r) {
      std::memcpy(padded_x_ + r * kStride, x + r * row_bytes, static_cast<size_t>(bytes));
      std::memset(padded_x_ + r * kStride + bytes, 0, 2);
    }
    tile.x = reinterpret_cast<const uint32_t*>(padded_x_);
    tile.x_stride_bytes = kStride;
  }

  const Work& work_;
  const Part& part_;
  const QuantisedPanel layout_;
  const DecodeRecord decode_;
  const bool by_block_;
  const int64_t k_begin_, k_end_, k_per_step_;
  int64_t panel_begin_ = 0, panel_end_ = 0, piece_begin_ = 0, piece_end_ = 0;
  alignas(64) std::byte buffer_[kStrip * kPieceBytes];
  alignas(64) std::byte padded_x_[kTileRows * kPieceSteps * 4];
};

// Few rows go from memory to accumulators without a buffer: all of them, tile by tile, over a few panels.
// Each tile decodes the codes once more, which for so many tiles costs less than the way through the buffer.
constexpr int64_t kStreamTilesFp8 = 3, kStreamTilesFp4 = 2;
static_assert(kStreamRows == kTileRows);

bool may_stream(const Work& work, const Part& part) {
  const Gemm& p = work.p;
  const int64_t k_end = p.k_end < 0 ? p.weights.k : p.k_end;
  const bool fp8 = p.weights.format == PanelFormat::kFp8;
  const int64_t quantum = QuantisedPanel(p.weights.format, p.weights.k).quantum();
  return p.weights.dtype == DType::kBF16 && have_bf16_dot() && have_byte_permutes() &&
         part.row_end - part.row_begin <= (fp8 ? kStreamTilesFp8 : kStreamTilesFp4) * kStreamRows &&
         p.k_begin % quantum == 0 && p.k_begin < k_end && k_end % (fp8 ? 2 : quantum) == 0;
}

void stream(const Work& work, const Part& part) {
  const Gemm& p = work.p;
  const int64_t first_rows = next_row_tile(part.row_end - part.row_begin);
  const int64_t most = first_rows <= 2 ? kStreamPanels : kStreamPanels / 2;  // as many as registers hold
  QuantisedStream s;
  s.k_begin = p.k_begin;
  s.k_end = p.k_end < 0 ? p.weights.k : p.k_end;
  s.x_stride_bytes = p.x_stride * 2;
  s.y_stride = p.y_stride;
  for (int64_t panel = part.panel_begin; panel < part.panel_end; panel += most) {
    s.panels = static_cast<int>(std::min(most, part.panel_end - panel));
    for (int64_t row = part.row_begin; row < part.row_end; row += s.rows) {
      s.rows = static_cast<int>(next_row_tile(part.row_end - row));
      s.x = static_cast<const char*>(p.x) + row * s.x_stride_bytes;
      for (int i = 0; i < s.panels; ++i) {
        s.w[i] = reinterpret_cast<const std::byte*>(work.panels.weights(p, panel + i, work.panel_bytes, 0));
        s.y[i] = work.panels.outputs(p, panel + i, row);
        s.columns[i] = work.panels.columns(panel + i);
      }
      p.weights.format == PanelFormat::kFp8 ? stream_fp8_avx512vbmi(s) : stream_fp4_avx512vbmi(s);
    }
  }
}

}  // namespace

void run_quantised_part(const Work& work, const Part& part) {
  may_stream(work, part) ? stream(work, part) : QuantisedPart(work, part).run();
}

}  // namespace weft::kernels
