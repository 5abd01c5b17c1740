// Which rank owns which row of the prompts' chunks of a step (PCP): pure arithmetic on the step's spans.
//
// A row at position p scores p + 1 keys, and attends to as many, or to top_k if that is less. Zigzag keeps
// both counts of (row, key) pairs even over the ranks: of any two ranks, one has at most as many pairs more
// as the step's longest row has, whatever the spans. Each span is cut where its rows begin to attend to top_k
// keys; either part has 2C pieces of equal length, of which rank r owns pieces r and 2C − 1 − r: as many
// pairs of both kinds as every other rank. The rows left over (fewer than 2C, the first of their part) are
// dealt out over all spans together, longest first, C at a time, one to each rank: no row of a round is
// longer than any of the round before, so what one rank has more of in one round is never more than what
// another had in the one before it, and what is left is the longest row. So the owners of a zigzag span's
// rows depend on the step's other zigzag spans; no bit of a row does.
//
// Interleave and contiguous look at one span alone. They are not even, and are there to be compared with.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/layout.h"

namespace weft::kv {

// Rows [start, start + rows) of a sequence, owned; not kShared.
struct OwnedSpan {
  Split split{};
  int64_t start = 0, rows = 0;
};

// The owners of one span's rows.
class RowOwners {
 public:
  int owner(int64_t row) const;

 private:
  friend std::vector<RowOwners> split_rows(std::span<const OwnedSpan>, int64_t, int);
  // Zigzag: rows [begin, begin + |left_over|) one by one, then 2C pieces of `piece` rows each.
  struct Part {
    int64_t begin = 0, piece = 0;
    std::vector<int> left_over;
  };
  Split split_{};
  int64_t rows_ = 0;
  int ranks_ = 1;
  std::array<Part, 2> parts_;
};

// Of all owned spans of one step, in their order. top_k: the most keys that a row attends to; 0: all it sees.
std::vector<RowOwners> split_rows(std::span<const OwnedSpan> spans, int64_t top_k, int ranks);

}  // namespace weft::kv
