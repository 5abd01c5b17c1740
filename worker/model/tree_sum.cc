#include "worker/model/tree_sum.h"

#include <algorithm>
#include <cstring>

#include "kernels/elementwise.h"
#include "worker/model/step_state.h"

namespace weft::worker {
namespace {

const NodeSum* find(std::span<const NodeSum> leaves, kv::TreeNode node) {
  for (const NodeSum& leaf : leaves) {
    if (leaf.node == node) return &leaf;
  }
  return nullptr;
}

// Where the sum of a node is: an input as it stands, or `out` after adding; nullptr if absent. `scratch` has
// a row for the right-hand side of each level, since the left one is being kept in `out`.
const float* sum_of(kv::TreeNode node, std::span<const NodeSum> leaves, int64_t width, float* out,
                    float* scratch) {
  if (const NodeSum* leaf = find(leaves, node)) return leaf->data;
  if (node.count == 1) return nullptr;
  const int half = node.count / 2;
  const float* left = sum_of({node.first, half}, leaves, width, out, scratch);
  if (left != nullptr && left != out) {
    std::memcpy(out, left, static_cast<size_t>(width) * sizeof(float));
    left = out;
  }
  const float* right = sum_of({node.first + half, half}, leaves, width, scratch, scratch + width);
  if (left == nullptr) {
    if (right == nullptr || right != scratch) return right;
    std::memcpy(out, right, static_cast<size_t>(width) * sizeof(float));
    return out;
  }
  if (right != nullptr) kernels::add(out, right, width);
  return out;
}

}  // namespace

SegmentPresence attention_segments(const ModelConfig& config) {
  SegmentPresence presence{};
  for (int segment = 0; segment < kv::kShards; ++segment) {
    presence[static_cast<size_t>(segment)] = !kv::segment_items(segment, config.heads).empty();
  }
  return presence;
}

ExpertSlice expert_slice(const ModelConfig& config, int segment) {
  if (config.split_experts) return {{0, config.experts}, kv::segment_columns(segment, config.expert_width)};
  return {kv::segment_items(segment, config.experts), {0, config.expert_width}};
}

SegmentPresence feed_forward_segments(const ModelConfig& config, FeedForward kind) {
  const bool dense = kind == FeedForward::kDense;
  SegmentPresence presence{};
  for (int segment = 0; segment < kv::kShards; ++segment) {
    const bool columns =
        !kv::segment_columns(segment, dense ? config.dense_width : config.shared_width).empty();
    const bool experts = !dense && !expert_slice(config, segment).empty();
    presence[static_cast<size_t>(segment)] = columns || experts;
  }
  return presence;
}

bool add_node(kv::TreeNode node, std::span<const NodeSum> leaves, int64_t width, float* out) {
  constexpr int64_t kLevels = 3;
  static_assert(1 << kLevels == kv::kShards);
  thread_local std::vector<float> scratch;
  scratch.resize(static_cast<size_t>(kLevels * width));
  const float* sum = sum_of(node, leaves, width, out, scratch.data());
  if (sum == nullptr) return false;
  if (sum != out) std::memcpy(out, sum, static_cast<size_t>(width) * sizeof(float));
  return true;
}

void add_tree(std::span<const NodeSum> leaves, int64_t width, float* out) {
  if (!add_node({0, kv::kShards}, leaves, width, out)) std::fill(out, out + width, 0.0f);
}

void sum_segments(
    kv::Range segments, const SegmentPresence& presence, int64_t rows, int64_t width,
    kernels::Parallel& parallel,
    const std::function<void(int64_t row_begin, int64_t row_count, std::span<float* const> sums)>& compute,
    const std::function<float*(size_t node, int64_t row)>& place) {
  constexpr int64_t kRowBatch = 256;
  const std::vector<kv::TreeNode> nodes = kv::tree_nodes(segments);
  static thread_local std::vector<float> buffer;
  const int64_t batch = std::min(rows, kRowBatch);
  float* const first_sum = scratch(buffer, segments.size() * batch * width);
  std::array<float*, kv::kShards> all_sums = {};
  const std::span<float* const> sums(all_sums.data(), static_cast<size_t>(segments.size()));
  for (int64_t i = 0; i < segments.size(); ++i) {
    if (presence[static_cast<size_t>(segments.begin + i)]) {
      all_sums[static_cast<size_t>(i)] = first_sum + i * batch * width;
    }
  }
  for (int64_t begin = 0; begin < rows; begin += kRowBatch) {
    const int64_t count = std::min(kRowBatch, rows - begin);
    compute(begin, count, sums);
    for_rows(parallel, count, 16, [&](int64_t first, int64_t last) {
      std::vector<NodeSum> leaves(sums.size());
      for (int64_t row = first; row < last; ++row) {
        for (size_t i = 0; i < sums.size(); ++i) {
          leaves[i] = {{static_cast<int>(segments.begin) + static_cast<int>(i), 1},
                       sums[i] == nullptr ? nullptr : sums[i] + row * width};
        }
        for (size_t node = 0; node < nodes.size(); ++node) {
          float* out = place(node, begin + row);
          if (!add_node(nodes[node], leaves, width, out)) std::fill(out, out + width, 0.0f);
        }
      }
    });
  }
}

bool node_present(kv::TreeNode node, const SegmentPresence& presence) {
  return std::any_of(presence.begin() + node.first, presence.begin() + node.first + node.count,
                     [](bool present) { return present; });
}

}  // namespace weft::worker
