#include "kernels/indexer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <memory>

#include "kernels/bf16.h"
#include "kernels/cpu/candidate_list.h"
#include "kernels/cpu/index_panel.h"
#include "kernels/cpu/index_tile.h"
#include "kernels/elementwise.h"
#include "kernels/fp8.h"
#include "kernels/fp8_rows.h"
#include "proto/vocab/check.h"

namespace weft::kernels {
namespace {

constexpr int64_t kChunkKeys = 256;  // scored before they are offered; 256 keys × 64 × 4 B lie in L2
constexpr int64_t kScoreStride = kChunkKeys + 16;  // rows do not share cache sets
constexpr int64_t kTileRowsMax = 64;
constexpr int64_t kTileQueryBytes = 64 << 10;  // packed queries of a row tile stay in L1 or near it
constexpr int64_t kPartKeysMin = 2048;         // splitting keys finer costs more in merging than it spreads

int64_t panel_width(int64_t block_tokens) { return std::min<int64_t>(16, block_tokens); }
// Words (32 bits) of a key: one per float32, one per pair of bf16.
int64_t word_count(DType dtype, int64_t width) { return dtype == DType::kF32 ? width : width / 2; }

void check_shape(int64_t width, DType dtype, int64_t block_tokens) {
  CHECK(width > 0 && (dtype == DType::kF32 || width % 2 == 0), "index key width ", width);
  CHECK(block_tokens >= 8 && (block_tokens & (block_tokens - 1)) == 0 && block_tokens <= kChunkKeys,
        "block of ", block_tokens, " tokens");
}

// A slot's element i, counted in elements of the page's dtype.
int64_t element_index(int64_t width, DType dtype, int64_t block_tokens, int64_t slot, int64_t i) {
  const int64_t lanes = panel_width(block_tokens);
  const int64_t panel = slot / lanes * width * lanes;
  if (dtype == DType::kF32) return panel + i * lanes + slot % lanes;
  return panel + i / 2 * 2 * lanes + slot % lanes * 2 + i % 2;
}

// Keys of some consecutive blocks, as panels; columns of the score matrix are the panels' slots side by side.
struct KeyChunk {
  static constexpr size_t kPanelsMax = kChunkKeys / 8;
  // Keys at consecutive positions in consecutive columns: one block, or several full ones.
  struct Run {
    int64_t column, first_position, count;
  };
  int64_t panel_count = 0;
  std::array<const float*, kPanelsMax> panels;
  const std::byte* next = nullptr;  // where the chunk after this one begins, if there is one
  std::array<int64_t, kPanelsMax> first_positions;
  // FP8: the panels as bf16, and the scales of their columns.
  std::vector<float> decoded;
  alignas(64) std::array<float, kChunkKeys> scales;

  int64_t run_count = 0;
  std::array<Run, kPanelsMax> run_storage;
  std::span<const Run> runs() const { return {run_storage.data(), static_cast<size_t>(run_count)}; }
};

void prefetch(const std::byte* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// Panel i of a block of FP8 keys, as the chunk's next panel.
const float* decode_panel(const IndexSelect& p, const IndexKeys& block, int64_t i, KeyChunk& chunk) {
  const int64_t lanes = panel_width(p.block_tokens);
  const int64_t at = chunk.panel_count - 1;
  float* panel = chunk.decoded.data() + at * word_count(p.dtype, p.width) * lanes;
  const auto* codes = static_cast<const uint8_t*>(block.page_layer);
  decode_index_panel(codes + i * lanes * p.width, p.width, lanes, panel);
  std::memcpy(chunk.scales.data() + at * lanes, codes + p.block_tokens * p.width + 4 * i * lanes,
              static_cast<size_t>(lanes) * sizeof(float));
  return panel;
}

// How many of the last blocks fit into a chunk; at least one, if there are any.
size_t blocks_that_fit(const IndexSelect& p, std::span<const IndexKeys> blocks) {
  const int64_t lanes = panel_width(p.block_tokens);
  size_t count = 0;
  for (int64_t room = kChunkKeys / lanes; count < blocks.size(); ++count) {
    room -= (blocks[blocks.size() - 1 - count].valid + lanes - 1) / lanes;
    if (room < 0) break;
  }
  return count;
}

// Takes as many blocks as fit from the back of `blocks`.
void next_chunk(const IndexSelect& p, std::span<const IndexKeys>& blocks, KeyChunk& chunk) {
  const int64_t lanes = panel_width(p.block_tokens);
  const int64_t panel_words = word_count(p.dtype, p.width) * lanes;
  const auto panels_of = [&](const IndexKeys& block) { return (block.valid + lanes - 1) / lanes; };
  const size_t first = blocks.size() - blocks_that_fit(p, blocks);
  const auto later = blocks.first(first);
  const size_t next = first - blocks_that_fit(p, later);
  chunk.next = later.empty() ? nullptr : static_cast<const std::byte*>(later[next].page_layer);
  chunk.panel_count = 0;
  chunk.run_count = 0;
  if (p.fp8_keys) chunk.decoded.resize(static_cast<size_t>(kChunkKeys / lanes * panel_words));
  KeyChunk::Run* last = nullptr;
  for (size_t at = first; at < blocks.size(); ++at) {
    const IndexKeys& block = blocks[at];
    const int64_t column = chunk.panel_count * lanes;
    // FP8 keys are read here, in order of blocks; the next chunk's meanwhile.
    if (p.fp8_keys && next + at - first < first) {
      prefetch(static_cast<const std::byte*>(blocks[next + at - first].page_layer),
               p.block_tokens * (p.width + 4));
    }
    for (int64_t i = 0; i < panels_of(block); ++i) {
      const auto panel = static_cast<size_t>(chunk.panel_count++);
      chunk.panels[panel] = p.fp8_keys ? decode_panel(p, block, i, chunk)
                                       : static_cast<const float*>(block.page_layer) + i * panel_words;
      chunk.first_positions[panel] = block.first_position + i * lanes;
    }
    if (block.valid == 0) continue;
    if (last != nullptr && last->column + last->count == column &&
        last->first_position + last->count == block.first_position) {
      last->count += block.valid;
    } else {
      last = &chunk.run_storage[static_cast<size_t>(chunk.run_count++)];
      *last = {column, block.first_position, block.valid};
    }
  }
  blocks = blocks.first(first);
}

// Some rows of the call with their queries packed for the tile kernel, and where their scores and candidates
// go.
class RowTile {
 public:
  RowTile() = default;

  void load(const IndexSelect& p, int64_t row_begin, int64_t row_end) {
    words_ = word_count(p.dtype, p.width);
    rows_ = row_end - row_begin;
    limits_.assign(static_cast<size_t>(rows_), std::numeric_limits<int64_t>::max());
    if (p.row_positions != nullptr) std::copy_n(p.row_positions + row_begin, rows_, limits_.begin());
    const int64_t pairs = rows_ * p.heads;
    const int64_t tile_count = (pairs + kTilePairs - 1) / kTilePairs;
    packed_.assign(static_cast<size_t>(tile_count * words_ * kTilePairs), 0.0f);
    scores_.resize(static_cast<size_t>(rows_ * kScoreStride));
    tiles_.assign(static_cast<size_t>(tile_count), QueryTile{});
    for (int64_t t = 0; t < tile_count; ++t) {
      const int64_t begin = t * kTilePairs;
      load_tile(p, row_begin, begin, std::min<int64_t>(kTilePairs, pairs - begin),
                tiles_[static_cast<size_t>(t)], packed_.data() + t * words_ * kTilePairs);
    }
  }

  // Fills the scores of the chunk, except of panels that no row of a tile sees. `fetch_keys`: they come from
  // memory, those that follow are fetched early.
  void score(const KeyChunk& chunk, int64_t lanes, bool fetch_keys, ScoreTile kernel) {
    for (int64_t i = 0; i < chunk.panel_count; i += 2) {
      const auto at = static_cast<size_t>(i);
      KeyPanels keys{.count = static_cast<int>(std::min<int64_t>(2, chunk.panel_count - i)),
                     .width = lanes,
                     .word_count = words_};
      for (size_t j = 0; j < static_cast<size_t>(keys.count); ++j) keys.panels[j] = chunk.panels[at + j];
      const auto* ahead = at + 2 < static_cast<size_t>(chunk.panel_count)
                              ? reinterpret_cast<const std::byte*>(chunk.panels[at + 2])
                              : chunk.next;
      Fetch fetch(fetch_keys ? ahead : nullptr, 2 * words_ * lanes * 4, std::ssize(tiles_));
      for (const QueryTile& tile : tiles_) {
        fetch.next();
        if (tile.last_position < chunk.first_positions[at]) continue;
        kernel(tile, keys, scores_.data() + i * lanes, kScoreStride);
      }
    }
  }

  // After score(), of FP8 keys: the rows that see the chunk.
  void apply_scales(const KeyChunk& chunk, int64_t lanes) {
    for (int64_t row = 0; row < rows_; ++row) {
      if (chunk.panel_count == 0 || limit(row) < chunk.first_positions[0]) continue;
      multiply(scores_.data() + row * kScoreStride, chunk.scales.data(), chunk.panel_count * lanes);
    }
  }

  const float* scores(int64_t row) const { return scores_.data() + row * kScoreStride; }
  int64_t rows() const { return rows_; }
  int64_t limit(int64_t row) const { return limits_[static_cast<size_t>(row)]; }

 private:
  void load_tile(const IndexSelect& p, int64_t row_begin, int64_t pair_begin, int64_t pair_count,
                 QueryTile& tile, float* packed) {
    tile.words = packed;
    tile.pairs = static_cast<int>(pair_count);
    for (int64_t i = 0; i < pair_count; ++i) {
      const int64_t row = (pair_begin + i) / p.heads, head = (pair_begin + i) % p.heads;
      const int64_t pair = (row_begin + row) * p.heads + head;
      if (head == 0) tile.first_heads |= 1u << i;
      tile.rows[i] = static_cast<int32_t>(row);
      tile.weights[i] = p.weights[pair];
      tile.last_position =
          std::max(i == 0 ? std::numeric_limits<int64_t>::min() : tile.last_position, limit(row));
      const auto* from = static_cast<const std::byte*>(p.query) + pair * words_ * 4;
      for (int64_t w = 0; w < words_; ++w) std::memcpy(packed + w * kTilePairs + i, from + w * 4, 4);
    }
  }

  // Fetches memory share by share: all at once would wait for free places in the line buffers.
  class Fetch {
   public:
    Fetch(const std::byte* from, int64_t bytes, int64_t shares)
        : from_(from), bytes_(bytes), shares_(shares) {}
    void next() {
      if (from_ == nullptr) return;
      const int64_t end = bytes_ / 64 * ++done_ / shares_ * 64;
      prefetch(from_ + at_, end - at_);
      at_ = end;
    }

   private:
    const std::byte* from_;
    int64_t bytes_, shares_, done_ = 0, at_ = 0;
  };

  int64_t words_ = 0;
  int64_t rows_ = 0;
  std::vector<int64_t> limits_;
  std::vector<QueryTile> tiles_;
  std::vector<float> packed_;
  std::vector<float> scores_;  // [rows][kScoreStride], columns as in the chunk
};

struct Workspace {
  RowTile rows;
  KeyChunk chunk;
  std::vector<CandidateList> lists;  // one per row of the tile
};

void check_call(const IndexSelect& p) {
  check_shape(p.width, p.dtype, p.block_tokens);
  CHECK(!p.fp8_keys || (p.dtype == DType::kBF16 && p.width <= kFp8Group), "index key width ", p.width);
  CHECK(p.heads > 0 && p.rows >= 0, "heads ", p.heads, ", rows ", p.rows);
  int64_t next = std::numeric_limits<int64_t>::min();
  for (const IndexKeys& block : p.keys) {
    CHECK(block.valid >= 0 && block.valid <= p.block_tokens && block.first_position >= next);
    next = block.first_position + block.valid;
  }
  CHECK_LE(next, int64_t{std::numeric_limits<int32_t>::max()});
}

// Streams `keys`, the newest first, past rows [row_begin, row_end), leaving their best in the workspace's
// lists.
void select_rows(const IndexSelect& p, int64_t row_begin, int64_t row_end, std::span<const IndexKeys> keys,
                 Workspace& work) {
  const ScoreTile kernel = score_tile(p.dtype);
  const int64_t lanes = panel_width(p.block_tokens);
  work.rows.load(p, row_begin, row_end);
  const int64_t rows = work.rows.rows();
  if (static_cast<int64_t>(work.lists.size()) < rows) work.lists.resize(static_cast<size_t>(rows));
  int64_t last = std::numeric_limits<int64_t>::min();
  for (int64_t row = 0; row < rows; ++row) {
    work.lists[static_cast<size_t>(row)].reset(p.top_k);
    last = std::max(last, work.rows.limit(row));
  }
  while (!keys.empty() && keys.back().first_position > last) keys = keys.first(keys.size() - 1);
  while (!keys.empty()) {
    next_chunk(p, keys, work.chunk);
    work.rows.score(work.chunk, lanes, !p.fp8_keys, kernel);
    if (p.fp8_keys) work.rows.apply_scales(work.chunk, lanes);
    const auto runs = work.chunk.runs();
    for (int64_t row = 0; row < rows; ++row) {
      for (auto run = runs.rbegin(); run != runs.rend(); ++run) {
        if (work.rows.limit(row) < run->first_position) continue;
        const int64_t seen = work.rows.limit(row) - run->first_position;  // less one; so it cannot overflow
        work.lists[static_cast<size_t>(row)].offer(work.rows.scores(row) + run->column,
                                                   seen < run->count ? seen + 1 : run->count,
                                                   run->first_position);
      }
    }
  }
}

// How the work is cut: tiles of rows, and (where rows are few) ranges of blocks whose lists are merged
// afterwards.
struct Partition {
  int64_t tile_rows = 1, tiles = 0, parts = 1;
};

int64_t tile_rows(const IndexSelect& p) {
  const int64_t row_bytes = p.heads * p.width * static_cast<int64_t>(dtype_bytes(p.dtype));
  return std::clamp<int64_t>(kTileQueryBytes / row_bytes, 1, kTileRowsMax);
}

Partition partition(const IndexSelect& p, int threads) {
  const int64_t wanted_tasks = threads == 1 ? 1 : 2 * threads;
  Partition cut;
  cut.tile_rows = tile_rows(p);
  // Smaller tiles read the keys more often: not below 16 rows for the sake of threads.
  cut.tile_rows = std::min(cut.tile_rows, std::max<int64_t>(16, (p.rows + wanted_tasks - 1) / wanted_tasks));
  cut.tiles = (p.rows + cut.tile_rows - 1) / cut.tile_rows;
  const int64_t keys = static_cast<int64_t>(p.keys.size()) * p.block_tokens;
  const int64_t parts = (wanted_tasks + cut.tiles - 1) / cut.tiles;
  cut.parts = std::max<int64_t>(1, std::min(parts, keys / kPartKeysMin));
  return cut;
}

}  // namespace

void store_index_key(const float* key, int64_t width, DType dtype, int64_t block_tokens, int64_t slot,
                     void* page_layer) {
  check_shape(width, dtype, block_tokens);
  CHECK(slot >= 0 && slot < block_tokens, "slot ", slot);
  for (int64_t i = 0; i < width; ++i) {
    const int64_t at = element_index(width, dtype, block_tokens, slot, i);
    if (dtype == DType::kF32) {
      static_cast<float*>(page_layer)[at] = key[i];
    } else {
      static_cast<uint16_t*>(page_layer)[at] = f32_to_bf16(key[i]);
    }
  }
}

void store_fp8_index_key(const float* key, int64_t width, bool power_of_two, int64_t block_tokens,
                         int64_t slot, void* page_layer) {
  check_shape(width, DType::kBF16, block_tokens);
  CHECK(width <= kFp8Group && slot >= 0 && slot < block_tokens, "width ", width, ", slot ", slot);
  auto* codes = static_cast<uint8_t*>(page_layer);
  const float scale = quantise_e4m3(key, width, power_of_two, codes + slot * width);
  std::memcpy(codes + block_tokens * width + 4 * slot, &scale, sizeof scale);
}

void load_index_key(const void* page_layer, int64_t width, DType dtype, int64_t block_tokens, int64_t slot,
                    float* key) {
  check_shape(width, dtype, block_tokens);
  CHECK(slot >= 0 && slot < block_tokens, "slot ", slot);
  for (int64_t i = 0; i < width; ++i) {
    const int64_t at = element_index(width, dtype, block_tokens, slot, i);
    key[i] = dtype == DType::kF32 ? static_cast<const float*>(page_layer)[at]
                                  : bf16_to_f32(static_cast<const uint16_t*>(page_layer)[at]);
  }
}

void index_select(const IndexSelect& p, Parallel& parallel) {
  check_call(p);
  CHECK_GT(p.top_k, 0);
  if (p.rows == 0) return;
  const Partition cut = partition(p, parallel.thread_count());
  std::vector<Workspace> work(static_cast<size_t>(parallel.thread_count()));
  std::vector<Candidate> part_lists;  // [parts][rows][top_k]
  std::vector<int32_t> part_counts;   // [parts][rows]
  std::vector<int64_t> part_written;  // [parts][rows]
  if (cut.parts > 1) {
    part_lists.resize(static_cast<size_t>(cut.parts * p.rows * p.top_k));
    part_counts.resize(static_cast<size_t>(cut.parts * p.rows));
  }
  if (p.written != nullptr) part_written.resize(static_cast<size_t>(cut.parts * p.rows));
  const auto blocks = static_cast<int64_t>(p.keys.size());
  parallel.run(cut.tiles * cut.parts, [&](int64_t task, int thread) {
    const int64_t part = task % cut.parts;
    // Later rows see more keys: the longest tasks start first.
    const int64_t row_begin = (cut.tiles - 1 - task / cut.parts) * cut.tile_rows;
    const int64_t row_end = std::min(p.rows, row_begin + cut.tile_rows);
    const int64_t block_begin = blocks * part / cut.parts, block_end = blocks * (part + 1) / cut.parts;
    Workspace& own = work[static_cast<size_t>(thread)];
    select_rows(
        p, row_begin, row_end,
        p.keys.subspan(static_cast<size_t>(block_begin), static_cast<size_t>(block_end - block_begin)), own);
    for (int64_t row = row_begin; row < row_end; ++row) {
      const int64_t at = part * p.rows + row;
      Candidate* out = cut.parts > 1 ? part_lists.data() + at * p.top_k : p.out + row * p.top_k;
      int32_t& count = cut.parts > 1 ? part_counts[static_cast<size_t>(at)] : p.out_count[row];
      CandidateList& list = own.lists[static_cast<size_t>(row - row_begin)];
      count = static_cast<int32_t>(list.take(out));
      if (p.written != nullptr) part_written[static_cast<size_t>(at)] = list.written();
    }
  });
  if (p.written != nullptr) {
    std::fill_n(p.written, p.rows, 0);
    for (size_t i = 0; i < part_written.size(); ++i) {
      p.written[i % static_cast<size_t>(p.rows)] += part_written[i];
    }
  }
  if (cut.parts == 1) return;
  parallel.run(p.rows, [&](int64_t row, int thread) {
    Workspace& own = work[static_cast<size_t>(thread)];
    if (own.lists.empty()) own.lists.resize(1);
    own.lists[0].reset(p.top_k);
    for (int64_t part = cut.parts - 1; part >= 0; --part) {
      const int64_t at = part * p.rows + row;
      own.lists[0].offer(part_lists.data() + at * p.top_k, part_counts[static_cast<size_t>(at)]);
    }
    p.out_count[row] = static_cast<int32_t>(own.lists[0].take(p.out + row * p.top_k));
  });
}

void index_scores(const IndexSelect& p, int64_t row_begin, int64_t row_end, float* scores) {
  check_call(p);
  CHECK(0 <= row_begin && row_begin <= row_end && row_end <= p.rows, "rows ", row_begin, " to ", row_end);
  IndexSelect all = p;
  all.row_positions = nullptr;  // every key
  int64_t stride = 0;
  for (const IndexKeys& block : p.keys) stride += block.valid;
  Workspace work;
  for (int64_t row = row_begin; row < row_end; row += work.rows.rows()) {
    work.rows.load(all, row, std::min(row_end, row + tile_rows(p)));
    float* end = scores + (row - row_begin) * stride + stride;
    for (std::span<const IndexKeys> keys = p.keys; !keys.empty();) {
      next_chunk(p, keys, work.chunk);
      work.rows.score(work.chunk, panel_width(p.block_tokens), !p.fp8_keys, score_tile(p.dtype));
      if (p.fp8_keys) work.rows.apply_scales(work.chunk, panel_width(p.block_tokens));
      const auto runs = work.chunk.runs();
      for (auto run = runs.rbegin(); run != runs.rend(); ++run) {
        end -= run->count;
        for (int64_t i = 0; i < work.rows.rows(); ++i) {
          const float* from = work.rows.scores(i) + run->column;
          std::transform(from, from + run->count, end + i * stride, [](float s) { return s + 0.0f; });
        }
      }
    }
  }
}

}  // namespace weft::kernels
