// How many keys the first part of an offer has (kernels/split_top_k.h), from what was chosen of late.
//
// At least kv::first_offer, which proves nearly every row whose chosen keys chance deals out to the ranks.
// Where keys that score alike lie together, one rank may have many more of them: then an eighth more than
// were lately chosen of one rank, which is forgotten by a sixteenth a step. It shows only in bytes read;
// ranks need not agree. One for each index layer and width of the split. One thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kv/layout.h"

namespace weft::worker {

class OfferLength {
 public:
  int64_t keys(int64_t top_k, int c) const {
    return std::max(kv::first_offer(top_k, c), std::min(top_k, most_ + most_ / 8));
  }
  // After a step: the keys chosen of one rank in one row, at most.
  void learn(int64_t most_chosen) { most_ = std::max(most_chosen, most_ - (most_ + 15) / 16); }

 private:
  int64_t most_ = 0;
};

}  // namespace weft::worker
