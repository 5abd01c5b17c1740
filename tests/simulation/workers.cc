// Tables, the ring of plans and the exchange points; what a rank does in a phase is in rank_run.cc.
#include "tests/simulation/workers.h"

#include <algorithm>

namespace weft::simulation {

Workers::Workers(const Limits& limits, Verdict verdict)
    : limits_(limits),
      verdict_(verdict),
      shape_(shape_of(limits.geometry)),
      tables_(static_cast<size_t>(limits.table_count)) {
  for (const kv::Stream stream : kv::kAllStreams) {
    for (int rank = 0; rank < limits.rank_count; ++rank) {
      pools_[static_cast<size_t>(stream)].emplace_back(
          static_cast<size_t>(limits.uses(stream) ? limits.pages(stream, rank) : 0),
          Page(static_cast<size_t>(limits.geometry.block_tokens)));
    }
    host_[static_cast<size_t>(stream)].resize(
        static_cast<size_t>(limits.host_pages[static_cast<size_t>(stream)]),
        Page(static_cast<size_t>(limits.geometry.block_tokens)));
  }
}

void Workers::write_tables(const Plan& plan, std::span<const std::shared_ptr<const Plan>> in_flight) {
  const int64_t block_pages = limits_.geometry.parts() * limits_.rank_count;
  for (const TableWrite& write : plan.table_writes) {
    for (const auto& other : in_flight) {
      for (const Span& span : other->spans) {
        if (span.table != write.table) continue;
        verdict_.expect(
            Checker::kPlan,
            write.version == span.table_version &&
                write.first_block >= ceil_div(span.start + span.rows, limits_.geometry.block_tokens),
            "table ", number(write.table), " is written where step ", number(other->step), " reads it");
      }
    }
    Table& table = tables_.at(number(write.table));
    if (table.version != write.version) {
      table.pages.clear();
      table.host.clear();
      table.hot.clear();
      table.version = write.version;
    }
    verdict_.expect(Checker::kPlan, write.first_block * block_pages == std::ssize(table.pages),
                    "a table is not appended to where it ends");
    table.pages.insert(table.pages.end(), write.pages.begin(), write.pages.end());
    verdict_.expect(Checker::kPlan,
                    std::ssize(table.pages) % block_pages == 0 &&
                        std::ssize(table.pages) <= limits_.table_blocks() * block_pages,
                    "a table of ", table.pages.size(), " pages");
  }
  const int64_t host_parts = limits_.geometry.first_part(kv::Stream::kIndexKeys);
  for (const HostTableWrite& write : plan.host_writes) {
    Table& table = tables_.at(number(write.table));
    for (const auto& other : in_flight) {
      for (const Span& span : other->spans)
        verdict_.expect(
            Checker::kPlan,
            span.table != write.table || (!write.new_table && write.first_block >= span.host_blocks),
            "the host table ", number(write.table), " is written where step ", number(other->step),
            " reads it");
    }
    verdict_.expect(Checker::kPlan, write.first_block * host_parts == std::ssize(table.host),
                    "a host table is not appended to where it ends");
    verdict_.expect(Checker::kPlan, write.hot_pages.empty() || write.new_table,
                    "a hot buffer changes under its table");
    table.host.insert(table.host.end(), write.pages.begin(), write.pages.end());
    if (write.new_table) table.hot = write.hot_pages;
  }
}

void Workers::publish(std::shared_ptr<const Plan> plan) {
  Entry entry;
  std::vector<kv::OwnedSpan> owned;
  for (const Span& span : plan->spans) {
    const bool shared = span.split == kv::Split::kShared;
    entry.owned.push_back(shared ? -1 : static_cast<int>(owned.size()));
    if (!shared) owned.push_back({span.split, span.start, span.rows});
    const bool wide = shared && span.grouping.width > 1;
    entry.passes_entries |=
        !shared || (wide && ((span.grouping.c > 1 && !span.replicate_query) || span.index_c > 1));
    entry.passes_partials |= span.pass_query || (wide && (span.grouping.c > 1 || span.index_c > 1));
  }
  entry.passes_copies = !plan->copies.empty() || plan->spans.empty();
  entry.ranks = kv::Topology(plan->ranks);
  entry.owners = kv::split_rows(owned, limits_.index_topk, entry.ranks.count());
  for (int rank = 0; rank < limits_.rank_count; ++rank) {
    entry.partials[static_cast<size_t>(rank)].resize(plan->spans.size());
    entry.words[static_cast<size_t>(rank)].resize(plan->spans.size());
  }
  entry.plan = std::move(plan);
  while (ring_.size() > 3 && ring_.front().all_did(kPhases)) ring_.pop_front();
  ring_.push_back(std::move(entry));
}

std::span<const PageId> Workers::pages(const Span& span, int64_t block, int part) const {
  const Table& table = tables_.at(number(span.table));
  verdict_.expect(Checker::kPlan, table.version == span.table_version, "table ", number(span.table),
                  " has version ", table.version, ", not ", span.table_version);
  const int64_t first = (block * limits_.geometry.parts() + part) * limits_.rank_count;
  CHECK_LE(first + limits_.rank_count, std::ssize(table.pages));
  return std::span(table.pages).subspan(static_cast<size_t>(first), static_cast<size_t>(limits_.rank_count));
}

PageId Workers::host_page(const Span& span, int64_t block, int part) const {
  const Table& table = tables_.at(number(span.table));
  const int64_t at = block * limits_.geometry.first_part(kv::Stream::kIndexKeys) + part;
  verdict_.expect(Checker::kPlan, table.version == span.table_version && at < std::ssize(table.host),
                  "request ", number(span.request), " counts block ", block,
                  " as one on the host, and its table does not name it");
  return at < std::ssize(table.host) ? table.host[static_cast<size_t>(at)] : PageId{0};
}

Workers::Entry* Workers::current(int rank) {
  for (Entry& entry : ring_) {
    if (entry.ranks.contains(rank) && entry.head(rank) < kPhases) return &entry;
  }
  return nullptr;
}

// Whether there is an exchange point before a phase.
bool Workers::passes(const Entry& entry, Phase phase) const {
  switch (phase) {
    case Phase::kCopies:
      return false;
    case Phase::kWrite0:
      return entry.passes_copies;
    case Phase::kPartials0:
    case Phase::kPartials1:
      return entry.passes_entries;
    case Phase::kSums0:
    case Phase::kSums1:
      return entry.passes_partials;
    case Phase::kWrite1:
    case Phase::kFinish:
      return true;
  }
  return true;
}

bool Workers::ready(int rank) const {
  const Entry* entry = current(rank);
  if (entry == nullptr) return false;
  const int next = entry->head(rank);
  if (static_cast<Phase>(next) == Phase::kWrite0 && !has_inputs(*entry)) return false;
  return !passes(*entry, static_cast<Phase>(next)) || entry->all_did(next);
}

// The tokens that rows take from the token table have been drawn.
bool Workers::has_inputs(const Entry& entry) const {
  return std::all_of(entry.plan->spans.begin(), entry.plan->spans.end(), [&](const Span& span) {
    return !span.has_input_ref || token_table_.contains({span.input_ref.step, span.input_ref.sample_index});
  });
}

bool Workers::poisoned(int rank) const {
  const Entry* entry = current(rank);
  if (entry == nullptr) return false;
  const Plan& plan = *entry->plan;
  const auto phase = static_cast<Phase>(entry->head(rank));
  if (phase == Phase::kCopies) {
    return std::any_of(plan.loads.begin(), plan.loads.end(), [&](const HostCopy& load) {
      return load.rank == rank && truths_.at(load.request).poison_loads;
    });
  }
  if (phase != Phase::kWrite0) return false;
  return std::any_of(plan.spans.begin(), plan.spans.end(), [&](const Span& span) {
    const int64_t row = truths_.at(span.request).poison_row;
    return row >= span.start && row < span.start + span.rows && entry->ranks.place(rank) == span.sampler_rank;
  });
}

Workers::Progress Workers::progress(StepId step) const {
  Progress progress;
  for (const Entry& entry : ring_) {
    if (entry.plan->step != step) continue;
    for (int rank = 0; rank < limits_.rank_count; ++rank) {
      if (entry.head(rank) > 0) progress.begun |= mask_of(rank);
      if (entry.head(rank) == kPhases) progress.finished |= mask_of(rank);
    }
  }
  return progress;
}

}  // namespace weft::simulation
