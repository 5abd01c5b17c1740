// Hands out the pages of every rank's pool, one free list for each stream and rank.
//
// Knows no block and no policy: see memory.h. Deferred frees as in fenced_pool.h.
#pragma once

#include <optional>
#include <vector>

#include "controlplane/fenced_pool.h"
#include "controlplane/limits.h"

namespace weft::controlplane {

class PageAllocator {
 public:
  explicit PageAllocator(const Limits& limits);

  // Empty when no page is free now.
  std::optional<PageId> take(kv::Stream stream, int rank) { return pool(stream, rank).take(); }
  // The page may be named by plans up to `fence`.
  void give_back(kv::Stream stream, int rank, PageId page, StepId fence) {
    pool(stream, rank).give_back(page, fence, completed_);
  }
  void complete(StepId completed);
  StepId completed() const { return completed_; }

  const FencedPool<PageId>& pool(kv::Stream stream, int rank) const {
    return pools_[static_cast<size_t>(stream)][static_cast<size_t>(rank)];
  }
  void check_invariants() const;

 private:
  FencedPool<PageId>& pool(kv::Stream stream, int rank) {
    return pools_[static_cast<size_t>(stream)][static_cast<size_t>(rank)];
  }
  std::array<std::vector<FencedPool<PageId>>, kv::kStreams> pools_;
  StepId completed_{0};
};

}  // namespace weft::controlplane
