// The last step of attention: from merged partials of a head to what head_outputs() reads.
//
// o / l; of the hash model the sums themselves, o · 2^m, with the count l · 2^m in the last column. Both are
// exact rescales and one division at most, so whoever does it gets the same bits.
#pragma once

#include <span>

#include "worker/model/config.h"

namespace weft::worker {

// out: [value width].
void finish_head(const ModelConfig& config, const float* partial, float* out);
// Of the partials of all residue classes, in order, merged down the tree; they stay as they are.
void finish_head(const ModelConfig& config, std::span<const float* const> partials, float* out);

}  // namespace weft::worker
