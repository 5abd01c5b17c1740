#include "controlplane/page_allocator.h"

#include "controlplane/page_counts.h"

namespace weft::controlplane {

PageAllocator::PageAllocator(const Limits& limits) {
  for_each_pool(limits.rank_count, [&](kv::Stream stream, int rank) {
    pools_[static_cast<size_t>(stream)].emplace_back(limits.uses(stream) ? limits.pages(stream, rank) : 0);
  });
}

void PageAllocator::complete(StepId completed) {
  CHECK(completed >= completed_, "steps complete in order");
  completed_ = completed;
  for (auto& stream : pools_) {
    for (auto& pool : stream) pool.complete(completed);
  }
}

void PageAllocator::check_invariants() const {
  for (const auto& stream : pools_) {
    for (const auto& pool : stream) pool.check_invariants();
  }
}

}  // namespace weft::controlplane
