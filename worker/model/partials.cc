#include "worker/model/partials.h"

#include <cstring>

#include "kernels/attention.h"

namespace weft::worker {

int64_t Partials::words() const { return kernels::partial_words(state_.config.value_width()); }

int64_t Partials::heads_of(const SpanRoute& span, int member) const {
  return kv::rank_heads(span.grouping, member, state_.config.heads).size();
}

std::vector<int> Partials::members_of(const SpanRoute& span) const {
  const int first = group_first(state_.rank, span.grouping.c);
  std::vector<int> members;
  for (int member = first; member < first + span.grouping.c; ++member) members.push_back(member);
  return members;
}

void Partials::begin_layer() {
  offset_.assign(state_.layout.spans().size(), 0);
  int64_t size = 0;
  for (const SpanRoute& span : state_.layout.spans()) {
    if (!span.dcp() || !span.grouping.contains(state_.rank)) continue;
    offset_[static_cast<size_t>(span.index)] = size;
    int64_t heads = heads_of(span, state_.rank);
    if (span.tree_partials) heads = kv::group_heads(span.grouping, state_.rank, state_.config.heads).size();
    size += span.rows * heads * words();
  }
  scratch(kept_, size);
}

float* Partials::kept(const SpanRoute& span, int member) {
  int64_t heads = 0;
  for (int before = group_first(state_.rank, span.grouping.c); span.tree_partials && before < member;
       ++before) {
    heads += heads_of(span, before);
  }
  return kept_.data() + offset_[static_cast<size_t>(span.index)] + span.rows * heads * words();
}

float* Partials::at(const SpanRoute& span, int member) {
  if (span.tree_partials || member == state_.rank) return kept(span, member);
  return state_.outbox() + partials_offset(state_.layout, state_.config, span, state_.rank, member, 0);
}

void Partials::send(const SpanRoute& span, int round) {
  for (const int member : members_of(span)) {
    if (!sends_partials(span, state_.rank, member, round)) continue;
    std::memcpy(
        state_.outbox() + partials_offset(state_.layout, state_.config, span, state_.rank, member, round),
        kept(span, member),
        static_cast<size_t>(span.rows * heads_of(span, member) * words()) * sizeof(float));
  }
}

// What the partner of this round sends: merged into what is kept of the same heads.
void Partials::receive(const SpanRoute& span, int round) {
  const int c = span.grouping.c;
  const int partner = group_first(state_.rank, c) +
                      kv::class_owner(class_of(span, state_.rank) ^ (c >> (round + 1)), span.origin, c);
  for (const int member : members_of(span)) {
    if (!sends_partials(span, partner, member, round)) continue;
    const float* from =
        state_.inbox(partner) + partials_offset(state_.layout, state_.config, span, partner, member, round);
    float* mine = kept(span, member);
    const int64_t count = span.rows * heads_of(span, member);
    for_rows(state_.parallel, count, 32, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        kernels::merge_partial(mine + i * words(), from + i * words(), state_.config.value_width());
      }
    });
    state_.count(span.index, kv::CrossKind::kPartials, count * words() * static_cast<int64_t>(sizeof(float)));
  }
}

// The partials of this rank's heads from all members, by residue class.
void Partials::merge_classes(const SpanRoute& span) {
  const int c = span.grouping.c;
  const int64_t row_words = heads_of(span, state_.rank) * words();
  if (row_words == 0) return;
  std::vector<const float*> sources(static_cast<size_t>(c));  // by class
  for (const int member : members_of(span)) {
    sources[static_cast<size_t>(class_of(span, member))] =
        member == state_.rank ? kept(span, member)
                              : state_.inbox(member) + partials_offset(state_.layout, state_.config, span,
                                                                       member, state_.rank, 0);
  }
  for_rows(state_.parallel, span.rows, 4, [&](int64_t begin, int64_t end) {
    std::vector<float> classes(static_cast<size_t>(c * row_words));
    for (int64_t row = begin; row < end; ++row) {
      for (int i = 0; i < c; ++i) {
        std::memcpy(classes.data() + i * row_words, sources[static_cast<size_t>(i)] + row * row_words,
                    static_cast<size_t>(row_words) * sizeof(float));
      }
      for (int64_t at = 0; at < row_words; at += words()) {
        kernels::merge_partials(classes.data() + at, c, row_words, state_.config.value_width());
      }
      std::memcpy(kept(span, state_.rank) + row * row_words, classes.data(),
                  static_cast<size_t>(row_words) * sizeof(float));
    }
  });
  state_.count(span.index, kv::CrossKind::kPartials,
               span.rows * (c - 1) * row_words * static_cast<int64_t>(sizeof(float)));
}

void Partials::finish(const SpanRoute& span, float* out) {
  const int64_t width = state_.config.value_width();
  const float* partials = kept(span, state_.rank);
  for_rows(state_.parallel, span.rows * heads_of(span, state_.rank), 32, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      kernels::finish_partial(partials + i * words(), width, out + i * width);
    }
  });
}

Result<void> Partials::exchange(int layer, const std::function<float*(const SpanRoute&)>& out,
                                const std::function<void()>& after_first) {
  for (int round = 0; round < state_.layout.partial_rounds(); ++round) {
    for (const SpanRoute& span : state_.layout.spans()) {
      if (span.tree_partials && span.dcp() && span.grouping.contains(state_.rank)) send(span, round);
    }
    TRY_VOID(state_.exchange.pass(ExchangePoint::kPartials, layer));
    if (round == 0) after_first();
    for (const SpanRoute& span : state_.layout.spans()) {
      if (!span.dcp() || !span.grouping.contains(state_.rank)) continue;
      if (!span.tree_partials && round == 0) merge_classes(span);
      if (span.tree_partials && span.grouping.c >> (round + 1) > 0) receive(span, round);
    }
  }
  for (const SpanRoute& span : state_.layout.spans()) {
    if (span.dcp() && span.grouping.contains(state_.rank)) finish(span, out(span));
  }
  return {};
}

}  // namespace weft::worker
