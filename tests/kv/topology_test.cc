// Goal: places and ranks map onto each other, for every set of ranks. Method: all masks against a plain list.
#include "kv/topology.h"

#include <gtest/gtest.h>

#include <vector>

namespace weft::kv {
namespace {

TEST(Topology, PlacesAreTheRanksInOrder) {
  for (RankMask ranks = 0; ranks <= all_ranks(kMaxRanks); ++ranks) {
    const Topology topology(ranks);
    std::vector<int> list;
    for (int rank = 0; rank < kMaxRanks; ++rank) {
      EXPECT_EQ(topology.contains(rank), holds(ranks, rank));
      if (holds(ranks, rank)) list.push_back(rank);
    }
    ASSERT_EQ(topology.count(), static_cast<int>(list.size()));
    EXPECT_EQ(topology.ranks(), ranks);
    for (int place = 0; place < topology.count(); ++place) {
      EXPECT_EQ(topology.rank(place), list[static_cast<size_t>(place)]);
      EXPECT_EQ(topology.place(list[static_cast<size_t>(place)]), place);
      EXPECT_EQ(topology.ranks_at(mask_of(place)), mask_of(list[static_cast<size_t>(place)]));
    }
    EXPECT_EQ(topology.ranks_at(all_ranks(topology.count())), ranks);
  }
}

TEST(Topology, WithAllRanksPlacesAreRanks) {
  for (int count = 1; count <= kMaxRanks; ++count) {
    const Topology all = Topology::of_all(count);
    EXPECT_EQ(all, Topology(all_ranks(count)));
    for (int rank = 0; rank < count; ++rank) EXPECT_EQ(all.place(rank), rank);
    for (RankMask places = 0; places <= all_ranks(count); ++places) EXPECT_EQ(all.ranks_at(places), places);
  }
  EXPECT_EQ(Topology(0b1011).text(), "0, 1, 3");
  EXPECT_NE(Topology(0b1011), Topology(0b0111));
}

}  // namespace
}  // namespace weft::kv
