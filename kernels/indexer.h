// The sparse-attention indexer: scores of many rows against all cached index keys, and exact top-k.
//
//   I[t, s] = Σ_h w[t, h] · max(0, q[t, h] · k[s]),  heads ascending, one accumulator per dot product walking
// k upwards (bf16: in pairs), fused multiply-adds, lanes over keys. A score depends on its row and key only.
//
// Selections are total orders: (score + 0.0 descending, position ascending). Scores are finite in a sound
// model; NaN ranks as −infinity, so that the order stays total.
//
// Index-key page, one layer: panels of PW = min(16, P) slots. float32: [P / PW][width][PW];
// bf16: [P / PW][width / 2][PW][2]. A key is written with store_index_key. FP8: [P][width] E4M3 values, then
// [P] float32 scales, as published (128 dimensions: 132 bytes a token, scales at the end). They are scored as
// bf16, which is exact, and the score is multiplied by the key's scale at the end:
//   I[t, s] = (Σ_h w[t, h] · max(0, q[t, h] · e4m3[s])) · scale[s]
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/parallel.h"
#include "proto/vocab/ids.h"

namespace weft::kernels {

void store_index_key(const float* key, int64_t width, DType dtype, int64_t block_tokens, int64_t slot,
                     void* page_layer);
// The slot's key as float32, for copies and tests.
void load_index_key(const void* page_layer, int64_t width, DType dtype, int64_t block_tokens, int64_t slot,
                    float* key);

// FP8, at most kFp8Group wide; the scale is fp8_scale() of the key's largest.
void store_fp8_index_key(const float* key, int64_t width, bool power_of_two, int64_t block_tokens,
                         int64_t slot, void* page_layer);
constexpr int64_t index_key_bytes(int64_t width, DType dtype, bool fp8) {
  return fp8 ? width + 4 : width * static_cast<int64_t>(dtype_bytes(dtype));
}

// One block of keys of one layer: positions [first_position, first_position + valid).
struct IndexKeys {
  const void* page_layer = nullptr;
  int64_t first_position = 0;
  int64_t valid = 0;
};

struct Candidate {
  float score = 0;
  int32_t position = 0;
  friend bool operator==(const Candidate&, const Candidate&) = default;
};
// a before b in the total order.
constexpr bool ranks_before(const Candidate& a, const Candidate& b) {
  return a.score > b.score || (a.score == b.score && a.position < b.position);
}

struct IndexSelect {
  DType dtype = DType::kF32;  // of query and keys
  bool fp8_keys = false;      // of FP8 keys: dtype is kBF16
  int64_t heads = 0;
  int64_t width = 0;
  int64_t block_tokens = 64;
  int64_t rows = 0;
  const void* query = nullptr;             // [rows][heads][width]
  const float* weights = nullptr;          // [rows][heads]
  const int64_t* row_positions = nullptr;  // [rows]: a row sees keys at positions ≤ its own
  std::span<const IndexKeys> keys;         // blocks ascending in position
  int64_t top_k = 0;
  Candidate* out = nullptr;      // [rows][top_k], the best of each row, ascending in position
  int32_t* out_count = nullptr;  // [rows]: min(top_k, keys the row sees)
  int64_t* written = nullptr;    // [rows], if wanted: candidates written meanwhile
};
// Exact. Scores are streamed past the selection, the newest keys first, and never written whole: working
// memory is bounded by top_k, not by the keys (kernels/cpu/candidate_list.h says how much is written). Work
// is spread over tiles of rows, and over ranges of keys where rows are few; neither shows in the result.
// Scores are computed also where a row sees at most top_k keys (all are selected then): where keys are split
// over ranks, a rank may see few of many.
void index_select(const IndexSelect& p, Parallel& parallel);

// The scores of rows [row_begin, row_end) against all listed keys, in order, written whole: [rows][Σ valid].
// For tests and benchmarks.
void index_scores(const IndexSelect& p, int64_t row_begin, int64_t row_end, float* scores);

}  // namespace weft::kernels
