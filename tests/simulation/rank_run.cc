// What one rank does in one phase of a plan.
#include <algorithm>
#include <utility>

#include "tests/simulation/workers.h"

namespace weft::simulation {

struct Workers::RankRun {
  Workers& w;
  Entry& e;
  const int rank;
  const int place;  // in the plan's topology
  int64_t* writes;  // left; null: endless

  const kv::CacheGeometry& geometry() const { return w.limits_.geometry; }
  const Plan& plan() const { return *e.plan; }
  int places() const { return e.ranks.count(); }
  bool may_write() { return writes == nullptr || --*writes >= 0; }

  bool shared(size_t s) const { return e.owned[s] < 0; }
  bool computes(size_t s, int64_t row) const {
    if (shared(s)) return plan().spans[s].grouping.contains(place);
    return e.owners[static_cast<size_t>(e.owned[s])].owner(row) == place;
  }
  uint32_t token(const Span& span, int64_t row) const {
    if (!span.has_input_ref) return span.tokens.at(static_cast<size_t>(row));
    return w.token_table_.at({span.input_ref.step, span.input_ref.sample_index});
  }
  // Rows up to the first draft that does not hold, or the first that a request which has ended wastes.
  int64_t right_rows(const Span& span) const {
    const Truth& truth = w.truths_.at(span.request);
    int64_t row = 0;
    while (row < span.rows && span.start + row < truth.rows() &&
           token(span, row) == truth.token(span.start + row))
      ++row;
    return row;
  }
  // The sum of the words of a row, of all ranks that have some of its heads.
  uint64_t row_words(size_t s, int64_t row, int layer) const {
    uint64_t sum = 0;
    const auto add = [&](int from) {
      sum += e.words[static_cast<size_t>(from)][s].at(static_cast<size_t>(row))[static_cast<size_t>(layer)];
    };
    const Span& span = plan().spans[s];
    if (shared(s)) {
      for (int r = span.grouping.base; r < span.grouping.base + span.grouping.width; ++r) add(r);
    } else {
      add(e.owners[static_cast<size_t>(e.owned[s])].owner(row));
    }
    return sum;
  }

  // Who makes a copy: its target, as far as that takes part in the step.
  int copier(const PageCopy& copy) const {
    return e.ranks.contains(copy.to_rank)     ? copy.to_rank
           : e.ranks.contains(copy.from_rank) ? copy.from_rank
                                              : e.ranks.rank(0);
  }
  int host_copier(const HostCopy& copy) const {
    return e.ranks.contains(copy.rank) ? copy.rank : e.ranks.rank(0);
  }
  // Spills go on beside the computing; they may be done at once, or last.
  bool spills_early() const { return mix64(number(plan().step) << 8 | static_cast<uint64_t>(rank)) % 2 == 0; }
  // Of one span on this rank: each part of an entry has its share of the pages.
  struct HotView {
    worker::HotBuffer* buffer = nullptr;
    std::vector<PageId> pages;
    int64_t pages_each = 0;
  };
  bool copies();
  bool spills();
  bool write(int layer);
  void partials(int layer);
  void sums(int layer);
  bool finish();

  void check_copy(const HostCopy& copy, const Page& host) const;
  const Page* readable_page(const Span& span, size_t s, int64_t block, int part) const;
  void check_inputs(const Span& span) const;
  void check_slot(const Span& span, int64_t position, int part, int layer, const Slot& slot) const;
  const Page& host_page(const Span& span, int64_t block, int part) const;
  HotView hot_view(const Span& span);
  void fetch(const HotView& hot, size_t s, int part, int layer, int64_t end);
  Slot* hot_slot(const HotView& hot, int64_t position, int part, int layer) const;
  void check_own_pages(const Span& span) const;
  void check_readers(const Span& span, int64_t block) const;
  void sample(const Span& span, size_t s, StepOutcome& outcome);
};

bool Workers::run(int rank, int64_t* writes) {
  Entry& entry = *current(rank);
  RankRun run{*this, entry, rank, entry.ranks.place(rank), writes};
  bool whole = true;
  switch (static_cast<Phase>(entry.head(rank))) {
    case Phase::kCopies:
      whole = run.copies();
      break;
    case Phase::kWrite0:
      whole = run.write(0);
      break;
    case Phase::kPartials0:
      run.partials(0);
      break;
    case Phase::kSums0:
      run.sums(0);
      break;
    case Phase::kWrite1:
      whole = run.write(1);
      break;
    case Phase::kPartials1:
      run.partials(1);
      break;
    case Phase::kSums1:
      run.sums(1);
      break;
    case Phase::kFinish:
      whole = run.finish();
      break;
  }
  if (whole) ++entry.done[static_cast<size_t>(rank)];
  return whole;
}

bool Workers::RankRun::copies() {
  for (const PageCopy& copy : plan().copies) {
    if (copier(copy) != rank || (w.lose_copy && w.lose_copy(copy))) continue;
    if (!may_write()) return false;
    w.page(copy.stream, copy.to_rank, copy.to_page) = w.page(copy.stream, copy.from_rank, copy.from_page);
  }
  for (const HostCopy& copy : plan().loads) {
    if (host_copier(copy) != rank || (w.lose_load && w.lose_load(copy))) continue;
    if (!may_write()) return false;
    const Page& host = w.host_page(copy);
    check_copy(copy, host);
    w.page(copy.stream, copy.rank, copy.page) = host;
  }
  return !spills_early() || spills();
}

bool Workers::RankRun::spills() {
  for (const HostCopy& copy : plan().spills) {
    if (host_copier(copy) != rank || (w.lose_spill && w.lose_spill(copy))) continue;
    if (!may_write()) return false;
    w.host_page(copy) = w.page(copy.stream, copy.rank, copy.page);
  }
  return true;
}

// What is loaded is the block of the request that it says it is.
void Workers::RankRun::check_copy(const HostCopy& copy, const Page& host) const {
  const Truth& truth = w.truths_.at(copy.request);
  const int64_t first = host[0][0].position;
  const int part = host[0][0].part;
  const int first_part = geometry().first_part(copy.stream);
  const bool block = first >= 0 && first % geometry().block_tokens == 0 &&
                     first + geometry().block_tokens <= truth.rows() && part >= first_part &&
                     part < first_part + geometry().stream(copy.stream).used_parts();
  w.verdict_.expect(Checker::kHostBytes, block, "request ", number(copy.request), " loads host page ",
                    number(copy.host_page), ", which holds part ", part, " of position ", first);
  for (int64_t i = 0; i < geometry().block_tokens; ++i) {
    for (size_t layer = 0; layer < kLayers; ++layer) {
      const Stored& found = host[static_cast<size_t>(i)][layer];
      const hash::Entry& wanted = truth.entry(first + i, part, static_cast<int>(layer));
      w.verdict_.expect(Checker::kHostBytes,
                        found.part == part && found.position == first + i &&
                            found.entry.value == wanted.value && found.entry.key == wanted.key,
                        "request ", number(copy.request), " loads part ", part, " position ", first + i,
                        " layer ", layer, " from host page ", number(copy.host_page), ": found part ",
                        found.part, " position ", found.position);
    }
  }
}

// The entries of the rank's rows: of a shared row into its own pages, of an owned row into all of them.
bool Workers::RankRun::write(int layer) {
  for (size_t s = 0; s < plan().spans.size(); ++s) {
    const Span& span = plan().spans[s];
    if (layer == 0) check_inputs(span);
    if (span.no_write) continue;
    for (int64_t row = 0; row < span.rows; ++row) {
      if (!computes(s, row)) continue;
      const int64_t position = span.start + row, block = position / geometry().block_tokens;
      const uint64_t words = layer == 0 ? 0 : row_words(s, row, 0);
      for (int part = 0; part < geometry().parts(); ++part) {
        const hash::Entry entry =
            layer == 0 ? first_entry(w.shape_, span.sampling.seed, part, position, token(span, row))
                       : second_entry(w.shape_, words, part, position);
        const auto ids = w.pages(span, block, part);
        for (int holder = 0; holder < w.limits_.rank_count; ++holder) {
          const PageId id = ids[static_cast<size_t>(holder)];
          if (id == kNoPage || (shared(s) && holder != rank)) continue;
          if (!may_write()) return false;
          Slot& slot = w.page(geometry().stream_of(part), holder,
                              id)[static_cast<size_t>(position % geometry().block_tokens)];
          slot[static_cast<size_t>(layer)] = {part, static_cast<int32_t>(position), entry};
        }
      }
    }
  }
  return true;
}

void Workers::RankRun::check_inputs(const Span& span) const {
  const Truth& truth = w.truths_.at(span.request);
  for (int64_t row = 0; row < span.rows && span.start + row < truth.rows(); ++row) {
    if (!span.prefill && row > 0) break;  // drafts
    w.verdict_.expect(Checker::kTokens, token(span, row) == truth.token(span.start + row), "request ",
                      number(span.request), " runs the wrong token at position ", span.start + row);
  }
}

const Workers::Page& Workers::RankRun::host_page(const Span& span, int64_t block, int part) const {
  return w.host_[static_cast<size_t>(kv::Stream::kEntries)].at(number(w.host_page(span, block, part)));
}

// A buffer that is new spoils its pages: nobody else counts on what lay there.
Workers::RankRun::HotView Workers::RankRun::hot_view(const Span& span) {
  HotView hot;
  if (span.prefill || span.host_blocks == 0) return hot;
  const std::span<const PageId> all = w.hot_pages(span);
  for (size_t at = static_cast<size_t>(rank); at < all.size() && all[at] != kNoPage;
       at += static_cast<size_t>(w.limits_.rank_count))
    hot.pages.push_back(all[at]);
  const int64_t parts = geometry().first_part(kv::Stream::kIndexKeys);
  hot.pages_each = std::ssize(hot.pages) / parts;
  if (hot.pages_each == 0) return hot;
  const int64_t slots = hot.pages_each * geometry().block_tokens;
  HotBuffers& own = w.hot_[static_cast<size_t>(rank)];
  if (w.keep_hot) {
    const auto of_this_size = static_cast<uint32_t>(number(span.table) + slots * w.limits_.table_count);
    hot.buffer = &own.buffers.of(TableId{of_this_size}, 0, parts * kLayers, slots);
    return hot;
  }
  hot.buffer = &own.buffers.of(span.table, span.table_version, parts * kLayers, slots);
  if (std::exchange(own.versions[span.table], span.table_version) == span.table_version) return hot;
  for (const PageId id : hot.pages) {
    Page& page = w.page(kv::Stream::kEntries, rank, id);
    page.assign(page.size(), Slot{});
  }
  return hot;
}

Workers::Slot* Workers::RankRun::hot_slot(const HotView& hot, int64_t position, int part, int layer) const {
  const int32_t slot = hot.buffer->slot_of(part * kLayers + layer, static_cast<int32_t>(position));
  if (slot < 0) return nullptr;
  const PageId page = hot.pages[static_cast<size_t>(part * hot.pages_each + slot / geometry().block_tokens)];
  return &w.page(kv::Stream::kEntries, rank, page)[static_cast<size_t>(slot % geometry().block_tokens)];
}

// Brings what the rows read of one part and layer into the hot buffer, as far as it has room: of each step
// others, as if they were selected, so that no two buffers of one sequence are filled alike.
void Workers::RankRun::fetch(const HotView& hot, size_t s, int part, int layer, int64_t end) {
  const Span& span = plan().spans[s];
  const int64_t block_tokens = geometry().block_tokens;
  std::vector<int32_t> positions;
  for (int64_t block = 0; block < span.host_blocks; ++block) {
    if (readable_page(span, s, block, part) == nullptr) continue;
    for (int64_t p = block * block_tokens; p < std::min(end, (block + 1) * block_tokens); ++p) {
      if (mix64(static_cast<uint64_t>(p << 20 | span.start)) % 4 != 0)
        positions.push_back(static_cast<int32_t>(p));
    }
  }
  std::vector<worker::HotBuffer::Miss> misses;
  const int64_t hits = hot.buffer->use(part * kLayers + layer, positions, misses);
  for (const auto& miss : misses) {
    const Page& from = host_page(span, miss.position / block_tokens, part);
    Slot* to = hot_slot(hot, miss.position, part, layer);
    (*to)[static_cast<size_t>(layer)] =
        from[static_cast<size_t>(miss.position % block_tokens)][static_cast<size_t>(layer)];
  }
  w.hot_counts_.hits += hits;
  w.hot_counts_.fetched += std::ssize(misses);
  w.hot_counts_.left += std::ssize(positions) - hits - std::ssize(misses);
}

// The page that the rank reads of a block's part, if it reads it at all: of a shared span those of its
// classes and heads, which lie on itself; of an owned one all, each on the first holder round the ring.
const Workers::Page* Workers::RankRun::readable_page(const Span& span, size_t s, int64_t block,
                                                     int part) const {
  const kv::Stream stream = geometry().stream_of(part);
  const auto ids = w.pages(span, block, part);
  if (w.on_host(span, block, part)) {
    if (!shared(s)) return &host_page(span, block, part);
    const int c = span.grouping.c;
    const bool reads =
        kv::class_owner(kv::residue_class(block, c), span.origin, c) == (place - span.grouping.base) % c;
    return reads && span.grouping.contains(place) ? &host_page(span, block, part) : nullptr;
  }
  if (!shared(s)) {
    for (int i = 0; i < places(); ++i) {
      const int from = e.ranks.rank((place + i) % places());
      if (ids[static_cast<size_t>(from)] != kNoPage)
        return &w.page(stream, from, ids[static_cast<size_t>(from)]);
    }
  } else {
    const bool entries = stream == kv::Stream::kEntries;
    const int c = entries ? span.grouping.c : span.index_c;
    const int stripes = entries ? c : span.index_copied ? 1 : c;
    if (kv::class_owner(kv::residue_class(block, c), span.origin, c) != (place - span.grouping.base) % c)
      return nullptr;
    const kv::Range held = kv::held_parts(
        geometry(), stream, kv::group_pattern(span.grouping, stripes, places()), place, places());
    const int in_stream = part - geometry().first_part(stream);
    if (in_stream < held.begin || in_stream >= held.end) return nullptr;
    const PageId id = ids[static_cast<size_t>(rank)];
    if (id != kNoPage) return &w.page(stream, rank, id);
  }
  w.verdict_.expect(Checker::kBytes, false, "request ", number(span.request), " part ", part, " of block ",
                    block, " is not where rank ", rank, " reads it");
  return nullptr;
}

void Workers::RankRun::check_slot(const Span& span, int64_t position, int part, int layer,
                                  const Slot& slot) const {
  if (w.lost_) return;
  const Stored& found = slot[static_cast<size_t>(layer)];
  const hash::Entry& wanted = w.truths_.at(span.request).entry(position, part, layer);
  ++w.slots_read_;
  w.verdict_.expect(Checker::kBytes,
                    found.part == part && found.position == position && found.entry.value == wanted.value &&
                        found.entry.key == wanted.key,
                    "request ", number(span.request), " part ", part, " position ", position, " layer ",
                    layer, " rank ", rank, ": found part ", found.part, " position ", found.position);
}

void Workers::RankRun::partials(int layer) {
  const int64_t block_tokens = geometry().block_tokens;
  for (size_t s = 0; s < plan().spans.size(); ++s) {
    const Span& span = plan().spans[s];
    auto& out = e.partials[static_cast<size_t>(place)][s];
    out.assign(static_cast<size_t>(span.rows), PartSums(0));
    int64_t last = span.rows;
    while (last > 0 && !computes(s, last - 1)) --last;
    if (last == 0) continue;
    const int64_t right = span.start + right_rows(span);
    std::vector<const Page*> readable(static_cast<size_t>(geometry().parts()));
    const HotView hot = hot_view(span);
    for (int part = 0; hot.buffer != nullptr && part < geometry().first_part(kv::Stream::kIndexKeys); ++part)
      fetch(hot, s, part, layer, span.start + last);
    PartSums sums(geometry().parts());
    for (int64_t position = 0; position < span.start + last; ++position) {
      if (position % block_tokens == 0) {
        for (int part = 0; part < geometry().parts(); ++part)
          readable[static_cast<size_t>(part)] = readable_page(span, s, position / block_tokens, part);
      }
      for (int part = 0; part < geometry().parts(); ++part) {
        const Page* page = readable[static_cast<size_t>(part)];
        if (page == nullptr) continue;
        const Slot* slot = &(*page)[static_cast<size_t>(position % block_tokens)];
        if (hot.buffer != nullptr && w.on_host(span, position / block_tokens, part)) {
          const Slot* fetched = hot_slot(hot, position, part, layer);
          if (fetched != nullptr) slot = fetched;
        }
        if (position < right) check_slot(span, position, part, layer, *slot);
        sums.add(part, (*slot)[static_cast<size_t>(layer)].entry);
      }
      if (position >= span.start && computes(s, position - span.start))
        out[static_cast<size_t>(position - span.start)] = sums;
    }
  }
}

// Merges the partials of the c-group for the rank's own heads.
void Workers::RankRun::sums(int layer) {
  const int entry_parts = w.shape_.parts;
  const bool indexed = geometry().parts() > entry_parts;
  for (size_t s = 0; s < plan().spans.size(); ++s) {
    const Span& span = plan().spans[s];
    auto& out = e.words[static_cast<size_t>(place)][s];
    if (layer == 0) out.assign(static_cast<size_t>(span.rows), {});
    const kv::Range heads =
        shared(s) ? kv::rank_heads(span.grouping, place, geometry().heads) : kv::Range{0, geometry().heads};
    const auto merged = [&](int c, int64_t row, int part, int column) {
      if (!shared(s))
        return e.partials[static_cast<size_t>(place)][s][static_cast<size_t>(row)].at(part, column);
      const int first = span.grouping.base + (place - span.grouping.base) / c * c;
      hash::Sums sum;
      for (int member = first; member < first + c; ++member) {
        const hash::Sums& one =
            e.partials[static_cast<size_t>(member)][s].at(static_cast<size_t>(row)).at(part, column);
        sum.sum += one.sum;
        sum.count += one.count;
      }
      return sum;
    };
    for (int64_t row = 0; row < span.rows; ++row) {
      if (!computes(s, row)) continue;
      const hash::Sums index = indexed ? merged(span.index_c, row, entry_parts, 0) : hash::Sums{};
      uint64_t words = 0;
      for (auto head = static_cast<int>(heads.begin); head < heads.end; ++head) {
        const int column =
            hash::query_column(w.shape_, span.sampling.seed, layer, head, span.start + row, token(span, row));
        words += word_of(w.shape_, layer, head, merged(span.grouping.c, row, w.shape_.part_of(head), column),
                         index);
      }
      if (layer == 1 && w.lose_sums && w.lose_sums(rank)) words = 0;
      out[static_cast<size_t>(row)][static_cast<size_t>(layer)] = words;
    }
  }
}

bool Workers::RankRun::finish() {
  if (!spills_early() && !spills()) return false;
  StepOutcome outcome{plan().step, rank, {}};
  for (size_t s = 0; s < plan().spans.size(); ++s) {
    const Span& span = plan().spans[s];
    check_own_pages(span);
    if (place == 0) w.rows_run_ += span.rows;
    if (span.sampler_rank == place) sample(span, s, outcome);
  }
  w.results_[static_cast<size_t>(rank)].push_back(std::move(outcome));
  return true;
}

// Every page that the table names on this rank holds the right rows, read or not.
void Workers::RankRun::check_own_pages(const Span& span) const {
  const int64_t block_tokens = geometry().block_tokens, end = span.start + right_rows(span);
  for (int64_t block = 0; block * block_tokens < end; ++block) {
    if (place == 0) check_readers(span, block);
    for (int part = 0; part < geometry().parts(); ++part) {
      const PageId id = w.pages(span, block, part)[static_cast<size_t>(rank)];
      if (id == kNoPage || w.on_host(span, block, part)) continue;
      const Page& page = w.page(geometry().stream_of(part), rank, id);
      for (int64_t p = block * block_tokens; p < std::min(end, (block + 1) * block_tokens); ++p) {
        for (int layer = 0; layer < kLayers; ++layer)
          check_slot(span, p, part, layer, page[static_cast<size_t>(p % block_tokens)]);
      }
    }
  }
}

// Exactly the readers hold a block: no reader without bytes, no bytes without a reader.
void Workers::RankRun::check_readers(const Span& span, int64_t block) const {
  for (int part = 0; part < geometry().parts(); ++part) {
    if (w.on_host(span, block, part)) continue;
    const kv::Stream stream = geometry().stream_of(part);
    const int in_stream = part - geometry().first_part(stream);
    const int stripes = span.index_copied ? 1 : span.index_c;
    const int c = stream == kv::Stream::kEntries ? span.grouping.c : stripes;
    const kv::Pattern pattern = kv::group_pattern(span.grouping, c, places());
    const auto reads = [&](int at) {
      const kv::Range read = kv::held_parts(geometry(), stream, pattern, at, places());
      return span.grouping.contains(at) && in_stream >= read.begin && in_stream < read.end &&
             kv::class_owner(kv::residue_class(block, c), span.origin, c) == (at - span.grouping.base) % c;
    };
    const auto ids = w.pages(span, block, part);
    for (int r = 0; r < w.limits_.rank_count; ++r) {
      const bool wanted = e.ranks.contains(r) && reads(e.ranks.place(r));
      w.verdict_.expect(Checker::kBytes, wanted == (ids[static_cast<size_t>(r)] != kNoPage), "request ",
                        number(span.request), " part ", part, " of block ", block, ": rank ", r,
                        wanted ? " reads it and has it not" : " has it and does not read it");
    }
  }
}

void Workers::RankRun::sample(const Span& span, size_t s, StepOutcome& outcome) {
  const Truth& truth = w.truths_.at(span.request);
  const int64_t right = right_rows(span);
  const auto drawn = [&](int64_t row) { return row_words(s, row, 0) + row_words(s, row, 1); };
  for (int64_t row = span.rows - span.sample_rows; row < span.rows; ++row) {
    const auto cell = span.sample_index + static_cast<uint32_t>(row - (span.rows - span.sample_rows));
    Sample sample{span.request, cell, hash::token_of(drawn(row), kVocabulary), false};
    // What a wrong draft comes to may be anything.
    sample.not_finite = row < right ? span.start + row == truth.nan_row : drawn(row) % 5 == 0;
    if (sample.not_finite) sample.token = 0;
    w.token_table_[{plan().step, cell}] = sample.token;
    outcome.samples.push_back(sample);
  }
  // The draft layer guesses the answer, with mistakes.
  for (int64_t i = 0; i < span.draft_tokens; ++i) {
    const auto cell = static_cast<uint32_t>(span.sample_index + span.sample_rows + i);
    const int64_t at = span.start + right + 1 + i;
    const uint64_t luck = mix64(drawn(span.rows - 1) + static_cast<uint64_t>(i));
    const bool known = at < truth.rows() && luck % 3 != 0;
    outcome.samples.push_back({span.request, cell,
                               known ? truth.token(at) : static_cast<uint32_t>(luck % kVocabulary),
                               luck % 17 == 0});
  }
}

}  // namespace weft::simulation
