// The plan that runs a span of the cost arithmetic, for tests that count what it really moves.
#pragma once

#include <functional>

#include "kv/cost.h"
#include "proto/worker.pb.h"

namespace weft::test {

// A plan of that one span over table 0, version 1; `token` gives the input of a position.
inline wire::StepPlan plan_of(const kv::CostSpan& span, uint64_t step,
                              const std::function<uint32_t(int64_t position)>& token) {
  wire::StepPlan plan;
  plan.set_step(step);
  wire::Span* out = plan.add_spans();
  out->set_request(1);
  out->set_table_version(1);
  out->set_start(static_cast<uint64_t>(span.start));
  out->set_rows(static_cast<uint32_t>(span.rows));
  out->set_split(static_cast<uint32_t>(span.split));
  out->set_group_base(static_cast<uint32_t>(span.grouping.base));
  out->set_group_width(static_cast<uint32_t>(span.grouping.width));
  out->set_group_c(static_cast<uint32_t>(span.grouping.c));
  out->set_origin(static_cast<uint32_t>(span.origin));
  out->set_index_c(static_cast<uint32_t>(span.index_c));
  const bool splits = span.split == kv::Split::kShared && span.grouping.c > 1;
  out->set_replicate_query(splits && span.mechanisms.query == kv::QueryPath::kReplicated);
  out->set_tree_partials(splits && span.mechanisms.partials == kv::PartialsPath::kTree);
  out->set_copy_context(span.split != kv::Split::kShared && span.mechanisms.fetch == kv::FetchPath::kCopies);
  out->set_pass_query(span.split != kv::Split::kShared && span.mechanisms.context == kv::ContextPath::kPassQ);
  for (int64_t row = 0; row < span.rows; ++row) out->add_tokens(token(span.start + row));
  return plan;
}

}  // namespace weft::test
