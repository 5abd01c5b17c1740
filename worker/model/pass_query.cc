#include "worker/model/pass_query.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "kernels/attention.h"
#include "worker/model/finish.h"

namespace weft::worker {

int64_t PassQuery::part_words() const {
  return state_.config.group_heads() * kernels::partial_words(state_.config.value_width());
}

void PassQuery::publish(const std::byte* whole_query) {
  const int64_t row_bytes = state_.config.heads * head_bytes();
  for_spans([&](const SpanRoute& span) {
    const kv::Range rows = state_.layout.owned_rows(span, state_.rank);
    if (rows.empty()) return;
    std::memcpy(state_.exchange.outbox().data() + state_.query_offset(span, state_.rank),
                whole_query + (rows.begin - state_.layout.wide_count()) * row_bytes,
                static_cast<size_t>(rows.size() * row_bytes));
  });
}

void PassQuery::begin_step() {
  readings_.clear();
  sources_.assign(state_.layout.spans().size() * static_cast<size_t>(state_.config.kv_heads), {});
  own_words_ = 0;
  bool passes = false;
  for_spans([&](const SpanRoute& span) {
    passes = true;
    for (int64_t part = 0; part < state_.config.kv_heads; ++part) add_own(span, part);
  });
  if (!passes) return;
  for (int reader = 0; reader < state_.rank_count; ++reader) {
    for (const PassedPartials& sent : passed_partials(state_.layout, state_.config, reader)) {
      const SpanRoute& span = state_.layout.spans()[static_cast<size_t>(sent.span)];
      const auto offset = static_cast<int64_t>(sent.offset);
      if (reader == state_.rank) readings_.push_back({sent.span, sent.part, sent.owner, offset});
      if (sent.owner == state_.rank)
        sources(span, sent.part)[static_cast<size_t>(class_of(span, reader))] = {reader, offset};
    }
  }
  // Neighbours read the same entries.
  std::sort(readings_.begin(), readings_.end(), [](const Reading& a, const Reading& b) {
    return std::tie(a.span, a.part, a.owner) < std::tie(b.span, b.part, b.owner);
  });
  scratch(own_, own_words_);
}

void PassQuery::add_own(const SpanRoute& span, int64_t part) {
  sources(span, part).resize(static_cast<size_t>(span.grouping.c));
  if (!reads_for(span, state_.config, state_.rank_count, state_.rank, state_.rank, part)) return;
  readings_.push_back({span.index, part, state_.rank, own_words_});
  sources(span, part)[static_cast<size_t>(class_of(span, state_.rank))] = {state_.rank, own_words_};
  own_words_ += state_.layout.owned_rows(span, state_.rank).size() * part_words();
}

void PassQuery::add_jobs(const Reading& reading, const std::byte* whole_query, std::vector<AttendJob>& jobs) {
  const ModelConfig& config = state_.config;
  const SpanRoute& span = state_.layout.spans()[static_cast<size_t>(reading.span)];
  const bool mine = reading.owner == state_.rank;
  const kv::Range rows = state_.layout.owned_rows(span, reading.owner);
  if (rows.empty()) return;
  const std::byte* queries =
      mine ? whole_query + (rows.begin - state_.layout.wide_count()) * config.heads * head_bytes()
           : state_.exchange.inbox(reading.owner).data() + state_.query_offset(span, reading.owner);
  float* out = (mine ? own_.data() : state_.outbox()) + reading.offset;
  for (int64_t i = 0; i < rows.size(); ++i) {
    AttendJob job;
    job.span = span.index;
    job.position = state_.layout.home(reading.owner)[static_cast<size_t>(rows.begin + i)].position;
    job.part = static_cast<int>(reading.part);
    job.query = queries + (i * config.heads + reading.part * config.group_heads()) * head_bytes();
    job.heads = config.group_heads();
    job.partials = out + i * part_words();
    jobs.push_back(job);
  }
  if (!mine) {
    state_.count(span.index, kv::CrossKind::kQueries, rows.size() * config.group_heads() * head_bytes());
  }
}

void PassQuery::attend(int64_t layer, const std::byte* whole_query) {
  std::vector<AttendJob> jobs;
  for (const Reading& reading : readings_) add_jobs(reading, whole_query, jobs);
  worker::attend(state_, layer, jobs);
}

void PassQuery::finish_part(const SpanRoute& span, int64_t part, float* z) {
  const ModelConfig& config = state_.config;
  const kv::Range rows = state_.layout.owned_rows(span, state_.rank);
  const int64_t words = kernels::partial_words(config.value_width()), width = config.value_width();
  std::vector<const float*> partials;  // by class
  int64_t received = 0;
  for (const Source& source : sources(span, part)) {
    const bool mine = source.reader == state_.rank;
    partials.push_back((mine ? own_.data() : state_.inbox(source.reader)) + source.offset);
    received += mine ? 0 : rows.size() * part_words();
  }
  state_.count(span.index, kv::CrossKind::kPartials, received * static_cast<int64_t>(sizeof(float)));
  for_rows(state_.parallel, rows.size(), 4, [&](int64_t begin, int64_t end) {
    std::vector<const float*> heads(partials);
    for (const float*& head : heads) head += begin * part_words();
    for (int64_t row = begin; row < end; ++row) {
      const int64_t home = rows.begin - state_.layout.wide_count() + row;
      float* out = z + (home * config.heads + part * config.group_heads()) * width;
      for (int64_t i = 0; i < config.group_heads(); ++i) {
        finish_head(config, heads, out + i * width);
        for (const float*& head : heads) head += words;
      }
    }
  });
}

void PassQuery::finish(float* z) {
  for_spans([&](const SpanRoute& span) {
    if (state_.layout.owned_rows(span, state_.rank).empty()) return;
    for (int64_t part = 0; part < state_.config.kv_heads; ++part) finish_part(span, part, z);
  });
}

}  // namespace weft::worker
