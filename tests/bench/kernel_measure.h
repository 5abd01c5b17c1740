// The indexer (scoring and selection together) and attention on random numbers, ready to take turns with
// others (rounds.h).
//
// Operations counted: 2 · heads · width per scored (row, key) pair; 2 · heads · (key width + value width) per
// attended entry. Selection, softmax and conversions, those of FP8 among them, are not counted as work, but
// their time is in.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/parallel.h"
#include "proto/vocab/cache_format.h"
#include "tests/bench/rounds.h"

namespace weft::bench {

// The last `rows` rows of a context of `keys` tokens. Keys as `cache` says; FP8 ones are 4 bytes longer.
struct IndexShape {
  int64_t heads, width, keys, rows, top_k;
};
Contender indexer(const IndexShape& shape, CacheDType cache, kernels::Parallel& parallel);

// The indexer and two that write all scores of the rows first, on one thread: seconds of its CPU clock, the
// median of rounds in which they take turns.
struct Rivals {
  std::string what;
  double streaming = 0;
  double scores = 0;      // writing all scores, alone
  double two_passes = 0;  // selects as the indexer does
  double plain = 0;       // std::nth_element over (score, position) pairs
  double written = 0;     // candidates that the indexer writes for a row, on average
};
Rivals measure_rivals(const IndexShape& shape, CacheDType cache, int rounds);

// Absorbed MLA, sixteen rows, as sparse prefill does: each row a task of its own against its own list of
// `entries` entries at random places of a cache of `context`.
struct AttentionShape {
  int64_t heads, latent, rope, entries, context;
};
Contender attention(const AttentionShape& shape, CacheDType cache, kernels::Parallel& parallel);

// The query heads of one KV head, in the last `rows` rows of a dense context: each of the eight shards is a
// task, all rows in one call. Any cache but kFp8DsMla.
struct GroupedShape {
  int64_t heads, width, context, rows;
};
Contender grouped(const GroupedShape& shape, CacheDType cache, kernels::Parallel& parallel);

}  // namespace weft::bench
