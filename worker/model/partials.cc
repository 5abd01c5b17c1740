#include "worker/model/partials.h"

#include <cstring>

#include "kernels/attention.h"
#include "worker/model/finish.h"

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

void Partials::begin_step() {
  maps_.clear();
  maps_.resize(static_cast<size_t>(state_.layout.partial_rounds() * state_.rank_count));
}

size_t Partials::offset(const SpanRoute& span, int from, int member, int round) {
  auto& map = maps_[static_cast<size_t>(round * state_.rank_count + from)];
  if (!map) map.emplace(state_.layout, state_.config, from, round);
  return map->offset(span, member);
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
  return state_.outbox() + offset(span, state_.rank, member, 0);
}

void Partials::send(const SpanRoute& span, int round) {
  for (const int member : members_of(span)) {
    if (!sends_partials(span, state_.rank, member, round)) continue;
    std::memcpy(state_.outbox() + offset(span, state_.rank, member, round), kept(span, member),
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
    const float* from = state_.inbox(partner) + offset(span, partner, member, round);
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
void Partials::finish_classes(const SpanRoute& span, float* out) {
  const int c = span.grouping.c;
  const int64_t count = span.rows * heads_of(span, state_.rank), width = state_.config.value_width();
  if (count == 0) return;
  std::vector<const float*> sources(static_cast<size_t>(c));  // by class
  for (const int member : members_of(span)) {
    sources[static_cast<size_t>(class_of(span, member))] =
        member == state_.rank ? kept(span, member)
                              : state_.inbox(member) + offset(span, member, state_.rank, 0);
  }
  for_rows(state_.parallel, count, 32, [&](int64_t begin, int64_t end) {
    std::vector<const float*> partials(sources);
    for (const float*& partial : partials) partial += begin * words();
    for (int64_t i = begin; i < end; ++i) {
      finish_head(state_.config, partials, out + i * width);
      for (const float*& partial : partials) partial += words();
    }
  });
  state_.count(span.index, kv::CrossKind::kPartials,
               (c - 1) * count * words() * static_cast<int64_t>(sizeof(float)));
}

// What the rounds of a tree have merged of this rank's heads.
void Partials::finish_tree(const SpanRoute& span, float* out) {
  const int64_t width = state_.config.value_width();
  const float* partials = kept(span, state_.rank);
  for_rows(state_.parallel, span.rows * heads_of(span, state_.rank), 32, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      finish_head(state_.config, partials + i * words(), out + i * width);
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
      if (!span.tree_partials && round == 0) finish_classes(span, out(span));
      if (span.tree_partials && span.grouping.c >> (round + 1) > 0) receive(span, round);
    }
  }
  for (const SpanRoute& span : state_.layout.spans()) {
    if (span.tree_partials && span.dcp() && span.grouping.contains(state_.rank)) finish_tree(span, out(span));
  }
  return {};
}

}  // namespace weft::worker
