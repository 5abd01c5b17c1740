// Attention of query rows over lists of cache entries, as mergeable partials.
//
// An entry is one token's key and value in the cache's dtype. Where they lie in it is data, so absorbed MLA
// (the value is the head of the key: entry c ‖ k_pe) and grouped queries (entry K ‖ V of one KV head, read by
// all query heads of its group) are the same op. For head h and entry u:
//   t = (q[h] · key[u]) · scale_log2,  n = rint(t),  f = t − n,  p = exp2(f) · 2^(n−m)
//   o[h] = Σ p · value[u],  l[h] = Σ p,  m[h] an integer ≥ every n so far
// Entries are added in list order, in groups of 64 counted from the start of the list, also where a row skips
// the first so many (a sliding window): its first group is then shorter. m grows at group borders, and
// rescaling multiplies by powers of two. float32: o and l take one entry at a time. bf16: p is rounded to
// bf16, and they take two at a time, counted from the first entry of the group that the row reads, in
// VDPBF16PS order: the second one first; a missing second one is zeros; l is a dimension whose value is 1.
// The dot product q·key uses 16 lanes by index mod 16 (bf16: by pair index mod 16, VDPBF16PS order), then the
// tree 8, 4, 2, 1. Each head's result depends on its query and its list only: rows share a call to share the
// reading of entries, not to change a bit.
//
// FP8 entries (kernels/entry.h) are turned into bf16, exactly, a group of 64 at a time for all queries of a
// call; what follows is the bf16 path, so the bits are those of a bf16 cache with the same values. Of such an
// entry everything is read.
//
// Scores are finite in a sound model; t is clamped to ±2^20 all the same, so that n fits its integer, and a
// NaN score makes its head's o and l NaN. p and rescaled sums below 2^-126 are flushed to zero: flush-to-zero
// must be on in the calling thread (kernels/parallel.h). Entries and queries need no alignment; of an entry
// nothing but key and value is read, and no value that a row does not list is multiplied. No errors but
// CHECKs of the shape.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/entry.h"
#include "kernels/parallel.h"
#include "proto/vocab/ids.h"

namespace weft::kernels {

// Groups end at multiples of so many entries of the list.
inline constexpr int64_t kGroupEntries = 64;

// A partial in memory: o[value width] float32, l float32, m int32; `partial_words` 4-byte words apart.
constexpr int64_t partial_words(int64_t value_width) { return value_width + 2; }
inline constexpr int32_t kEmptyPartial = INT32_MIN;  // m of a partial that saw no key; o and l are 0

// Where key and value are in an entry, in elements: the key is [0, key), the value
// [value_offset, value_offset + value). They may overlap.
struct EntryShape {
  int64_t key = 0;
  int64_t value_offset = 0;
  int64_t value = 0;
  constexpr int64_t width() const { return std::max(key, value_offset + value); }
};

struct AttentionRow {
  const void* query = nullptr;  // [heads][query_stride]
  int64_t entry_count = 0;      // the row reads the first so many of the entries
  float* partials = nullptr;    // out: [heads][partial_words(value)]
  int64_t skipped = 0;          // but not the first so many of these
};

struct Attention {
  DType dtype = DType::kF32;  // of queries and entries
  EntryShape shape;
  Fp8Part fp8 = {};                      // where entries hold E4M3: dtype is kBF16 then
  int64_t heads = 0;                     // of every row
  int64_t query_stride = 0;              // elements, ≥ shape.key
  std::span<const AttentionRow> rows;    // entry counts and skipped ones ascending
  const void* const* entries = nullptr;  // as many as the last row reads
  // What the thread will read next in another call: the first of them are fetched while this one ends.
  std::span<const void* const> next = {};
  float scale_log2 = 0;  // α · log2 e
};
// Single-threaded; callers spread rows, shards and heads. Rows that share most of their entries are several
// times faster in one call once they have 32 heads together.
void attend(const Attention& p);

// a = merge(a, b); a is the lower shard: M = max m, o = o_a · 2^(m_a−M) + o_b · 2^(m_b−M), l likewise. Empty
// partials are skipped.
void merge_partial(float* a, const float* b, int64_t value_width);
// Merges c partials that lie `stride_words` apart, ordered by residue class, in the canonical tree: strides
// c/2, c/4, … 1 (for c not a power of two: ascending). The result is in the first.
void merge_partials(float* partials, int64_t count, int64_t stride_words, int64_t value_width);
// out[i] = o[i] / l; zeros if no key was seen.
void finish_partial(const float* partial, int64_t value_width, float* out);
// Both at once, in one pass, of partials that may lie anywhere and stay as they are: the same bits.
void finish_partials(std::span<const float* const> partials, int64_t value_width, float* out);

}  // namespace weft::kernels
