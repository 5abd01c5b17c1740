// The indexer by its definition: one score in double, and selection by a full sort. The oracle for
// kernels/indexer.h; slow. Owns nothing, any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/indexer.h"

namespace weft::kernels::reference {

// Σ_h weights[h] · max(0, query[h] · key); query is [heads][width], key [width].
double index_score(std::span<const double> query, std::span<const double> weights,
                   std::span<const double> key);

// The first top_k of the total order, ascending in position.
std::vector<Candidate> select(std::vector<Candidate> all, int64_t top_k);

}  // namespace weft::kernels::reference
