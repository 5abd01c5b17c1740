#include "worker/model/pass_query.h"

#include <cstring>

#include "kernels/attention.h"

namespace weft::worker {

int64_t PassQuery::part_words() const {
  return state_.config.group_heads() * kernels::partial_words(state_.config.value_width());
}

void PassQuery::publish(const std::byte* whole_query) {
  const int64_t row_bytes = state_.config.heads * head_bytes();
  for_spans([&](const SpanRoute& span) {
    const kv::Range rows = state_.layout.owned_rows(span, state_.rank);
    if (rows.empty()) return;
    std::memcpy(
        state_.exchange.outbox().data() +
            queries_offset(state_.layout, state_.config, state_.setup.cache.query_dtype(), span, state_.rank),
        whole_query + (rows.begin - state_.layout.wide_count()) * row_bytes,
        static_cast<size_t>(rows.size() * row_bytes));
  });
}

void PassQuery::place_own() {
  const int64_t parts = state_.config.kv_heads;
  own_offset_.assign(state_.layout.spans().size() * static_cast<size_t>(parts), -1);
  int64_t size = 0;
  for_spans([&](const SpanRoute& span) {
    for (int64_t part = 0; part < parts; ++part) {
      if (!reads_for(span, state_.rank, part)) continue;
      own_offset_[static_cast<size_t>(span.index * parts + part)] = size;
      size += state_.layout.owned_rows(span, state_.rank).size() * part_words();
    }
  });
  scratch(own_, size);
}

void PassQuery::attend(int64_t layer, const std::byte* whole_query) {
  const ModelConfig& config = state_.config;
  place_own();
  std::vector<AttendJob> jobs;
  const auto add_rows = [&](const SpanRoute& span, int64_t part, int owner) {
    const bool mine = owner == state_.rank;
    const kv::Range rows = state_.layout.owned_rows(span, owner);
    if (rows.empty()) return;
    const std::byte* queries =
        mine ? whole_query + (rows.begin - state_.layout.wide_count()) * config.heads * head_bytes()
             : state_.exchange.inbox(owner).data() +
                   queries_offset(state_.layout, config, state_.setup.cache.query_dtype(), span, owner);
    float* out = mine
                     ? own_.data() + own_offset_[static_cast<size_t>(span.index * config.kv_heads + part)]
                     : state_.outbox() + passed_offset(state_.layout, config, span, state_.rank, owner, part);
    for (int64_t i = 0; i < rows.size(); ++i) {
      AttendJob job;
      job.span = span.index;
      job.position = state_.layout.home(owner)[static_cast<size_t>(rows.begin + i)].position;
      job.part = static_cast<int>(part);
      job.query = queries + (i * config.heads + part * config.group_heads()) * head_bytes();
      job.heads = config.group_heads();
      job.partials = out + i * part_words();
      jobs.push_back(job);
    }
    if (!mine) {
      state_.count(span.index, kv::CrossKind::kQueries, rows.size() * config.group_heads() * head_bytes());
    }
  };
  for_spans([&](const SpanRoute& span) {
    for (int64_t part = 0; part < config.kv_heads; ++part) {
      for (int owner = 0; owner < state_.rank_count; ++owner) {
        if (reads_for(span, owner, part)) add_rows(span, part, owner);
      }
    }
  });
  worker::attend(state_, layer, jobs);
}

void PassQuery::finish_part(const SpanRoute& span, int64_t part, float* z) {
  const ModelConfig& config = state_.config;
  const int c = span.grouping.c;
  const kv::Range rows = state_.layout.owned_rows(span, state_.rank);
  const int64_t words = kernels::partial_words(config.value_width()), width = config.value_width();
  std::vector<const float*> sources(static_cast<size_t>(c));  // by class
  int64_t received = 0;
  for (int reader = 0; reader < state_.rank_count; ++reader) {
    if (!worker::reads_for(span, config, state_.rank_count, reader, state_.rank, part)) continue;
    const bool mine = reader == state_.rank;
    sources[static_cast<size_t>(class_of(span, reader))] =
        mine ? own_.data() + own_offset_[static_cast<size_t>(span.index * config.kv_heads + part)]
             : state_.inbox(reader) + passed_offset(state_.layout, config, span, reader, state_.rank, part);
    received += mine ? 0 : rows.size() * part_words();
  }
  state_.count(span.index, kv::CrossKind::kPartials, received * static_cast<int64_t>(sizeof(float)));
  for_rows(state_.parallel, rows.size(), 4, [&](int64_t begin, int64_t end) {
    std::vector<float> classes(static_cast<size_t>(c * part_words()));
    for (int64_t row = begin; row < end; ++row) {
      for (int i = 0; i < c; ++i) {
        std::memcpy(classes.data() + i * part_words(), sources[static_cast<size_t>(i)] + row * part_words(),
                    static_cast<size_t>(part_words()) * sizeof(float));
      }
      const int64_t home = rows.begin - state_.layout.wide_count() + row;
      float* out = z + (home * config.heads + part * config.group_heads()) * width;
      for (int64_t head = 0; head < config.group_heads(); ++head) {
        kernels::merge_partials(classes.data() + head * words, c, part_words(), width);
        kernels::finish_partial(classes.data() + head * words, width, out + head * width);
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
