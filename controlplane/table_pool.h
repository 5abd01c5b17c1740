// Page tables of the control arena, handed out one for each running sequence (two while it switches).
//
// A table given back is handed out again only when no plan in flight names it. Each time it gets a new
// version, so that a plan and a table that do not belong together are noticed.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "controlplane/fenced_pool.h"

namespace weft::controlplane {

class TablePool {
 public:
  explicit TablePool(int64_t count) : pool_(count), versions_(static_cast<size_t>(count), 0) {}
  bool available() const { return pool_.free_count() > 0; }
  std::pair<TableId, uint32_t> take() {
    const std::optional<TableId> table = pool_.take();
    CHECK(table.has_value(), "no table; ask available() first");
    return {*table, ++versions_[number(*table)]};
  }
  void give_back(TableId table, StepId fence) { pool_.give_back(table, fence, completed_); }
  void complete(StepId completed) {
    completed_ = completed;
    pool_.complete(completed);
  }
  int64_t taken_count() const { return pool_.taken_count(); }
  int64_t in_flight_count() const { return pool_.in_flight_count(); }
  void check_invariants() const { pool_.check_invariants(); }

 private:
  FencedPool<TableId> pool_;
  std::vector<uint32_t> versions_;
  StepId completed_{0};
};

}  // namespace weft::controlplane
