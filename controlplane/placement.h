// From what a person asks for to where rows run and blocks lie.
//
// Pure arithmetic on Limits; no state.
#pragma once

#include <string>
#include <vector>

#include "controlplane/event.h"
#include "controlplane/limits.h"
#include "controlplane/page_counts.h"

namespace weft::controlplane {

// How a sequence's shared rows run, and the residency that covers their readers.
struct Placement {
  kv::DecodeKind kind = kv::DecodeKind::kTp;
  kv::IndexWish index;
  kv::Grouping grouping;
  kv::Residency residency;
  int index_c = 1;  // parts that the index keys are scored in
  friend bool operator==(const Placement&, const Placement&) = default;
};

// A wish on W ranks, where its numbers may not divide: they become greatest common divisors. So the bits
// stay: whatever divides c divides V, if c does.
GroupingWish fitted(GroupingWish wish, int rank_count);
// tp: (0, W, 1); dcp(c): (0, W, c); dp: the group that dp_rank is in. Of the wish as fitted. Without index
// keys, the index counts as copied.
Placement placement_of(const Limits& limits, kv::DecodeWish decode, kv::IndexWish index, int dp_rank);
// The groups that dp may choose from, each by its first rank; one (any) for other wishes.
std::vector<int> placement_choices(const Limits& limits, kv::DecodeWish decode);
// "tp, index copied"
std::string placement_name(const Limits& limits, const Placement& placement);

// How a chunk of a prompt is split: as wished, or shared when it is too short to give every rank a row of
// each of its pieces, when it must not write, or when there is one rank.
kv::Split chunk_split(kv::Split wish, int64_t rows, bool no_write, int rank_count);

// Whether the queries of an owned chunk [start, start + rows) travel to the holders of its context, as asked
// or by counted bytes. Never where rows select entries, or nothing lies elsewhere.
bool passes_query(const Limits& limits, const Placement& placement, kv::Split split, kv::ContextPath path,
                  int64_t start, int64_t rows, int origin);

// Pages of blocks [first, last) under a residency, for every pool.
class BlockNeeds {
 public:
  BlockNeeds(const Limits& limits, const kv::Residency& residency, int64_t first, int64_t last);
  PageCounts pages(int origin) const;

 private:
  const Limits& limits_;
  kv::Residency residency_;
  int64_t blocks_ = 0;
  // Blocks by residue class, of striped streams.
  std::array<std::array<int64_t, kMaxRanks>, kv::kStreams> by_class_{};
};

}  // namespace weft::controlplane
