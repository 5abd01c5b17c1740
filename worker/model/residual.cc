#include "worker/model/residual.h"

#include <cstring>

#include "kernels/elementwise.h"

namespace weft::worker {

void add_to_residual(float* sum, const float* bias, float* residual, int64_t width) {
  if (bias != nullptr) kernels::add(sum, bias, width);
  kernels::add(sum, residual, width);
  std::memcpy(residual, sum, static_cast<size_t>(width) * sizeof(float));
}

void add_sums(StepState& state, const SegmentPresence& presence, const float* bias, int64_t outbox_rows,
              int64_t home_rows, const std::function<int64_t(int64_t home)>& outbox_row,
              const std::function<void(int64_t home)>& done) {
  const int64_t d = state.config.hidden;
  std::vector<NodeSum> first_rows;
  for (int from = 0; from < state.rank_count; ++from) {
    const float* rows = state.inbox(from);
    for (const kv::TreeNode& node : kv::tree_nodes(kv::owned_segments(from, state.rank_count))) {
      first_rows.push_back({node, node_present(node, presence) ? rows : nullptr});
      rows += outbox_rows * d;
    }
  }
  for_rows(state.parallel, home_rows, 8, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(d));
    std::vector<NodeSum> leaves(first_rows);
    for (int64_t home = begin; home < end; ++home) {
      const int64_t row = outbox_row(home);
      for (size_t node = 0; node < leaves.size(); ++node) {
        if (leaves[node].data != nullptr) leaves[node].data = first_rows[node].data + row * d;
      }
      add_tree(leaves, d, sum.data());
      add_to_residual(sum.data(), bias, state.x.data() + home * d, d);
      done(home);
    }
  });
}

int64_t remote_sum_bytes(const StepState& state, const SegmentPresence& presence) {
  int64_t nodes = 0;
  for (int from = 0; from < state.rank_count; ++from) {
    if (from == state.rank) continue;
    for (const kv::TreeNode& node : kv::tree_nodes(kv::owned_segments(from, state.rank_count))) {
      nodes += node_present(node, presence) ? 1 : 0;
    }
  }
  return nodes * state.config.hidden * static_cast<int64_t>(sizeof(float));
}

}  // namespace weft::worker
