#include "worker/model/residual.h"

#include <cstring>

#include "kernels/elementwise.h"

namespace weft::worker {

void add_to_residual(float* sum, const float* bias, float* residual, int64_t width) {
  if (bias != nullptr) kernels::add(sum, bias, width);
  kernels::add(sum, residual, width);
  std::memcpy(residual, sum, static_cast<size_t>(width) * sizeof(float));
}

void add_sums(StepState& state, const PublishedSums& sums, const SegmentPresence& presence, const float* bias,
              kv::Range home, const std::function<int64_t(int64_t home)>& outbox_row,
              const std::function<void(int64_t home)>& done) {
  const int64_t d = state.config.hidden;
  std::vector<NodeSum> first_rows;
  for (int member = 0; member < sums.ranks.width; ++member) {
    const int rank = sums.ranks.base + member;
    const float* rows = state.inbox(rank) + sums.first(rank) * d;
    for (const kv::TreeNode& node : kv::tree_nodes(kv::owned_segments(member, sums.ranks.width))) {
      first_rows.push_back({node, node_present(node, presence) ? rows : nullptr});
      rows += sums.rows * d;
    }
  }
  for_rows(state.parallel, home.size(), 8, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(static_cast<size_t>(d));
    std::vector<NodeSum> leaves(first_rows);
    for (int64_t i = home.begin + begin; i < home.begin + end; ++i) {
      const int64_t row = outbox_row(i);
      for (size_t node = 0; node < leaves.size(); ++node) {
        if (leaves[node].data != nullptr) leaves[node].data = first_rows[node].data + row * d;
      }
      add_tree(leaves, d, sum.data());
      add_to_residual(sum.data(), bias, state.x.data() + i * d, d);
      done(i);
    }
  });
}

int64_t remote_sum_bytes(const StepState& state, const kv::Grouping& ranks, const SegmentPresence& presence) {
  int64_t nodes = 0;
  for (int member = 0; member < ranks.width; ++member) {
    if (ranks.base + member == state.rank) continue;
    for (const kv::TreeNode& node : kv::tree_nodes(kv::owned_segments(member, ranks.width))) {
      nodes += node_present(node, presence) ? 1 : 0;
    }
  }
  return nodes * state.config.hidden * static_cast<int64_t>(sizeof(float));
}

}  // namespace weft::worker
