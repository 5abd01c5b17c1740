#include "kv/row_split.h"

#include <algorithm>

#include "proto/vocab/check.h"
#include "proto/vocab/units.h"

namespace weft::kv {

int RowOwners::owner(int64_t row) const {
  CHECK(row >= 0 && row < rows_, row, " of ", rows_);
  if (split_ == Split::kInterleave) return static_cast<int>(row % ranks_);
  if (split_ == Split::kContiguous) return static_cast<int>(row / ceil_div(rows_, ranks_));
  const Part& part = parts_[row < parts_[1].begin ? 0 : 1];
  const int64_t at = row - part.begin, left_over = std::ssize(part.left_over);
  if (at < left_over) return part.left_over[static_cast<size_t>(at)];
  const auto piece = static_cast<int>((at - left_over) / part.piece);
  return piece < ranks_ ? piece : 2 * ranks_ - 1 - piece;
}

std::vector<RowOwners> split_rows(std::span<const OwnedSpan> spans, int64_t top_k, int ranks) {
  struct LeftOver {
    int64_t position;
    int* owner;
  };
  std::vector<RowOwners> out(spans.size());
  std::vector<LeftOver> left_over;
  for (size_t i = 0; i < spans.size(); ++i) {
    const auto& [split, start, rows] = spans[i];
    CHECK(split != Split::kShared);
    out[i].split_ = split;
    out[i].rows_ = rows;
    out[i].ranks_ = ranks;
    if (split != Split::kZigzag) continue;
    const int64_t cut = top_k == 0 ? 0 : std::clamp<int64_t>(top_k - start, 0, rows);
    const std::array<int64_t, 2> begins = {0, cut}, lengths = {cut, rows - cut};
    for (size_t p = 0; p < 2; ++p) {
      RowOwners::Part& part = out[i].parts_[p];
      part.begin = begins[p];
      part.piece = lengths[p] / (2 * ranks);
      part.left_over.resize(static_cast<size_t>(lengths[p] % (2 * ranks)));
      for (size_t j = 0; j < part.left_over.size(); ++j) {
        left_over.push_back({start + part.begin + static_cast<int64_t>(j), &part.left_over[j]});
      }
    }
  }
  std::stable_sort(left_over.begin(), left_over.end(),
                   [](const LeftOver& a, const LeftOver& b) { return a.position > b.position; });
  for (size_t i = 0; i < left_over.size(); ++i) {
    const int round = static_cast<int>(i) / ranks, turn = static_cast<int>(i) % ranks;
    *left_over[i].owner = round % 2 == 0 ? turn : ranks - 1 - turn;
  }
  return out;
}

}  // namespace weft::kv
