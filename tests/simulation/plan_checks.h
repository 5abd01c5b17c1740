// What is checked of a plan when it is made: its form, the pages that it names, the copies that it carries.
//
// Checkers "plan", "pages" and "copies". before() looks at the control plane just before it plans, so that
// what a switch costs is known from its own price and can be compared with the copies in the plan.
#pragma once

#include <array>
#include <map>
#include <set>
#include <vector>

#include "tests/simulation/core.h"

namespace weft::simulation {

class PlanChecks {
 public:
  explicit PlanChecks(Core& core);

  void before();
  void check(const Plan& plan);  // its tables are written; not among core.unapplied yet

 private:
  void check_form(const Plan& plan);
  void check_host_form(const Plan& plan);
  void check_pages(const Plan& plan);
  void check_copies(const Plan& plan);
  void name_pages(const Span& span);
  void name_page(const Span& span, kv::Stream stream, size_t rank, PageId page, uint64_t content, bool writes,
                 int64_t block);
  uint64_t content(const Span& span, int64_t block) const;

  // Of a page, in one look over the plans in flight.
  struct Named {
    uint64_t look = 0;
    uint64_t content = 0;
    RequestId request{};
    bool by_many = false, written = false;
  };
  Core& core_;
  std::map<RequestId, int64_t> prices_;  // bytes
  // Before the plan: how often it had left, and its host blocks.
  std::map<RequestId, std::pair<int64_t, int64_t>> before_;
  std::array<std::vector<std::vector<Named>>, kv::kStreams> named_;
  // Of a context on the host: its table, and how many host blocks its last plan counted.
  struct OnHost {
    TableId table{};
    uint32_t version = 0;
    int64_t blocks = 0;
  };
  std::map<RequestId, OnHost> on_host_;
  uint64_t looks_ = 0;
};

}  // namespace weft::simulation
