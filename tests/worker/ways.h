// All ways to run one sequence on W ranks, and its page table, for tests that make plans by hand.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "kv/cost.h"
#include "proto/vocab/random.h"
#include "tests/support/local_workers.h"
#include "tests/worker/cost_plan.h"

namespace weft::test {

// One way to run a sequence.
struct Way {
  int ranks;
  kv::Grouping grouping;
  kv::IndexWish index;
  kv::Split split;
  int origin;
  kv::Mechanisms mechanisms = {};
  std::string name() const {
    return std::string(kv::split_name(split)) + ", " + kv::grouping_name(grouping, ranks) + ", index " +
           kv::index_name(index) + ", origin " + std::to_string(origin) + " on " + std::to_string(ranks) +
           " " + kv::mechanisms_name(mechanisms);
  }
};

// Rows that select entries do not pass their queries: `dense` says that there are none.
inline std::vector<Way> all_ways(int ranks, bool dense) {
  std::vector<kv::Grouping> groupings;
  for (const kv::DecodeWish& wish : kv::decode_wishes(ranks)) {
    const int width = wish.kind == kv::DecodeKind::kDp ? wish.width : ranks;
    groupings.push_back({ranks - width, width, wish.c});
  }
  std::vector<kv::IndexWish> indexes{kv::IndexKind::kCopied, kv::IndexKind::kSplit};
  if (ranks > 1) indexes.push_back({kv::IndexKind::kCopied, ranks});
  if (ranks > 2 && ranks % 2 == 0) indexes.push_back({kv::IndexKind::kSplit, 2});
  std::vector<Way> ways;
  for (const kv::Grouping& grouping : groupings) {
    for (kv::IndexWish index : indexes) {
      for (kv::Split split :
           {kv::Split::kShared, kv::Split::kZigzag, kv::Split::kInterleave, kv::Split::kContiguous}) {
        ways.push_back({ranks, grouping, index, split, (ranks + 1) % std::max(grouping.c, 1)});
      }
    }
  }
  // The other mechanisms, where they mean something.
  for (const kv::Grouping& grouping : groupings) {
    if (grouping.c == 1) continue;
    const Way plain{ranks, grouping, kv::IndexKind::kSplit, kv::Split::kShared, 1};
    for (const char* text : {"query=replicated", "partials=tree", "query=replicated,partials=tree"}) {
      Way& way = ways.emplace_back(plain);
      way.mechanisms = kv::parse_mechanisms(text, {}).value();
      if (way.mechanisms.partials == kv::PartialsPath::kTree && (grouping.c & (grouping.c - 1)) != 0)
        ways.pop_back();
    }
  }
  for (const kv::Grouping& grouping : groupings) {
    for (kv::Split split : {kv::Split::kZigzag, kv::Split::kInterleave, kv::Split::kContiguous}) {
      if (ranks == 1) continue;
      const Way plain{ranks, grouping, kv::IndexKind::kSplit, split, 1};
      ways.emplace_back(plain).mechanisms.fetch = kv::FetchPath::kCopies;
      if (dense) ways.emplace_back(plain).mechanisms.context = kv::ContextPath::kPassQ;
    }
  }
  return ways;
}

inline kv::CostSpan span_of(const Way& way) {
  kv::CostSpan span;
  span.grouping = way.grouping;
  span.index_c = kv::index_parts(way.grouping, way.index);
  span.residency = kv::residency_of(way.grouping, way.index, way.ranks);
  span.origin = way.origin;
  span.mechanisms = way.mechanisms;
  span.sampler = way.ranks / 2;
  return span;
}

// Table 0, with every block of it: page b · parts + p of each holder.
inline void write_table(LocalWorkers& workers, const kv::CostSpan& span, int ranks) {
  const kv::CacheGeometry& geometry = workers.geometry();
  std::vector<PageId> pages;
  for (int64_t block = 0; block < workers.options().table_blocks; ++block) {
    for (int part = 0; part < geometry.parts(); ++part) {
      const RankMask holders = kv::part_holders(geometry, span.residency, block, part, span.origin, ranks);
      const int in_stream = part - geometry.first_part(geometry.stream_of(part));
      const PageId page{
          static_cast<uint32_t>(block * geometry.stream(geometry.stream_of(part)).parts + in_stream)};
      for (int rank = 0; rank < ranks; ++rank) pages.push_back(holds(holders, rank) ? page : kNoPage);
    }
  }
  workers.control().write_table(TableId{0}, 0, pages);
  workers.control().set_table_version(TableId{0}, 1);
}

// A plan of that one span, with tokens drawn by position.
inline wire::StepPlan plan_of(const kv::CostSpan& span, uint64_t step, bool digest, int64_t vocabulary) {
  wire::StepPlan plan = test::plan_of(span, step, [&](int64_t position) {
    return static_cast<uint32_t>(mix64(static_cast<uint64_t>(position))) % static_cast<uint32_t>(vocabulary);
  });
  wire::Span* out = plan.mutable_spans(0);
  out->set_sample_rows(span.head_rows > 0 ? 1 : 0);
  out->set_prefill(span.rows > 1);
  out->set_digest(digest);
  out->set_sampler_rank(static_cast<uint32_t>(span.sampler));
  return plan;
}

// What a rank reports to have moved.
inline kv::CrossedBytes measured(const wire::StepResult& result) {
  kv::CrossedBytes out;
  for (const wire::SpanMeter& meter : result.meters()) {
    for (int kind = 0; kind < kv::kCrossKinds; ++kind) {
      out.by_kind[static_cast<size_t>(kind)] += static_cast<int64_t>(meter.crossed(kind));
    }
  }
  return out;
}

}  // namespace weft::test
