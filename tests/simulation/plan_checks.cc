#include "tests/simulation/plan_checks.h"

namespace weft::simulation {

PlanChecks::PlanChecks(Core& core) : core_(core) {
  for_each_pool(core.setup.limits.rank_count, [&](kv::Stream stream, int rank) {
    named_[static_cast<size_t>(stream)].emplace_back(
        static_cast<size_t>(core.setup.limits.pages(stream, rank)));
  });
}

void PlanChecks::before() {
  prices_.clear();
  before_.clear();
  for (const auto& [id, live] : core_.ledger.live()) {
    const auto snapshot = core_.plane.request(id);
    if (!snapshot || snapshot->state == RequestState::kWaiting) continue;
    if (snapshot->thinned) continue;  // its wish does not say where it lies, and it may get copies back
    const auto price = core_.plane.price(id, snapshot->wish);
    if (price) prices_[id] = price->bytes_moved;
    before_[id] = {snapshot->preempted, snapshot->host_blocks};
  }
}

void PlanChecks::check(const Plan& plan) {
  check_form(plan);
  check_host_form(plan);
  check_pages(plan);
  check_copies(plan);
}

void PlanChecks::check_form(const Plan& plan) {
  const Limits& limits = core_.setup.limits;
  const auto expect = [&](bool ok, const char* what) {
    core_.verdict.expect(Checker::kPlan, ok, "step ", number(plan.step), ": ", what);
  };
  const int places = rank_count_of(plan.ranks);
  std::set<RequestId> seen;
  std::set<int64_t> cells;
  std::set<std::pair<int, int>> groupings;
  int64_t prefill = 0, decode = 0, head = 0, owned = 0;
  for (const Span& span : plan.spans) {
    expect(seen.insert(span.request).second, "two spans of a request");
    expect(core_.ledger.live().contains(span.request), "a span of a request that has ended");
    expect(span.rows >= 1, "a span without rows");
    expect(span.has_input_ref ? span.tokens.empty() && span.rows == 1 : std::ssize(span.tokens) == span.rows,
           "not an input for each row");
    expect(span.prefill ? span.sample_rows <= 1 : span.sample_rows == span.rows, "wrong sample rows");
    expect(span.draft_tokens == 0 || (span.draft_tokens > 0 && span.sample_rows > 0),
           "guesses without a sample");
    for (int64_t i = 0; i < span.sample_rows + span.draft_tokens; ++i) {
      const int64_t cell = int64_t{span.sample_index} + i;
      expect(cells.insert(cell).second && cell < limits.max_samples, "a cell twice, or beyond the last");
    }
    expect(span.sampler_rank >= 0 && span.sampler_rank < places, "no such sampler");
    expect(span.prefill || span.split == kv::Split::kShared, "a decode span that is split");
    expect(span.split != kv::Split::kZigzag || span.rows >= 2 * places, "a zigzag too short");
    expect(span.split != kv::Split::kInterleave || span.rows >= places, "an interleave too short");
    (span.prefill ? prefill : decode) += span.rows;
    head += span.digest ? span.rows : span.sample_rows;
    owned += span.split == kv::Split::kShared ? 0 : 1;
    if (!span.prefill) groupings.insert({span.grouping.width, span.grouping.c});
    core_.coverage.mark(Mark::kFullHits) += span.no_write ? 1 : 0;
    core_.coverage.mark(Mark::kInputRefs) += span.has_input_ref ? 1 : 0;
  }
  expect(!plan.spans.empty() || !plan.loads.empty() || !plan.spills.empty() ||
             (!plan.copies.empty() && core_.changing()),
         "it is empty");
  expect(plan.spans.empty() || !core_.changing(), "it has rows while the ranks change");
  expect(plan.ranks == core_.topology, "other ranks than those of the topology");
  expect(prefill + decode <= limits.max_step_rows, "too many rows");
  expect(std::ssize(plan.copies) <= limits.max_copies(), "too many copies");
  expect(plan.padded.prefill >= prefill && plan.padded.decode >= decode && plan.padded.head >= head,
         "less padded rows than rows");
  core_.coverage.mark(Mark::kOwnedSpans) += owned;
  core_.coverage.mark(Mark::kMixedSteps) += owned > 0 && groupings.size() > 1 ? 1 : 0;
  core_.coverage.mark(Mark::kCopies) += std::ssize(plan.copies);
}

// Host blocks come before all rows that are written, and become more; behind them only the window has
// entries.
void PlanChecks::check_host_form(const Plan& plan) {
  const Limits& limits = core_.setup.limits;
  const int64_t block_tokens = limits.geometry.block_tokens;
  for (const Span& span : plan.spans) {
    const auto live = core_.ledger.live().find(span.request);
    const bool on_host = live != core_.ledger.live().end() && live->second.on_host;
    const auto expect = [&](bool ok, const char* what) {
      core_.verdict.expect(Checker::kPlan, ok, "step ", number(plan.step), ", request ", number(span.request),
                           " with ", span.host_blocks, " host blocks: ", what);
    };
    if (!on_host) {
      expect(span.host_blocks == 0, "its context is not on the host");
      continue;
    }
    const int64_t end = span.start + span.rows;
    expect(!span.pass_query, "its queries are passed");
    expect(span.host_blocks * block_tokens <= (span.no_write ? end : span.start), "it writes into one");
    expect(ceil_div(end, block_tokens) - span.host_blocks <= limits.host_window, "more than its window");
    OnHost& last = on_host_[span.request];
    const bool same = last.table == span.table && last.version == span.table_version;
    expect(!same || span.host_blocks >= last.blocks, "it counted more of them before");
    last = {span.table, span.table_version, span.host_blocks};
    if (span.host_blocks == 0) continue;
    ++core_.coverage.mark(Mark::kHostSpans);
    core_.coverage.mark(Mark::kHostFullHits) += span.no_write ? 1 : 0;
    core_.coverage.mark(Mark::kHostDrafts) += !span.prefill && span.rows > 1 ? 1 : 0;
    core_.coverage.mark(Mark::kHostOwned) += span.split != kv::Split::kShared ? 1 : 0;
  }
  const int64_t hot_pages = ceil_div(limits.hot_tokens, block_tokens) *
                            limits.geometry.stream(kv::Stream::kEntries).parts * limits.rank_count;
  for (const HostTableWrite& write : plan.host_writes)
    core_.verdict.expect(Checker::kPlan, std::ssize(write.hot_pages) <= hot_pages, "step ", number(plan.step),
                         " names ", write.hot_pages.size(), " pages of a hot buffer");
}

// A page may be named by two requests only as the same full block of the same text that neither writes.
void PlanChecks::check_pages(const Plan& plan) {
  if (!core_.verdict.on(Checker::kPages)) return;
  ++looks_;
  for (const auto& other : core_.unapplied) {
    for (const Span& span : other->spans) name_pages(span);
  }
  for (const Span& span : plan.spans) name_pages(span);
}

void PlanChecks::name_pages(const Span& span) {
  const kv::CacheGeometry& geometry = core_.setup.limits.geometry;
  const int64_t end = span.start + span.rows;
  for (int64_t block = 0; block * geometry.block_tokens < end; ++block) {
    const uint64_t text = content(span, block);
    const bool writes = !span.no_write && (block + 1) * geometry.block_tokens > span.start;
    for (int part = 0; part < geometry.parts(); ++part) {
      if (core_.workers.on_host(span, block, part)) continue;
      const auto ids = core_.workers.pages(span, block, part);
      const uint64_t own = hash::fold(text, static_cast<uint64_t>(part));
      for (size_t rank = 0; rank < ids.size(); ++rank)
        name_page(span, geometry.stream_of(part), rank, ids[rank], own, writes, block);
    }
  }
  // Pages of its hot buffer are nothing else, whether the rows use it or not.
  const auto hot = core_.workers.hot_pages(span);
  for (size_t i = 0; i < hot.size(); ++i)
    name_page(span, kv::Stream::kEntries, i % static_cast<size_t>(core_.setup.limits.rank_count), hot[i],
              hash::fold(number(span.request), ~uint64_t{0}), true, -1);
}

// As a block of the request; −1: as one of its hot buffer.
void PlanChecks::name_page(const Span& span, kv::Stream stream, size_t rank, PageId page, uint64_t content,
                           bool writes, int64_t block) {
  if (page == kNoPage) return;
  Named& named = named_[static_cast<size_t>(stream)][rank].at(number(page));
  if (named.look != looks_) named = {looks_, content, span.request, false, false};
  named.by_many = named.by_many || named.request != span.request;
  named.written = named.written || writes;
  core_.verdict.expect(
      Checker::kPages, named.content == content && !(named.by_many && named.written), "page ", number(page),
      " of rank ", rank, " is block ", block, " of request ", number(span.request),
      named.by_many ? ", and of request " : ", and another of request ", number(named.request));
}

// Equal for full blocks of equal text that may be shared.
uint64_t PlanChecks::content(const Span& span, int64_t block) const {
  const Truth& truth = core_.workers.truth(span.request);
  const int64_t last = (block + 1) * core_.setup.limits.geometry.block_tokens - 1;
  const auto live = core_.ledger.live().find(span.request);
  const bool shares =
      live == core_.ledger.live().end() || (live->second.arrival.use_prefix_cache && !live->second.on_host);
  if (!shares || last >= truth.rows())
    return hash::fold(number(span.request), static_cast<uint64_t>(block) << 32);
  return hash::fold(truth.entry(last, 0, 1).key, static_cast<uint64_t>(block) << 32 | 1);
}

void PlanChecks::check_copies(const Plan& plan) {
  std::set<std::tuple<int, int, uint32_t>> targets;
  std::map<RequestId, int64_t> carried;
  std::vector<RequestId> order;
  for (const PageCopy& copy : plan.copies) {
    core_.verdict.expect(
        Checker::kCopies,
        targets.insert({static_cast<int>(copy.stream), copy.to_rank, number(copy.to_page)}).second, "step ",
        number(plan.step), " copies to a page twice");
    if (!carried.contains(copy.request)) order.push_back(copy.request);
    carried[copy.request] += core_.setup.limits.geometry.page_bytes(copy.stream);
  }
  if (plan.spans.empty()) {  // a change of ranks, whose notice tells the sum
    for (const auto& [request, bytes] : carried) core_.ledger.moved(bytes);
    return;
  }
  for (const PageCopy& copy : plan.copies) {
    core_.verdict.expect(
        Checker::kCopies,
        !targets.contains({static_cast<int>(copy.stream), copy.from_rank, number(copy.from_page)}), "step ",
        number(plan.step), " copies what it copies to");
  }
  // Who left and came in again at once lies elsewhere. Of blocks that turn out to be on the host already the
  // entries need not move.
  std::set<RequestId> less;
  std::erase_if(prices_, [&](const auto& price) {
    const auto snapshot = core_.plane.request(price.first);
    const auto [preempted, host_blocks] = before_[price.first];
    if (snapshot && snapshot->host_blocks > host_blocks) less.insert(price.first);
    return !snapshot || snapshot->preempted != preempted;
  });
  // Of a change that is spread over plans: no more than what was left, and what is gone from that but for
  // what new rows add.
  const auto spreads = [&](RequestId id) {
    const auto snapshot = core_.plane.request(id);
    return snapshot && snapshot->change_waits;
  };
  // A request that comes in with this plan has no price yet. Of those that switch, what the first one copies
  // others that share its blocks need not copy again.
  for (const RequestId id : order) {
    const auto price = prices_.find(id);
    if (price == prices_.end()) continue;
    const bool first = id == order.front() && !less.contains(id);
    if (spreads(id)) {
      const auto left = core_.plane.price(id, core_.plane.request(id)->wish);
      core_.verdict.expect(Checker::kCopies,
                           carried[id] <= price->second && (!left || order.size() > 1 ||
                                                            price->second - left->bytes_moved <= carried[id]),
                           "step ", number(plan.step), " copies ", carried[id], " bytes for request ",
                           number(id), ", the price was ", price->second);
      ++core_.coverage.mark(Mark::kCopiesSpread);
      continue;
    }
    core_.verdict.expect(Checker::kCopies,
                         first ? carried[id] == price->second : carried[id] <= price->second, "step ",
                         number(plan.step), " copies ", carried[id], " bytes for request ", number(id),
                         ", the price was ", price->second);
    core_.coverage.mark(Mark::kCopiesPriced) += first ? 1 : 0;
  }
  // Whoever is in the plan and was to pay has paid.
  for (const Span& span : plan.spans) {
    const auto price = prices_.find(span.request);
    if (price == prices_.end() || price->second == 0 || !order.empty() || spreads(span.request) ||
        less.contains(span.request))
      continue;
    core_.verdict.expect(Checker::kCopies, false, "step ", number(plan.step), " copies nothing for request ",
                         number(span.request), ", the price was ", price->second);
  }
}

}  // namespace weft::simulation
