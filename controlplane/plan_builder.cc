#include "controlplane/plan_builder.h"

#include <algorithm>
#include <bit>
#include <tuple>

#include "controlplane/host_context.h"
#include "controlplane/regroup.h"

namespace weft::controlplane {

PlanBuilder::PlanBuilder(Memory& memory, TablePool& tables, StepId step, int64_t spans)
    : memory_(memory),
      tables_(tables),
      limits_(memory.limits()),
      rows_left_(limits_.max_step_rows),
      loads_left_(limits_.max_copies()),
      load_bytes_left_(limits_.host_plan_bytes * limits_.rank_count),
      copy_bytes_left_(limits_.copy_plan_bytes * limits_.rank_count),
      samples_left_(limits_.max_samples),
      block_tokens_(limits_.geometry.block_tokens) {
  plan_.step = step;
  record_.step = step;
  plan_.spans.reserve(static_cast<size_t>(spans));
  record_.spans.reserve(static_cast<size_t>(spans));
}

bool PlanBuilder::add_decode(Sequence& sequence) {
  if (sequence.widening() && is_wide(sequence)) apply_next(sequence, memory_);
  if (!load(sequence)) return false;  // of one that comes in again
  if (rows_left_ < 1 || samples_left_ < 1) return false;
  std::vector<uint32_t> drafts;
  if (sequence.speculation.on()) {
    if (!sequence.settled()) return false;
    // The last token of an answer is never an input.
    const int64_t useful = sequence.max_tokens - sequence.answered() - 1;
    drafts = draft(sequence.speculation, sequence.text, sequence.answered(), sequence.guessed,
                   sequence.lookup, std::min({drafts_left_, rows_left_ - 1, samples_left_ - 1, useful}));
  }
  const int64_t rows = hold_rows(sequence, 1 + std::ssize(drafts));
  if (rows < 1) return false;
  drafts.resize(static_cast<size_t>(rows - 1));
  drafts_left_ -= rows - 1;
  add_span(sequence, rows, false, std::move(drafts),
           hold_guesses(sequence, rows, rows, sequence.speculation.draft_tokens));
  return true;
}

bool PlanBuilder::add_prefill(Sequence& sequence, int64_t most) {
  if (!load(sequence)) return false;
  int64_t rows = std::min({sequence.prompt_left(), rows_left_, most});
  if (limits_.max_chunk_rows > 0) rows = std::min(rows, limits_.max_chunk_rows);
  // Draft layer i reads the token i + 1 rows ahead: no chunk should end so close to the prompt's end that it
  // is not drawn yet.
  const int64_t left = sequence.prompt_left() - rows;
  if (left < limits_.draft_layers) rows = std::min(rows + left, rows_left_);
  // The last row samples; without room for a sample it stays for the next step.
  if (samples_left_ < 1 && sequence.answered() == 0)
    rows = std::min(rows, sequence.prompt - 1 - sequence.scheduled);
  if (rows < 1) return false;
  rows = hold_rows(sequence, rows);
  if (rows < 1) return false;
  // So the first step that decodes does not take in the whole prompt.
  if (sequence.speculation.source == DraftSource::kLookup)
    sequence.lookup.extend(std::span(sequence.text).first(static_cast<size_t>(sequence.scheduled + rows)));
  // A prompt's last row may be on one rank, from where a second guess would have to be sent to a group.
  const bool last = sequence.answered() == 0 && sequence.scheduled + rows == sequence.prompt;
  add_span(sequence, rows, true, {}, last ? hold_guesses(sequence, rows, 1, 1) : 0);
  return true;
}

// Each guess after the first writes the draft layer's entry of a further position.
int64_t PlanBuilder::hold_guesses(Sequence& sequence, int64_t rows, int64_t samples, int64_t most) {
  if (sequence.speculation.source != DraftSource::kMtp) return 0;
  const int64_t useful = sequence.max_tokens - sequence.answered() - 2;
  const int64_t room = sequence.row_count() - sequence.scheduled - rows + 1;
  int64_t guesses = std::min({most, useful, room, drafts_left_, samples_left_ - samples});
  if (guesses <= 0) return 0;
  // None are held where a switch waits for a page of a block behind the rows.
  guesses = std::clamp<int64_t>(hold_rows(sequence, rows + guesses - 1) - rows + 1, 0, guesses);
  drafts_left_ -= guesses;
  return guesses;
}

// Brings what a sequence counts on from the host, as much as a plan may carry: the last of it with the
// sequence's first rows, what comes before it beside the rows of others. True when all of it is there or on
// its way.
bool PlanBuilder::load(Sequence& sequence) {
  for (int64_t index = sequence.load_first; index < sequence.load_first + sequence.load_blocks; ++index) {
    const Load what{sequence.id, sequence.hashes[index], memory_.at(sequence.blocks, index),
                    sequence.target().residency};
    if (load(what, sequence.reserved) != Loaded::kPlanned) return false;
  }
  return true;
}

// One block, unless it is there already. A plan may always carry one.
PlanBuilder::Loaded PlanBuilder::load(const Load& what, PageCounts& reserved) {
  Block& block = memory_.block(what.block);
  int64_t pages = 0, bytes = 0;
  for (int part = 0; part < memory_.parts(); ++part) {
    if (block.part(part).valid != 0) continue;
    const int ranks = rank_count_of(memory_.wanted(block, part, what.residency));
    pages += ranks;
    bytes += ranks * limits_.geometry.page_bytes(block.part(part).stream);
  }
  if (pages == 0) return Loaded::kPlanned;
  if (!plan_.loads.empty() && (pages > loads_left_ || bytes > load_bytes_left_)) return Loaded::kPlanFull;
  if (!memory_.hold(block.id, what.residency, reserved, false)) return Loaded::kNoPage;
  loads_left_ -= pages;
  load_bytes_left_ -= bytes;
  record_.loaded_bytes += bytes;
  if (record_.loads.empty() || record_.loads.back() != what.request) record_.loads.push_back(what.request);
  const std::vector<PageId>& copy = memory_.host().pages(what.hash);
  for (int part = 0; part < memory_.parts(); ++part) {
    if (block.part(part).valid != 0) continue;
    const kv::Stream stream = block.part(part).stream;
    for_each_rank(memory_.wanted(block, part, what.residency), [&](int rank) {
      plan_.loads.push_back(
          {stream, rank, block.page(part, rank), copy[static_cast<size_t>(part)], what.request});
      set_valid(block, part, rank, true);
    });
  }
  return Loaded::kPlanned;
}

Prefetch PlanBuilder::prefetch(const Sequence& waiting, const PrefixCache::Match& found,
                               const kv::Residency& residency, int origin) {
  Prefetch out{waiting.id, plan_.step, {}, {}, residency};
  for (int64_t index = found.blocks; memory_.host().has(waiting.hashes, index); ++index) {
    const PageCounts need = BlockNeeds(limits_, residency, index, index + 1).pages(origin);
    const bool first = out.hashes.empty();
    if (!memory_.has_room(need, first ? found.tail : kNoBlock)) break;
    if (memory_.host().lockable(waiting.hashes, index, 1) < 1) break;
    if (first) memory_.use(found, out.path);
    memory_.extend(out.path, origin);
    memory_.reserve(need);
    PageCounts reserved = need;
    const BlockId block = memory_.at(out.path, index);
    if (load({waiting.id, waiting.hashes[index], block, residency}, reserved) != Loaded::kPlanned) {
      memory_.unreserve(reserved);
      memory_.shorten(out.path);
      break;
    }
    memory_.lock_host(waiting.hashes, index, 1);
    out.hashes.push_back(waiting.hashes[index]);
  }
  if (out.hashes.empty()) memory_.release_unknown(out.path);
  return out;
}

void PlanBuilder::sink(Sequence& sequence) {
  const int64_t full = sequence.computed / block_tokens_;
  extend_identities(sequence, full, block_tokens_);
  for (;;) {
    const int64_t index = sequence.host_blocks_count() + sequence.sinking;
    if (index >= full || !memory_.may_sink()) return;
    const kv::BlockHash name = host_copy_name(sequence, memory_, index);
    if (sequence.sinking == 0 && begin_host_block(sequence, memory_, name)) continue;
    if (memory_.host().state(name) != HostPool::State::kNone) return;
    const kv::BlockHash parent = host_copy_before(sequence, memory_, index);
    const Block& block = memory_.block(memory_.at(sequence.blocks, index));
    if (memory_.sink(block, name, parent) != HostPool::Room::kTaken) return;
    ++sequence.sinking;
    record_.sunk.push_back({sequence.id, index, name});
  }
}

PageCounts PlanBuilder::hot_pages(const Sequence& sequence, const kv::Residency& residency) const {
  return hot_buffer_pages(limits_, residency, sequence.origin, ceil_div(sequence.row_count(), block_tokens_));
}

// A new block's entries fit beside those that are not on the host yet.
bool PlanBuilder::window_has_room(const Sequence& sequence, int64_t block) const {
  if (block >= sequence.host_blocks_count() + sequence.host_window) return false;
  const PageCounts need =
      BlockNeeds(limits_, sequence.target().residency, block, block + 1).pages(sequence.origin);
  bool has = true;
  for_each_pool(limits_.rank_count, [&](kv::Stream stream, int rank) {
    has = has && need.at(stream, rank) <= sequence.reserved.at(stream, rank);
  });
  return has;
}

void PlanBuilder::add_spills(bool ahead) {
  Memory::Spills spills = memory_.take_spills(ahead);
  plan_.spills = std::move(spills.copies);
  record_.spilled = std::move(spills.ids);
}

// Takes the pages of the next rows, and those of a switch. Returns how many rows have their pages.
int64_t PlanBuilder::hold_rows(Sequence& sequence, int64_t rows) {
  if (sequence.needs_switch && !hold_switch(sequence)) return 0;
  const int64_t last = ceil_div(sequence.scheduled + rows, block_tokens_);
  for (int64_t index = std::max(sequence.scheduled / block_tokens_, sequence.held_blocks); index < last;
       ++index) {
    if (index == sequence.blocks.size()) {
      if (sequence.host_context && !window_has_room(sequence, index))
        return std::max<int64_t>(0, index * block_tokens_ - sequence.scheduled);
      memory_.extend(sequence.blocks, sequence.origin);
    }
    const bool empty = index * block_tokens_ >= sequence.scheduled;
    if (!memory_.hold(memory_.at(sequence.blocks, index), sequence.writing().residency, sequence.reserved,
                      empty)) {
      return std::max<int64_t>(0, index * block_tokens_ - sequence.scheduled);
    }
    sequence.held_blocks = index + 1;
  }
  return rows;
}

// Every block that nobody writes any more is where the next placement wants it.
bool PlanBuilder::is_wide(Sequence& sequence) const {
  const auto lacks = [&](const Block& block) {
    for (int part = 0; part < memory_.parts(); ++part) {
      if ((memory_.wanted(block, part, sequence.next->residency) & ~block.part(part).valid) != 0) return true;
    }
    return false;
  };
  for (; (sequence.widened + 1) * block_tokens_ <= sequence.computed; ++sequence.widened) {
    if (lacks(memory_.block(memory_.at(sequence.blocks, sequence.widened)))) return false;
  }
  return true;
}

// Copies as many such blocks as the plan may carry.
void PlanBuilder::widen(Sequence& sequence) {
  const kv::Residency& residency = sequence.next->residency;
  for (; !is_wide(sequence); ++sequence.widened) {
    Block& block = memory_.block(memory_.at(sequence.blocks, sequence.widened));
    int64_t pages = 0, bytes = 0;
    for (int part = 0; part < memory_.parts(); ++part) {
      const int ranks = rank_count_of(memory_.wanted(block, part, residency) & ~block.part(part).valid);
      pages += ranks;
      bytes += ranks * limits_.geometry.page_bytes(block.part(part).stream);
    }
    const bool fits = bytes <= copy_bytes_left_ && std::ssize(plan_.copies) + pages <= limits_.max_copies();
    if (!plan_.copies.empty() && !fits) return;
    if (!memory_.hold(block.id, residency, sequence.reserved, false)) return;
    for (int part = 0; part < memory_.parts(); ++part)
      fill_part(sequence, block, part, memory_.wanted(block, part, residency));
    copy_bytes_left_ -= bytes;
  }
}

bool PlanBuilder::hold_switch(Sequence& sequence) {
  if (!tables_.available() || !hold_target(sequence)) return false;
  return !sequence.host_context ||
         memory_.hold_hot(sequence.hot, hot_pages(sequence, sequence.target().residency), sequence.reserved);
}

bool PlanBuilder::hold_target(Sequence& sequence) {
  if (!plan_.copies.empty() &&
      static_cast<int64_t>(plan_.copies.size()) + copies_needed(sequence) > limits_.max_copies()) {
    return false;
  }
  // By index: what is evicted for a page may join runs of its path.
  for (int64_t index = memory_.first_unsure(sequence.blocks, sequence.target().residency);
       index < sequence.blocks.size(); ++index) {
    const bool empty = index * block_tokens_ >= sequence.scheduled;
    if (!memory_.hold(memory_.at(sequence.blocks, index), sequence.target().residency, sequence.reserved,
                      empty))
      return false;
  }
  sequence.held_blocks = sequence.blocks.size();
  return true;
}

bool PlanBuilder::add_move(Sequence& sequence) {
  if (!hold_target(sequence)) return false;
  const kv::Residency& residency = sequence.target().residency;
  memory_.for_each(sequence.blocks, 0, [&](const Block& block) {
    for (int part = 0; part < memory_.parts(); ++part) {
      fill_part(sequence, memory_.block(block.id), part, memory_.wanted(block, part, residency));
    }
  });
  return true;
}

PlanBuilder::Stray PlanBuilder::add_stray(Block& block, const kv::Topology& ranks, int first) {
  if (static_cast<int64_t>(plan_.copies.size()) + memory_.parts() > limits_.max_copies())
    return Stray::kPlanFull;
  for (int part = 0; part < memory_.parts(); ++part) {
    if ((block.part(part).valid & ranks.ranks()) != 0) continue;
    int place = 0;
    while (place < ranks.count() &&
           !memory_.add_page(block, part, ranks.rank((first + place) % ranks.count())))
      ++place;
    if (place == ranks.count()) return Stray::kNoRoom;
    copy_pages(RequestId{0}, block, part, mask_of(ranks.rank((first + place) % ranks.count())));
  }
  return Stray::kMoved;
}

int64_t PlanBuilder::copied_bytes() const {
  int64_t bytes = 0;
  for (const PageCopy& copy : plan_.copies) bytes += limits_.geometry.page_bytes(copy.stream);
  return bytes;
}

int64_t PlanBuilder::copies_needed(const Sequence& sequence) const {
  int64_t copies = 0;
  const int64_t first = memory_.first_unsure(sequence.blocks, sequence.target().residency);
  memory_.for_each(sequence.blocks, first, [&](const Block& block) {
    if (block.index * block_tokens_ >= sequence.scheduled) return;
    for (int part = 0; part < memory_.parts(); ++part) {
      copies +=
          rank_count_of(memory_.wanted(block, part, sequence.target().residency) & ~block.part(part).valid);
    }
  });
  return copies;
}

void PlanBuilder::apply_switch(Sequence& sequence) {
  sequence.placement = sequence.target();
  sequence.next.reset();
  if (sequence.has_table) tables_.give_back(sequence.table, memory_.last_issued());
  std::tie(sequence.table, sequence.table_version) = tables_.take();
  sequence.has_table = true;
  sequence.table_blocks = sequence.host_table_blocks = 0;
  if (sequence.host_context)
    memory_.trim_hot(sequence.hot, hot_pages(sequence, sequence.placement.residency));
  const int64_t first = memory_.first_unsure(sequence.blocks, sequence.placement.residency);
  memory_.for_each(sequence.blocks, first, [&](const Block& block) {
    for (int part = 0; part < memory_.parts(); ++part) switch_part(sequence, memory_.block(block.id), part);
  });
  memory_.now_covers(sequence.blocks, sequence.placement.residency);
  memory_.unreserve(sequence.reserved);
  sequence.reserved = pages_to_take(sequence, memory_, sequence.placement.residency);
  memory_.reserve(sequence.reserved);
  sequence.needs_switch = false;
  if (sequence.trim) sequence.trim_step = plan_.step;
}

// Makes the pages on these ranks valid.
void PlanBuilder::fill_part(const Sequence& sequence, Block& block, int part, RankMask wanted) {
  const BlockPart& held = block.part(part);
  const RankMask lacking = wanted & held.holders() & ~held.valid;
  if (held.valid == 0 && block.index < sequence.hit_blocks) return;  // on the host: loaded when it runs
  if (block.index * block_tokens_ < sequence.scheduled) {
    copy_pages(sequence.id, block, part, lacking);
  } else {
    for_each_rank(lacking, [&](int rank) { set_valid(block, part, rank, true); });
  }
}

// Makes every page that the residency asks for valid. In a block that will still be written, pages outside
// the residency are left behind from this step on.
void PlanBuilder::switch_part(Sequence& sequence, Block& block, int part) {
  const BlockPart& held = block.part(part);
  const RankMask wanted = memory_.wanted(block, part, sequence.placement.residency);
  fill_part(sequence, block, part, wanted);
  if ((block.index + 1) * block_tokens_ > sequence.scheduled) {
    if (block.index < sequence.hit_blocks) return;  // the last one of a full prefix hit: nothing is written
    for_each_rank(held.valid & ~wanted, [&](int rank) { set_valid(block, part, rank, false); });
  }
}

void PlanBuilder::copy_pages(RequestId charged, Block& block, int part, RankMask to) {
  if (to == 0) return;
  if (block.copy_step != plan_.step) {
    block.copy_step = plan_.step;
    for (BlockPart& other : block.parts) other.copied = 0;
  }
  BlockPart& held = block.part(part);
  std::vector<int> sources;
  for_each_rank(held.valid & ~held.copied, [&](int rank) { sources.push_back(rank); });
  CHECK(!sources.empty(), "part ", part, " of block ", block.index, " is nowhere");
  for_each_rank(to, [&](int rank) {
    // Neighbouring blocks read from different ranks.
    const int from = sources[static_cast<size_t>(block.index + rank) % sources.size()];
    plan_.copies.push_back(
        {held.stream, from, block.page(part, from), rank, block.page(part, rank), charged});
    set_valid(block, part, rank, true);
  });
  held.copied |= to;
}

void PlanBuilder::set_valid(Block& block, int part, int rank, bool valid) {
  memory_.set_valid(block, part, rank, valid);
  record_.changes.push_back({block.id, block.serial, part, rank, block.page(part, rank), valid});
}

void PlanBuilder::write_table(Sequence& sequence, int64_t rows) {
  const int64_t last = ceil_div(sequence.scheduled + rows, block_tokens_);
  if (sequence.table_blocks >= last) return;
  TableWrite write;
  write.table = sequence.table;
  write.version = sequence.table_version;
  write.first_block = sequence.table_blocks;
  const int64_t block_entries = int64_t{memory_.parts()} * limits_.rank_count;
  write.pages.resize(static_cast<size_t>((last - sequence.table_blocks) * block_entries));
  PageId* to = write.pages.data();
  memory_.for_each(sequence.blocks, sequence.table_blocks, [&](const Block& block) {
    if (block.index >= last) return;
    write_entries(sequence, block, to);
    to += block_entries;
  });
  sequence.table_blocks = last;
  plan_.table_writes.push_back(std::move(write));
}

// The host pages that are new to its table; with a new one the hot buffer, too. Before a plan counts them.
void PlanBuilder::write_host_table(Sequence& sequence) {
  const bool new_table = sequence.table_blocks == 0;
  const int64_t blocks = sequence.host_blocks_count();
  if (!new_table && sequence.host_table_blocks == blocks) return;
  HostTableWrite write;
  write.table = sequence.table;
  write.new_table = new_table;
  write.first_block = sequence.host_table_blocks;
  for (int64_t block = write.first_block; block < blocks; ++block) {
    const std::vector<PageId>& pages = memory_.host().pages(sequence.host_copies[static_cast<size_t>(block)]);
    write.pages.insert(write.pages.end(), pages.begin(),
                       pages.begin() + limits_.geometry.first_part(kv::Stream::kIndexKeys));
  }
  sequence.host_table_blocks = blocks;
  size_t most = 0;
  for (const auto& pages : sequence.hot) most = std::max(most, pages.size());
  for (size_t i = 0; new_table && i < most; ++i) {
    for (int rank = 0; rank < limits_.rank_count; ++rank) {
      const std::vector<PageId>& pages = sequence.hot[static_cast<size_t>(rank)];
      write.hot_pages.push_back(i < pages.size() ? pages[i] : kNoPage);
    }
  }
  plan_.host_writes.push_back(std::move(write));
}

// Exactly the pages of the residency, even where a shared block lies on more ranks.
void PlanBuilder::write_entries(const Sequence& sequence, const Block& block, PageId* to) const {
  for (int part = 0; part < memory_.parts(); ++part) {
    const RankMask wanted = memory_.wanted(block, part, sequence.placement.residency);
    CHECK_EQ(wanted & ~block.part(part).valid, 0u);
    const auto& held = block.part(part).page;
    for (int rank = 0; rank < limits_.rank_count; ++rank) {
      *to++ = holds(wanted, rank) ? held[static_cast<size_t>(rank)] : kNoPage;
    }
  }
}

void PlanBuilder::add_span(Sequence& sequence, int64_t rows, bool prefill, std::vector<uint32_t> drafts,
                           int64_t guesses) {
  if (sequence.needs_switch) apply_switch(sequence);
  if (sequence.next) widen(sequence);
  if (sequence.host_context) write_host_table(sequence);
  write_table(sequence, rows + std::max<int64_t>(guesses - 1, 0));
  const Placement& placement = sequence.placement;
  const auto turn = number(plan_.step) + plan_.spans.size();
  Span& span = plan_.spans.emplace_back();
  span.request = sequence.id;
  span.table = sequence.table;
  span.table_version = sequence.table_version;
  span.start = sequence.scheduled;
  span.rows = rows;
  span.no_write = sequence.repeat_last_row && sequence.scheduled == sequence.prompt - 1;
  span.split = prefill ? chunk_split(sequence.wish.prefill, rows, span.no_write, limits_.places())
                       : kv::Split::kShared;
  span.grouping = placement.grouping;
  span.origin = sequence.origin;
  span.index_c = placement.index_c;
  span.index_copied = placement.index.kind == kv::IndexKind::kCopied;
  span.host_blocks = sequence.host_blocks_count();
  const kv::Mechanisms& mechanisms = sequence.wish.mechanisms;
  const bool partials = span.split == kv::Split::kShared && placement.grouping.c > 1;
  span.replicate_query = partials && mechanisms.query == kv::QueryPath::kReplicated;
  span.tree_partials = partials && mechanisms.partials == kv::PartialsPath::kTree;
  span.copy_context = span.split != kv::Split::kShared && mechanisms.fetch == kv::FetchPath::kCopies;
  span.pass_query = !sequence.host_context && passes_query(limits_, placement, span.split, mechanisms.context,
                                                           span.start, rows, sequence.origin);
  const bool dense = limits_.index_topk == 0 || span.start + rows <= limits_.index_topk;
  span.expand_context = span.split != kv::Split::kShared && dense && !span.pass_query &&
                        mechanisms.form == kv::AttentionForm::kExpanded;
  span.prefill = prefill;
  const int64_t known = rows - std::ssize(drafts);
  if (span.start + known <= sequence.tokens.size()) {
    sequence.tokens.read(span.start, known, span.tokens);
    span.tokens.insert(span.tokens.end(), drafts.begin(), drafts.end());
  } else {
    CHECK(!prefill && rows == 1);
    span.has_input_ref = true;
    span.input_ref = sequence.last_sample;
  }
  const bool ends_prompt = sequence.answered() == 0 && span.start + rows == sequence.prompt;
  span.sample_rows = !prefill ? rows : ends_prompt ? 1 : 0;
  // Logits are gathered on one rank: take turns.
  span.sampler_rank = static_cast<int>(turn % static_cast<uint64_t>(limits_.places()));
  span.draft_tokens = guesses;
  if (prefill) {
    const int64_t left = sequence.tokens.size() - span.start - rows;
    sequence.tokens.read(span.start + rows, std::min(left, limits_.draft_layers), span.next_tokens);
  }
  span.sampling = sequence.sampling;
  span.digest = sequence.digest;
  if (span.sample_rows > 0) {
    span.sample_index = static_cast<uint32_t>(limits_.max_samples - samples_left_);
    samples_left_ -= span.sample_rows + guesses;
    sequence.samples_scheduled += span.sample_rows;
    sequence.last_sample = {plan_.step, span.sample_index};
  }
  sequence.scheduled += rows;
  rows_left_ -= rows;
  record_.spans.push_back({sequence.id, span.start, rows, prefill, span.sample_rows, span.sample_index,
                           std::move(drafts), guesses});
}

Plan PlanBuilder::finish() {
  int64_t prefill = 0, decode = 0, head = 0;
  for (const Span& span : plan_.spans) {
    (span.prefill ? prefill : decode) += span.rows;
    head += span.digest ? span.rows : span.sample_rows;
  }
  plan_.padded = {padded_rows(prefill), padded_rows(decode), padded_rows(head)};
  return std::move(plan_);
}

uint32_t padded_rows(int64_t rows) {
  return rows == 0 ? 0 : static_cast<uint32_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
}

}  // namespace weft::controlplane
