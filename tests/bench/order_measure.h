// What the canonical order of attention costs, beside the same kernel merging freely.
//
// Sparse decode rows, as the worker attends to them: one call of kernels::attend for each canonical shard
// that the rank reads, the shards' partials down the tree, then the division. Free: one call over all of the
// rank's entries, one running accumulator, the division. Under dcp(c) either happens c times, for the heads
// of each member. Both read the same entries, in the same order within a shard, and say what the next call
// reads. One thread, by its CPU clock; the two take turns.
#pragma once

#include <string>

#include "proto/vocab/cache_format.h"
#include "tests/bench/layer_measure.h"

namespace weft::bench {

struct OrderTime {
  std::string what;                     // "tp: 32 heads, 2048 entries in 8 shards"
  std::vector<double> canonical, free;  // seconds of one row, by round
};
// c: over how many ranks the cache is split (dcp); heads: of a call.
OrderTime measure_order(const LayerShape& shape, const CacheFormat& cache, int c, int64_t heads, int rounds,
                        int repeats);

}  // namespace weft::bench
