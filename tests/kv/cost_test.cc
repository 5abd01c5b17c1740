// Goal: the cost arithmetic gives the numbers that a person gets by hand. That it equals the counters of real
// runs is tests/worker/meter_test.cc.
#include "kv/cost.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "proto/vocab/units.h"

namespace weft::kv {
namespace {

using K = CrossKind;

// GLM-5 numbers: 78 layers (3 dense), 21 with an indexer, 64 heads, 512 + 64, hidden 6144, 576-byte entries.
CostModel glm(int ranks) {
  CostModel model;
  model.geometry = {64, {StreamGeometry{78, 576}, StreamGeometry{21, 132}}, 64};
  model.layers = 78;
  model.dense_layers = 3;
  model.hidden = 6144;
  model.vocabulary = 154'880;
  model.query_bytes = 576 * 2;
  model.value_width = 512;
  model.index_topk = 2048;
  model.rank_count = ranks;
  return model;
}

CostSpan decode(int64_t position, Grouping grouping, IndexKind index, int ranks) {
  CostSpan span;
  span.start = position;
  span.grouping = grouping;
  span.index_c = index_parts(grouping, index);
  span.residency = residency_of(grouping, index, ranks);
  span.head_rows = 1;
  return span;
}

CostSpan prefill(Split split, Residency residency) {
  CostSpan span;
  span.split = split;
  span.residency = residency;
  return span;
}

TEST(Cost, OneRankMovesNothing) {
  CostSpan span = prefill(Split::kZigzag, {replicated(), replicated()});
  span.rows = 5000;
  EXPECT_EQ(total_step_cost(glm(1), span).crossed, CrossedBytes{});
  EXPECT_EQ(total_step_cost(glm(1), decode(9999, {0, 1, 1}, IndexKind::kCopied, 1)).crossed, CrossedBytes{});
}

TEST(Cost, DecodeUnderTpMovesRowsAlone) {
  const CostSpan span = decode(100'000, {0, 8, 1}, IndexKind::kCopied, 8);
  CrossedBytes expected;
  // Seven others' sums after attention and after the feed-forward; rank 0 samples and lacks 7/8 of the
  // logits.
  expected[K::kRows] = 78 * 2 * 7 * 6144 * 4 + 154'880 / 8 * 7 * 4;
  EXPECT_EQ(step_cost(glm(8), span, 0).crossed, expected);
  expected[K::kRows] = 78 * 2 * 7 * 6144 * 4;
  EXPECT_EQ(step_cost(glm(8), span, 5).crossed, expected);
}

TEST(Cost, DecodeUnderDcp) {
  const CostSpan span = decode(100'000, {0, 8, 4}, IndexKind::kCopied, 8);
  const Cost cost = step_cost(glm(8), span, 6);
  EXPECT_TRUE(cost.exact);
  // Eight heads per rank; three others in the group of four.
  EXPECT_EQ(cost.crossed[K::kQueries], 78 * 3 * 8 * 576 * 2);
  EXPECT_EQ(cost.crossed[K::kPartials], 78 * 3 * 8 * (512 + 2) * 4);
  EXPECT_EQ(cost.crossed[K::kCandidates], 0);
  EXPECT_EQ(cost.crossed[K::kEntries], 0);
  EXPECT_EQ(cost.crossed[K::kIndexKeys], 0);
}

TEST(Cost, MechanismsOfDcp) {
  CostSpan span = decode(100'000, {0, 8, 4}, IndexKind::kCopied, 8);
  const Cost plain = step_cost(glm(8), span, 6);
  // Entries, partials and two sums in every layer, and the logits.
  EXPECT_EQ(step_exchanges(glm(8), {&span, 1}), 78 * 4 + 1);
  span.mechanisms.query = QueryPath::kReplicated;
  const Cost replicated_query = step_cost(glm(8), span, 6);
  EXPECT_EQ(replicated_query.crossed[K::kQueries], 0);
  EXPECT_EQ(replicated_query.crossed[K::kPartials], plain.crossed[K::kPartials]);
  // What dcp adds to tp is then one exchange point per layer.
  EXPECT_EQ(step_exchanges(glm(8), {&span, 1}), 78 * 3 + 1);
  const CostSpan tp = decode(100'000, {0, 8, 1}, IndexKind::kCopied, 8);
  EXPECT_EQ(step_exchanges(glm(8), {&tp, 1}), 78 * 2 + 1);
  // With a split index, one more in each layer that has one.
  CostSpan split = decode(100'000, {0, 8, 4}, IndexKind::kSplit, 8);
  split.mechanisms.query = QueryPath::kReplicated;
  EXPECT_EQ(step_exchanges(glm(8), {&split, 1}), 78 * 3 + 21 + 1);
  // A tree: half of the group's heads, then a quarter: as many bytes, in two rounds.
  span.mechanisms.partials = PartialsPath::kTree;
  EXPECT_EQ(step_cost(glm(8), span, 6).crossed[K::kPartials], plain.crossed[K::kPartials]);
  EXPECT_EQ(step_exchanges(glm(8), {&span, 1}), 78 * 4 + 1);
}

TEST(Cost, GroupsOfSeveralRanks) {
  // Ranks 4 to 7, the cache over two of them.
  const CostSpan span = decode(100'000, {4, 4, 2}, IndexKind::kCopied, 8);
  const Cost member = step_cost(glm(8), span, 6);
  EXPECT_EQ(member.crossed[K::kQueries], 78 * 16 * 576 * 2);
  EXPECT_EQ(member.crossed[K::kPartials], 78 * 16 * (512 + 2) * 4);
  // Three others' attention sums; seven others' of the feed-forward.
  EXPECT_EQ(member.crossed[K::kRows], 78 * (3 + 7) * 6144 * 4);
  // Who is not in the group reads its four sums.
  const Cost other = step_cost(glm(8), span, 1);
  EXPECT_EQ(other.crossed[K::kQueries] + other.crossed[K::kPartials], 0);
  EXPECT_EQ(other.crossed[K::kRows], 78 * (4 + 7) * 6144 * 4);
}

TEST(Cost, FirstOffersAreAShareAndSixDeviations) {
  EXPECT_EQ(first_offer(2048, 8), 346);  // 256 + 6 √(256 · 7/8)
  EXPECT_EQ(first_offer(2048, 4), 630);
  EXPECT_EQ(first_offer(2048, 1), 2048);
  EXPECT_EQ(first_offer(4, 2), 4);
  for (int64_t top_k : {1, 2, 7, 512, 2048}) {
    for (int c = 1; c <= 8; ++c) {
      EXPECT_LE(first_offer(top_k, c), top_k);
      EXPECT_GE(first_offer(top_k, c) * c, top_k);
    }
  }
}

TEST(Cost, SplitIndexReadsOffers) {
  // dcp(8): seven others, each with more than top-k keys: a head and scores, an eleventh of (score, position)
  // pairs.
  const Cost cost = step_cost(glm(8), decode(100'000, {0, 8, 8}, IndexKind::kSplit, 8), 3);
  EXPECT_EQ(cost.crossed[K::kCandidates], 21 * 7 * (16 + 346 * 4));
  EXPECT_FALSE(cost.exact);
  // tp with a split index: over the whole width; entries of all ranks are read, hence positions too.
  const int64_t tp =
      step_cost(glm(4), decode(100'000, {0, 4, 1}, IndexKind::kSplit, 4), 3).crossed[K::kCandidates];
  EXPECT_NEAR(static_cast<double>(tp), 21 * 3 * (16 + 630 * 4 + 512 * 4), 21 * 3 * 4 * 2);
  // A row that sees no more than top-k keys scores none.
  EXPECT_EQ(step_cost(glm(8), decode(2047, {0, 8, 8}, IndexKind::kSplit, 8), 3).crossed[K::kCandidates], 0);
  // One key more: 33 blocks, the last with one key; each of the eight classes offers all its keys first.
  int64_t offered = 0;
  for (int rank = 0; rank < 8; ++rank) {
    offered += step_cost(glm(8), decode(2048, {0, 8, 8}, IndexKind::kSplit, 8), rank).crossed[K::kCandidates];
  }
  EXPECT_EQ(offered, 21 * 7 * (8 * 16 + 2049 * 4));
}

TEST(Cost, DecodeUnderDpIsLocal) {
  const CostSpan span = decode(100'000, {5, 1, 1}, IndexKind::kCopied, 8);
  // The owner reads seven sums after every feed-forward; the others read its row before.
  EXPECT_EQ(step_cost(glm(8), span, 5).crossed[K::kRows], 78 * 7 * 6144 * 4);
  EXPECT_EQ(step_cost(glm(8), span, 6).crossed[K::kRows], 78 * 6144 * 4 + 6144 * 4);
  for (K kind : {K::kEntries, K::kIndexKeys, K::kQueries, K::kPartials, K::kCandidates}) {
    EXPECT_EQ(total_step_cost(glm(8), span).crossed[kind], 0);
  }
}

TEST(Cost, PrefillWritesEveryEntryToEveryHolder) {
  // Without an indexer and into replicated pages nothing is read remotely: what crosses is what the others
  // receive.
  CostModel dense = glm(8);
  dense.index_topk = 0;
  dense.geometry.streams[1] = {};
  CostSpan span = prefill(Split::kZigzag, {replicated(), replicated()});
  span.rows = 128'000;
  const Cost cost = total_layer_cost(dense, span, false);
  EXPECT_TRUE(cost.exact);
  EXPECT_EQ(cost.crossed[K::kEntries], int64_t{7} * 576 * 128'000);
  // Each rank receives seven eighths of the 70 MB that one layer gathers.
  EXPECT_NEAR(static_cast<double>(cost.crossed[K::kEntries]) / 7 / (1 << 20), 70, 0.5);
  // In chunks the same entries are written once each.
  EXPECT_EQ(prefill_cost(dense, span, 128'000, 2048).crossed[K::kEntries], 78 * int64_t{7} * 576 * 128'000);
}

TEST(Cost, PrefillIntoStripedPages) {
  CostModel dense = glm(4);
  dense.index_topk = 0;
  dense.geometry.streams[1] = {};
  CostSpan span = prefill(Split::kInterleave, {striped(4), striped(4)});
  span.rows = 64 * 64;
  // Written: of each block's rows, three quarters belong to ranks that do not hold it. Read: each rank's last
  // rows see all but its own blocks: three quarters of the chunk (a few rows short at its end).
  const Cost cost = total_layer_cost(dense, span, false);
  const int64_t written = 64 * 64 * 3 / 4;
  int64_t read = 0;
  for (int rank = 0; rank < 4; ++rank) {
    const int64_t last_visible = 64 * 64 - (3 - rank);
    for (int64_t position = 0; position < last_visible; ++position) {
      read += holds(pattern_holders(striped(4), position / 64, 0, 4), rank) ? 0 : 1;
    }
  }
  EXPECT_EQ(cost.crossed[K::kEntries], 576 * (written + read));
}

// 32 query heads over 8 KV heads of 128: K ‖ V in bf16.
CostModel grouped(int ranks) {
  CostModel model;
  model.geometry = {64, {StreamGeometry{28, 512, 8}, StreamGeometry{}}, 32};
  model.layers = 28;
  model.dense_layers = 28;
  model.hidden = 3072;
  model.vocabulary = 128'256;
  model.query_bytes = 128 * 2;
  model.value_width = 128;
  model.rank_count = ranks;
  return model;
}

TEST(Cost, PrefillWritesEachPartToItsOwnHolders) {
  // tp on four ranks: each holds two of eight KV heads of every token. Of an entry's eight parts the producer
  // keeps two; its last row reads the six others of everything before.
  CostSpan span = prefill(Split::kInterleave, {replicated(), replicated()});
  span.rows = 4096;
  const Cost cost = total_layer_cost(grouped(4), span, false);
  EXPECT_TRUE(cost.exact);
  EXPECT_EQ(cost.crossed[K::kEntries], 512 * 6 * (4096 + 4093 + 4094 + 4095 + 4096));
  // dcp(4) holds all parts of a quarter of the blocks: three quarters elsewhere.
  span.residency = {striped(4), striped(4)};
  const int64_t striped_bytes = total_layer_cost(grouped(4), span, false).crossed[K::kEntries];
  EXPECT_NEAR(static_cast<double>(striped_bytes), 512.0 * 6 * 5 * 4096, 512 * 8 * 4 * 4);
  // dcp(2) holds half of the parts of half of the blocks.
  span.residency = {striped(2), striped(2)};
  EXPECT_NEAR(static_cast<double>(total_layer_cost(grouped(4), span, false).crossed[K::kEntries]),
              512.0 * 6 * 5 * 4096, 512 * 8 * 4 * 4);
}

TEST(Cost, WindowsReadLess) {
  CostModel model = grouped(4);
  model.window = 1024;
  model.window_layers = 20;
  CostSpan span = prefill(Split::kInterleave, {replicated(), replicated()});
  span.start = 8192;
  span.rows = 4096;
  // As above, six parts of eight are elsewhere. Every rank has rows at each fourth position; the first sees
  // 1,023 keys before its own.
  const int64_t full = 4096 + 12285 + 12286 + 12287 + 12288, windowed = 4096 + 4 * (1023 + 4093);
  EXPECT_EQ(total_step_cost(model, span).crossed[K::kEntries], 512 * 6 * (8 * full + 20 * windowed));
}

TEST(Cost, DecodeOfGroupedQueriesUnderDcp) {
  const CostSpan span = decode(10'000, {0, 8, 2}, IndexKind::kCopied, 8);
  const Cost cost = step_cost(grouped(8), span, 6);
  EXPECT_EQ(cost.crossed[K::kQueries], 28 * 4 * 128 * 2);
  EXPECT_EQ(cost.crossed[K::kPartials], 28 * 4 * (128 + 2) * 4);
  EXPECT_EQ(cost.crossed[K::kEntries], 0);
}

// A cache split by layer, as some engines have it for prefill: rank r keeps all tokens of the layers it owns,
// and gives them to the others when the layer's turn comes.
TEST(Cost, ACacheSplitByLayerSavesNothingOverStripes) {
  constexpr int64_t kTokens = 8192, kLayers = 78, kEntryBytes = 576;
  for (const int ranks : {2, 4, 8}) {
    CostModel model = glm(ranks);
    model.index_topk = 0;
    model.geometry.streams[1] = {};
    const Residency stripes = residency_of({0, ranks, ranks}, IndexKind::kCopied, ranks);
    const StoredBytes stored = stored_bytes(model.geometry, stripes, kTokens, 0, ranks);
    int64_t most_striped = 0;
    for (int rank = 0; rank < ranks; ++rank)
      most_striped = std::max(most_striped, stored[0][static_cast<size_t>(rank)]);
    // The rank with one layer more than the others, without a buffer for the layer that is being received.
    const int64_t most_layers = ceil_div(kLayers, int64_t{ranks}) * kTokens * kEntryBytes;
    EXPECT_LE(most_striped, most_layers) << ranks;
    EXPECT_EQ(most_striped, kLayers * kTokens * kEntryBytes / ranks) << ranks;

    // Read in one layer by all ranks together, when the whole context lies there: everyone but the owner gets
    // all of it, or everyone all but the own stripe.
    CostSpan span = prefill(Split::kZigzag, stripes);
    span.grouping = {0, ranks, ranks};
    span.start = kTokens;
    span.rows = 2 * ranks;
    span.no_write = true;
    const int64_t by_stripes = total_layer_cost(model, span, false).crossed[K::kEntries];
    const int64_t by_layers = (ranks - 1) * kTokens * kEntryBytes;
    EXPECT_NEAR(static_cast<double>(by_stripes), static_cast<double>(by_layers),
                static_cast<double>(2 * ranks * ranks * kEntryBytes));
  }
}

TEST(Cost, SelectedEntriesAreBounded) {
  CostSpan span = prefill(Split::kZigzag, {striped(8), replicated()});
  span.start = 100'000;
  span.rows = 16;
  for (int rank = 0; rank < 8; ++rank) {
    const Cost cost = layer_cost(glm(8), span, rank, false);
    EXPECT_FALSE(cost.exact);
    // Two rows of 2048 selected entries each, and two entries written elsewhere at most.
    EXPECT_LE(cost.crossed[K::kEntries], 576 * (2 * 2048 + 2));
    EXPECT_GE(cost.crossed[K::kEntries], 576 * 2 * 2048);
  }
  // While every row sees at most top-k keys, all of it is exact.
  span.start = 1000;
  EXPECT_TRUE(total_layer_cost(glm(8), span, true).exact);
}

TEST(Cost, NoWriteWritesNothing) {
  CostModel dense = glm(8);
  dense.index_topk = 0;
  CostSpan span = prefill(Split::kInterleave, {replicated(), replicated()});
  span.rows = 8;
  span.no_write = true;
  EXPECT_EQ(total_step_cost(dense, span).crossed[K::kEntries], 0);
}

TEST(Cost, EmptySegmentsSendNoSums) {
  CostModel model = glm(8);
  model.geometry.heads = 4;  // segments 1, 3, 5, 7 have one head, the others none
  model.moe_segments = 0b1010'1010;
  const CostSpan span = decode(10, {0, 8, 1}, IndexKind::kCopied, 8);
  EXPECT_EQ(layer_cost(model, span, 0, false).crossed[K::kRows], (4 + 4) * 6144 * 4);
  EXPECT_EQ(layer_cost(model, span, 1, false).crossed[K::kRows], (3 + 3) * 6144 * 4);
}

}  // namespace
}  // namespace weft::kv
