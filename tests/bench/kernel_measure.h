// How fast the indexer (scoring and selection together) and attention are, on random numbers.
//
// Operations counted: 2 · heads · width per scored (row, key) pair; 2 · heads · (key width + value width) per
// attended entry. Selection, softmax and conversions are not counted as work, but their time is in. Times are
// those of best_seconds() (ceilings.h): the CPU clock for one thread, the wall for more.
#pragma once

#include <cstdint>
#include <string>

#include "proto/vocab/ids.h"

namespace weft::bench {

struct KernelTime {
  std::string what;  // "indexer 2 x 64, 32768 keys, 512 rows, top 512"
  double seconds = 0;
  double operations = 0;
  double gflops() const { return operations / seconds * 1e-9; }
};

// The last `rows` rows of a context of `keys` tokens.
struct IndexShape {
  int64_t heads, width, keys, rows, top_k;
};
KernelTime measure_indexer(const IndexShape& shape, DType dtype, int threads, double seconds);

// The indexer and two that write all scores of the rows first, on one thread: seconds of its CPU clock, the
// median of rounds that alternate.
struct Rivals {
  std::string what;
  double streaming = 0;
  double two_passes = 0;  // selects as the indexer does
  double plain = 0;       // std::nth_element over (score, position) pairs
  double written = 0;     // candidates that the indexer writes for a row, on average
};
Rivals measure_rivals(const IndexShape& shape, DType dtype, int rounds);

// Absorbed MLA, sixteen rows, as sparse prefill does: each row a task of its own against its own list of
// `entries` entries at random places of a cache of `context`.
struct AttentionShape {
  int64_t heads, latent, rope, entries, context;
};
KernelTime measure_attention(const AttentionShape& shape, DType dtype, int threads, double seconds);

// The query heads of one KV head, in the last `rows` rows of a dense context: each of the eight shards is a
// task, all rows in one call.
struct GroupedShape {
  int64_t heads, width, context, rows;
};
KernelTime measure_grouped(const GroupedShape& shape, DType dtype, int threads, double seconds);

}  // namespace weft::bench
