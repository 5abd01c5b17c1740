#include "tests/controlplane/fake_workers.h"

#include <algorithm>
#include <optional>

#include "proto/vocab/check.h"
#include "proto/vocab/random.h"

namespace weft::controlplane {

uint64_t extend_history(uint64_t history, uint32_t token) { return mix64(history * 31 + token); }
uint32_t token_of(uint64_t history) { return static_cast<uint32_t>(mix64(history ^ 0x5eed) % kVocabulary); }

Truth truth_of(uint64_t salt, std::vector<uint32_t> prompt, int64_t max_tokens,
               const std::vector<uint32_t>& stop_tokens, int64_t nan_row) {
  Truth truth;
  truth.salt = salt;
  truth.prompt = static_cast<int64_t>(prompt.size());
  truth.tokens = std::move(prompt);
  truth.nan_row = nan_row;
  uint64_t history = salt;
  for (const uint32_t token : truth.tokens)
    truth.histories.push_back(history = extend_history(history, token));
  for (int64_t i = 0; i < max_tokens; ++i) {
    if (truth.prompt + i - 1 == nan_row) {
      truth.reason = FinishReason::kError;
      break;
    }
    const uint32_t token = token_of(history);
    truth.tokens.push_back(token);
    truth.histories.push_back(history = extend_history(history, token));
    if (std::count(stop_tokens.begin(), stop_tokens.end(), token) > 0) {
      truth.reason = FinishReason::kStop;
      break;
    }
  }
  return truth;
}

FakeWorkers::FakeWorkers(const Limits& limits)
    : limits_(limits), tables_(static_cast<size_t>(limits.table_count)) {
  for (const kv::Stream stream : kv::kAllStreams) {
    for (int rank = 0; rank < limits.rank_count; ++rank) {
      pools_[static_cast<size_t>(stream)].emplace_back(
          static_cast<size_t>(limits.pages(stream, rank)),
          Page(static_cast<size_t>(limits.geometry.block_tokens)));
    }
  }
}

void FakeWorkers::publish(const Plan& plan, const std::deque<Plan>& in_flight) {
  for (const TableWrite& write : plan.table_writes) {
    for (const Plan& other : in_flight) {
      for (const Span& span : other.spans) {
        if (span.table != write.table) continue;
        CHECK_GE(write.first_block, ceil_div(span.start + span.rows, limits_.geometry.block_tokens));
        CHECK_EQ(write.version, span.table_version);
      }
    }
    Table& table = tables_.at(number(write.table));
    if (table.version != write.version) {
      CHECK_EQ(write.first_block, 0);
      table.pages.clear();
      table.version = write.version;
    }
    const int64_t block_pages = limits_.geometry.parts() * limits_.rank_count;
    CHECK_EQ(write.first_block * block_pages, static_cast<int64_t>(table.pages.size()));
    table.pages.insert(table.pages.end(), write.pages.begin(), write.pages.end());
    CHECK_EQ(static_cast<int64_t>(table.pages.size()) % block_pages, 0);
    CHECK_LE(static_cast<int64_t>(table.pages.size()), limits_.table_blocks() * block_pages);
  }
}

bool FakeWorkers::poisoned(const Plan& plan) const {
  return std::any_of(plan.spans.begin(), plan.spans.end(), [&](const Span& span) {
    const int64_t row = truths_.at(span.request).poison_row;
    return row >= span.start && row < span.start + span.rows;
  });
}

std::span<const PageId> FakeWorkers::pages(const Span& span, int64_t block, int part) const {
  const Table& table = tables_.at(number(span.table));
  CHECK_EQ(table.version, span.table_version);
  const int64_t first = (block * limits_.geometry.parts() + part) * limits_.rank_count;
  CHECK_LE(first + limits_.rank_count, static_cast<int64_t>(table.pages.size()));
  return std::span(table.pages).subspan(static_cast<size_t>(first), static_cast<size_t>(limits_.rank_count));
}

template <typename F>
void FakeWorkers::for_each_page(const Span& span, int64_t block, F f) {
  for (int part = 0; part < limits_.geometry.parts(); ++part) {
    const auto ids = pages(span, block, part);
    for (int rank = 0; rank < limits_.rank_count; ++rank) {
      const PageId id = ids[static_cast<size_t>(rank)];
      if (id != kNoPage) f(part, rank, page(limits_.geometry.stream_of(part), rank, id));
    }
  }
}

std::vector<Sample> FakeWorkers::execute(const Plan& plan, int64_t writes_limit) {
  int64_t writes_left = writes_limit;
  ranks_ = kv::Topology(plan.ranks);
  // All ranks copy at the same time: no copy sees what another of the same plan has written.
  std::vector<Page> sources;
  for (const PageCopy& copy : plan.copies)
    sources.push_back(page(copy.stream, copy.from_rank, copy.from_page));
  for (size_t i = 0; i < sources.size(); ++i) {
    if (--writes_left < 0) return {};
    page(plan.copies[i].stream, plan.copies[i].to_rank, plan.copies[i].to_page) = std::move(sources[i]);
  }
  std::vector<Sample> samples;
  for (const Span& span : plan.spans) {
    const Truth& truth = truths_.at(span.request);
    const std::vector<uint64_t> histories = run_rows(span, truth, writes_left);
    if (writes_left < 0) return {};
    sample_rows(plan, span, truth, histories, samples);
  }
  return samples;
}

void FakeWorkers::sample_rows(const Plan& plan, const Span& span, const Truth& truth,
                              const std::vector<uint64_t>& histories, std::vector<Sample>& samples) {
  // Rows up to the first draft that does not hold, or the first that a request which has ended wastes.
  int64_t right = 0;
  while (right < span.rows && span.start + right < std::ssize(truth.histories) &&
         histories[static_cast<size_t>(right)] == truth.histories[static_cast<size_t>(span.start + right)])
    ++right;
  check_reads(span, truth, span.start + right);
  for (int64_t row = span.rows - span.sample_rows; row < span.rows; ++row) {
    const auto cell = span.sample_index + static_cast<uint32_t>(row - (span.rows - span.sample_rows));
    const uint64_t history = histories[static_cast<size_t>(row)];
    Sample sample{span.request, cell, token_of(history), false};
    // What a wrong draft comes to may be anything.
    sample.not_finite = row < right ? span.start + row == truth.nan_row : history % 5 == 0;
    if (sample.not_finite) sample.token = 0;
    token_table_[{plan.step, cell}] = sample.token;
    samples.push_back(sample);
  }
  // The draft layer guesses the answer, with mistakes.
  for (int64_t i = 0; i < span.draft_tokens; ++i) {
    const auto cell = static_cast<uint32_t>(span.sample_index + span.sample_rows + i);
    const int64_t at = span.start + right + 1 + i;
    const uint64_t luck = mix64(histories[0] + static_cast<uint64_t>(i));
    const bool known = at < std::ssize(truth.tokens) && luck % 3 != 0;
    samples.push_back(
        {span.request, cell,
         known ? truth.tokens[static_cast<size_t>(at)] : static_cast<uint32_t>(luck % kVocabulary),
         luck % 17 == 0});
  }
}

uint64_t FakeWorkers::history_before(const Span& span, const Truth& truth) {
  if (span.start == 0) return truth.salt;
  const int64_t position = span.start - 1;
  const int64_t block_tokens = limits_.geometry.block_tokens;
  std::optional<uint64_t> history;
  for_each_page(span, position / block_tokens, [&](int part, int, const Page& page) {
    const Slot& slot = page[static_cast<size_t>(position % block_tokens)];
    CHECK(slot.part == part && slot.position == position, "found ", slot.part, " ", slot.position);
    history = slot.history;
  });
  CHECK(history.has_value(), "position ", position, " is nowhere");
  return *history;
}

std::vector<uint64_t> FakeWorkers::run_rows(const Span& span, const Truth& truth, int64_t& writes_left) {
  const int64_t block_tokens = limits_.geometry.block_tokens;
  uint64_t history = history_before(span, truth);
  std::vector<uint64_t> histories;
  bool drafts_hold = true;
  for (int64_t i = 0; i < span.rows; ++i) {
    const int64_t position = span.start + i;
    const uint32_t token = span.has_input_ref
                               ? token_table_.at({span.input_ref.step, span.input_ref.sample_index})
                               : span.tokens.at(static_cast<size_t>(i));
    history = extend_history(history, token);
    histories.push_back(history);
    const bool draft = !span.prefill && i > 0;
    if (draft)
      drafts_hold = drafts_hold && position < std::ssize(truth.tokens) &&
                    token == truth.tokens[static_cast<size_t>(position)];
    if (drafts_hold && position < static_cast<int64_t>(truth.tokens.size())) {
      CHECK_EQ(token, truth.tokens[static_cast<size_t>(position)]);
      CHECK_EQ(history, truth.histories[static_cast<size_t>(position)]);
    }
    ++rows_checked_;
    if (span.no_write) continue;
    for_each_page(span, position / block_tokens, [&](int part, int, Page& page) {
      if (--writes_left < 0) return;
      page[static_cast<size_t>(position % block_tokens)] = {part, position, history};
    });
    if (writes_left < 0) return histories;
  }
  return histories;
}

// Every page that the table names holds the right rows, and every reader has the blocks it reads.
void FakeWorkers::check_reads(const Span& span, const Truth& truth, int64_t end) {
  const int64_t block_tokens = limits_.geometry.block_tokens;
  for (int64_t block = 0; block * block_tokens < end; ++block) {
    check_readers(span, block);
    for_each_page(span, block, [&](int part, int rank, const Page& page) {
      for (int64_t p = block * block_tokens; p < std::min(end, (block + 1) * block_tokens); ++p) {
        const Slot& slot = page[static_cast<size_t>(p % block_tokens)];
        CHECK(slot.part == part && slot.position == p &&
                  slot.history == truth.histories[static_cast<size_t>(p)],
              "request ", number(span.request), " part ", part, " position ", p, " rank ", rank, ": found ",
              slot.part, " ", slot.position);
      }
    });
  }
}

void FakeWorkers::check_readers(const Span& span, int64_t block) {
  const kv::CacheGeometry& geometry = limits_.geometry;
  for (int part = 0; part < geometry.parts(); ++part) {
    const kv::Stream stream = geometry.stream_of(part);
    const int64_t in_stream = part - geometry.first_part(stream);
    const int index_stripes = span.index_copied ? 1 : span.index_c;
    const int c = stream == kv::Stream::kEntries ? span.grouping.c : index_stripes;
    // Whoever runs the whole rows of one rank reads all parts; else the members of a c-group those of its
    // heads.
    const kv::Pattern pattern = kv::group_pattern(span.grouping, c, ranks_.count());
    const auto ids = pages(span, block, part);
    for (int rank = 0; rank < limits_.rank_count; ++rank) {
      const int place = ranks_.contains(rank) ? ranks_.place(rank) : -1;
      const kv::Range read =
          place < 0 ? kv::Range{} : kv::held_parts(geometry, stream, pattern, place, ranks_.count());
      const bool reads =
          place >= 0 && span.grouping.contains(place) && in_stream >= read.begin && in_stream < read.end &&
          kv::class_owner(kv::residue_class(block, c), span.origin, c) == (place - span.grouping.base) % c;
      // Exactly the readers hold it: no reader without bytes, no bytes without a reader.
      CHECK_EQ(reads, ids[static_cast<size_t>(rank)] != kNoPage);
    }
  }
}

}  // namespace weft::controlplane
