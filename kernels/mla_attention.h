// Absorbed MLA attention of one query row over a list of cache entries, as mergeable partials.
//
// An entry is c ‖ k_pe: `latent` elements then `rope` elements, in the cache's dtype; it is key (all of it)
// and value (the latent part). For head h and entry u:
//   t = (q[h] · e[u]) · scale_log2,  n = rint(t),  f = t − n,  p = exp2(f) · 2^(n−m)
//   o[h] = Σ p · c[u],  l[h] = Σ p,  m[h] an integer ≥ every n so far
// Entries are added in list order, in groups of 64 counted from the start of the list; m grows at group
// borders, and rescaling multiplies by powers of two. The dot product q·e uses 16 lanes by index mod 16
// (bf16: by pair index mod 16, VDPBF16PS order), then the tree 8, 4, 2, 1. Each head's result depends on its
// query and the list only.
//
// Scores are finite in a sound model; t is clamped to ±2^20 all the same, so that n fits its integer, and a
// NaN score makes its head's o and l NaN. p and rescaled sums below 2^-126 are flushed to zero: flush-to-zero
// must be on in the calling thread (kernels/parallel.h). Entries and queries need no alignment; nothing
// beyond latent + rope elements of them is read. No errors but CHECKs of the shape.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/parallel.h"
#include "proto/vocab/ids.h"

namespace weft::kernels {

// A partial in memory: o[latent] float32, l float32, m int32; `partial_words` 4-byte words apart.
constexpr int64_t partial_words(int64_t latent) { return latent + 2; }
inline constexpr int32_t kEmptyPartial = INT32_MIN;  // m of a partial that saw no key; o and l are 0

struct MlaAttention {
  DType dtype = DType::kF32;  // of query and entries
  int64_t heads = 0;
  int64_t latent = 0;
  int64_t rope = 0;
  const void* query = nullptr;           // [heads][query_stride]
  int64_t query_stride = 0;              // elements
  const void* const* entries = nullptr;  // [entry_count], each latent + rope elements
  int64_t entry_count = 0;
  float scale_log2 = 0;       // α · log2 e
  float* partials = nullptr;  // [heads][partial_words(latent)]
};
// Single-threaded; callers spread rows, shards and heads.
void mla_attend(const MlaAttention& p);

// a = merge(a, b); a is the lower shard: M = max m, o = o_a · 2^(m_a−M) + o_b · 2^(m_b−M), l likewise. Empty
// partials are skipped.
void merge_partial(float* a, const float* b, int64_t latent);
// Merges c partials that lie `stride_words` apart, ordered by residue class, in the canonical tree: strides
// c/2, c/4, … 1 (for c not a power of two: ascending). The result is in the first.
void merge_partials(float* partials, int64_t count, int64_t stride_words, int64_t latent);
// out[i] = o[i] / l; zeros if no key was seen.
void finish_partial(const float* partial, int64_t latent, float* out);

}  // namespace weft::kernels
