// Row-parallel products and the canonical tree that adds their segments.
//
// A contraction that may be cut over ranks (o_proj, down_proj, experts) is computed segment by segment; the V
// = 8 segment results are added by the tree of contiguous halves. Segments that are empty by shape are
// absent: a tree node with one absent child is its other child. A rank owns consecutive segments and sends
// the maximal tree nodes inside them; the receiver adds the rest of the same tree. So the sum does not depend
// on who owned what.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/gemm.h"
#include "kernels/parallel.h"
#include "kv/layout.h"
#include "worker/model/config.h"

namespace weft::worker {

// presence[s]: segment s is not empty by shape.
using SegmentPresence = std::array<bool, kv::kShards>;
// Of o_proj, and of what follows the attention.
SegmentPresence attention_segments(const ModelConfig& config);
// What a segment computes of a mixture: some experts, some of their columns.
struct ExpertSlice {
  kv::Range experts, columns;
  bool empty() const { return experts.empty() || columns.empty(); }
};
ExpertSlice expert_slice(const ModelConfig& config, int segment);
SegmentPresence feed_forward_segments(const ModelConfig& config, FeedForward kind);

// One available node of the tree: its sum for one row, or nullptr if all its segments are absent.
struct NodeSum {
  kv::TreeNode node;
  const float* data = nullptr;  // [width]
};

// out = the tree sum over all segments, of one row. `leaves` are disjoint, ascending and cover all segments.
// out must not alias an input.
void add_tree(std::span<const NodeSum> leaves, int64_t width, float* out);

// The same restricted to the node itself: sums leaves inside `node` into out; false if nothing is present.
bool add_node(kv::TreeNode node, std::span<const NodeSum> leaves, int64_t width, float* out);

// Whether a node has any segment that is present.
bool node_present(kv::TreeNode node, const SegmentPresence& presence);

// Computes the owned segments of a row-parallel product and adds them up to the maximal nodes.
//   compute(row_begin, row_count, sums): writes [row_count][width] floats of each owned segment to
//   sums[segment - segments.begin]; nullptr: the segment is absent
//   place(node, row): where the sum of that node (index into tree_nodes(segments)) goes, [width]
// Nodes without a present segment get zeros. Rows go through in batches, so scratch is bounded.
void sum_segments(
    kv::Range segments, const SegmentPresence& presence, int64_t rows, int64_t width,
    kernels::Parallel& parallel,
    const std::function<void(int64_t row_begin, int64_t row_count, std::span<float* const> sums)>& compute,
    const std::function<float*(size_t node, int64_t row)>& place);

}  // namespace weft::worker
