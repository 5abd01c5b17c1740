#include "kv/cost.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "kv/row_split.h"
#include "proto/vocab/check.h"
#include "proto/vocab/units.h"

namespace weft::kv {
namespace {

constexpr int64_t kFloatBytes = 4;
constexpr int64_t kOfferHeadBytes = 16;  // of a rank's best index keys (kernels/split_top_k.h)
constexpr int64_t kScoreBytes = 4;
constexpr int64_t kPositionBytes = 4;
constexpr int64_t kVocabularyPanel = 16;  // slices of the head are whole panels
constexpr int64_t kHeadBatch = 64;        // head rows that travel together

// All members of the group hold the rows alike; every other rank keeps their residual too.
bool is_wide(const CostSpan& span) { return span.split == Split::kShared && span.grouping.width > 1; }
bool splits_cache(const CostSpan& span) { return is_wide(span) && span.grouping.c > 1; }

// kAuto is a choice still to be made: it counts as pass-KV.
bool passes_query(const CostSpan& span) {
  return span.split != Split::kShared && span.mechanisms.context == ContextPath::kPassQ;
}

// Exchange points at which partials of a span travel.
int partial_rounds(const CostSpan& span) {
  if (passes_query(span)) return 1;
  if (!splits_cache(span)) return 0;
  if (span.mechanisms.partials == PartialsPath::kAllToAll) return 1;
  return std::countr_zero(static_cast<unsigned>(span.grouping.c));
}

// How one rank takes part in a span.
class Share {
 public:
  Share(const CostModel& model, const CostSpan& span, int rank) : model_(model), span_(span), rank_(rank) {
    CHECK_GT(span.rows, 0);
    wide_ = is_wide(span);
    if (span.split != Split::kShared) {
      const OwnedSpan alone{span.split, span.start, span.rows};
      owners_ = split_rows({&alone, 1}, model.index_topk, model.rank_count).front();
    }
    for (int64_t row = 0; row < span.rows; ++row) {
      if (wide_ || owner(row) == rank) own_positions_.push_back(span.start + row);
    }
  }

  // Everything of one layer but the feed-forward sums; of a row's keys the layer sees the last `window`, 0:
  // all.
  Cost attention(bool index_layer, int64_t window) const {
    Cost cost;
    CrossedBytes& bytes = cost.crossed;
    if (wide_) {
      if (span_.grouping.contains(rank_)) {
        bytes[CrossKind::kQueries] = queries();
        bytes[CrossKind::kPartials] = partials();
        if (index_layer && model_.index_topk > 0 && span_.index_c > 1) {
          bytes[CrossKind::kCandidates] = candidates();
        }
      }
      cost.exact = bytes[CrossKind::kCandidates] == 0;
      bytes[CrossKind::kRows] = span_.rows * remote_nodes(head_segments(), span_.grouping) * row_bytes();
      return cost;
    }
    if (passes_query(span_)) {
      bytes[CrossKind::kEntries] =
          written_elsewhere(Stream::kEntries) * model_.geometry.stream(Stream::kEntries).bytes_per_token;
      bytes[CrossKind::kQueries] = passed_queries();
      bytes[CrossKind::kPartials] = passed_partials();
    } else {
      cost = whole_entries(window);
    }
    if (index_layer) bytes[CrossKind::kIndexKeys] = whole_index_keys();
    bytes[CrossKind::kRows] = (span_.rows - std::ssize(own_positions_)) * row_bytes();
    return cost;
  }

  int64_t feed_forward(uint32_t segments) const {
    return std::ssize(own_positions_) * remote_nodes(segments, {0, model_.rank_count, 1}) * row_bytes();
  }

  // Head rows travel from the one rank that has them; slices of the logits to the sampler.
  int64_t head() const {
    if (model_.rank_count == 1) return 0;
    int64_t bytes = 0;
    for (int64_t row = span_.rows - span_.head_rows; row < span_.rows; ++row) {
      if (!wide_ && owner(row) != rank_) bytes += row_bytes();
      if (span_.sampler == rank_) bytes += (model_.vocabulary - vocabulary_slice()) * kFloatBytes;
    }
    return bytes;
  }

 private:
  int owner(int64_t row) const {
    return span_.split == Split::kShared ? span_.grouping.base : owners_.owner(row);
  }
  int64_t parts(Stream stream) const { return model_.geometry.stream(stream).parts; }
  int64_t row_bytes() const { return model_.hidden * kFloatBytes; }
  int64_t heads_of(int rank) const { return rank_heads(span_.grouping, rank, model_.geometry.heads).size(); }
  bool sparse(int64_t position) const { return model_.index_topk > 0 && position + 1 > model_.index_topk; }

  uint32_t head_segments() const {
    uint32_t mask = 0;
    for (int segment = 0; segment < kShards; ++segment) {
      if (!segment_items(segment, model_.geometry.heads).empty()) mask |= 1u << segment;
    }
    return mask;
  }

  // Sums that the other ranks of a group send of one row: their tree nodes with any segment that is not
  // empty.
  int64_t remote_nodes(uint32_t segments, const Grouping& group) const {
    int64_t nodes = 0;
    for (int member = 0; member < group.width; ++member) {
      if (group.base + member == rank_) continue;
      for (const TreeNode& node : tree_nodes(owned_segments(member, group.width))) {
        const uint32_t mask = ((1u << node.count) - 1) << node.first;
        nodes += (segments & mask) != 0 ? 1 : 0;
      }
    }
    return nodes;
  }

  int64_t vocabulary_slice() const {
    const int64_t panels = ceil_div(model_.vocabulary, kVocabularyPanel);
    auto edge = [&](int64_t rank) {
      return std::min(panels * rank / model_.rank_count * kVocabularyPanel, model_.vocabulary);
    };
    return edge(rank_ + 1) - edge(rank_);
  }

  int64_t queries() const {
    if (span_.mechanisms.query == QueryPath::kReplicated) return 0;
    const int64_t group = group_heads(span_.grouping, rank_, model_.geometry.heads).size();
    return span_.rows * (group - heads_of(rank_)) * model_.query_bytes;
  }

  int64_t partials() const {
    const int c = span_.grouping.c;
    int64_t heads = (c - 1) * heads_of(rank_);
    if (c > 1 && span_.mechanisms.partials == PartialsPath::kTree) {
      // After each round a rank is left with the members whose class has one more bit in common with its own.
      const int first = rank_ / c * c;
      const auto class_of = [&](int rank) { return owned_class(rank - first, span_.origin, c); };
      heads = 0;
      for (int bit = c / 2; bit > 0; bit /= 2) {
        for (int member = first; member < first + c; ++member) {
          if (class_of(member) / bit == class_of(rank_) / bit) heads += heads_of(member);
        }
      }
    }
    return span_.rows * heads * (model_.value_width + 2) * kFloatBytes;
  }

  // From each other member of the index group: the first part of its offer, which has the scores of its best
  // keys, as many as it has; and the positions of its chosen keys, if this rank may read entries there. Keys
  // of each member are chosen in proportion to what the row sees of them.
  int64_t candidates() const {
    const int c = span_.index_c;
    const int64_t P = model_.geometry.block_tokens;
    const int64_t first_part = first_offer(model_.index_topk, c);
    std::vector<int64_t> keys(static_cast<size_t>(c), 0);  // by class: keys in blocks before the row's
    int64_t block = 0;
    int64_t bytes = 0;
    for (int64_t position : own_positions_) {
      for (; block < position / P; ++block) keys[static_cast<size_t>(residue_class(block, c))] += P;
      if (!sparse(position)) continue;
      const int last = residue_class(block, c);
      for (int member = 0; member < c; ++member) {
        if (member == rank_ % c) continue;
        const int shard = owned_class(member, span_.origin, c);
        const int64_t visible = keys[static_cast<size_t>(shard)] + (shard == last ? position % P + 1 : 0);
        bytes += kOfferHeadBytes + std::min(visible, first_part) * kScoreBytes;
        if ((rank_ - member) % common_classes(span_.grouping.c, c) != 0) continue;
        bytes += model_.index_topk * visible / (position + 1) * kPositionBytes;
      }
    }
    return bytes;
  }

  // Parts of a block that a rank holds.
  int64_t parts_on(Stream stream, int64_t block, int rank) const {
    const Pattern pattern = span_.residency.of(stream);
    if (!holds(pattern_holders(pattern, block, span_.origin, model_.rank_count), rank)) return 0;
    return held_parts(model_.geometry, stream, pattern, rank, model_.rank_count).size();
  }

  // Slots (one token of one part) of positions [begin, end) that this rank must read elsewhere.
  int64_t remote_slots(Stream stream, int64_t begin, int64_t end) const {
    const int64_t P = model_.geometry.block_tokens;
    int64_t slots = 0;
    for (int64_t block = begin / P; block * P < end; ++block) {
      const int64_t tokens = std::min((block + 1) * P, end) - std::max(block * P, begin);
      slots += (parts(stream) - parts_on(stream, block, rank_)) * tokens;
    }
    return slots;
  }

  // The same of all positions that any row of the last `window` keys sees.
  int64_t remote_slots_in_windows(int64_t window) const {
    int64_t slots = 0, counted = 0;
    for (int64_t position : own_positions_) {
      slots += remote_slots(Stream::kEntries, std::max(counted, position + 1 - window), position + 1);
      counted = position + 1;
    }
    return slots;
  }

  // Slots of this rank's new entries that holders elsewhere have.
  int64_t written_elsewhere(Stream stream) const {
    if (span_.no_write) return 0;
    int64_t slots = 0;
    for (int64_t position : own_positions_) {
      for (int rank = 0; rank < model_.rank_count; ++rank) {
        if (rank != rank_) slots += parts_on(stream, position / model_.geometry.block_tokens, rank);
      }
    }
    return slots;
  }

  // Written to other holders, and read from other ranks' pages: once per layer each, whatever the number of
  // rows.
  Cost whole_entries(int64_t window) const {
    Cost cost;
    if (own_positions_.empty()) return cost;
    const int64_t token_bytes = model_.geometry.stream(Stream::kEntries).bytes_per_token;
    if (span_.mechanisms.fetch == FetchPath::kCopies) {  // all that lies before the last row, seen or not
      cost.crossed[CrossKind::kEntries] = (written_elsewhere(Stream::kEntries) +
                                           remote_slots(Stream::kEntries, 0, own_positions_.back() + 1)) *
                                          token_bytes;
      return cost;
    }
    if (window > 0) {
      cost.crossed[CrossKind::kEntries] =
          (written_elsewhere(Stream::kEntries) + remote_slots_in_windows(window)) * token_bytes;
      return cost;
    }
    const auto first_sparse = std::find_if(own_positions_.begin(), own_positions_.end(),
                                           [this](int64_t position) { return sparse(position); });
    const int64_t dense_end = first_sparse == own_positions_.begin() ? 0 : *(first_sparse - 1) + 1;
    const int64_t dense = remote_slots(Stream::kEntries, 0, dense_end);
    const int64_t visible = remote_slots(Stream::kEntries, 0, own_positions_.back() + 1);
    const int64_t selected =
        (own_positions_.end() - first_sparse) * model_.index_topk * parts(Stream::kEntries);
    cost.exact = dense == visible || selected == 0;
    const int64_t slots = written_elsewhere(Stream::kEntries) + std::min(visible, dense + selected);
    cost.crossed[CrossKind::kEntries] = slots * token_bytes;
    return cost;
  }

  int64_t rows_of(int rank) const {
    int64_t rows = 0;
    for (int64_t row = 0; row < span_.rows; ++row) rows += owner(row) == rank ? 1 : 0;
    return rows;
  }

  // (part, residue class) pairs that one rank computes for the rows of another.
  int64_t classes_read(int reader, int row_owner) const {
    int64_t count = 0;
    for (int64_t part = 0; part < parts(Stream::kEntries); ++part) {
      for (int residue = 0; residue < span_.grouping.c; ++residue) {
        count += class_reader(model_.geometry, span_.grouping, row_owner, part, residue, span_.origin,
                              model_.rank_count) == reader
                     ? 1
                     : 0;
      }
    }
    return count;
  }
  int64_t part_heads() const { return model_.geometry.heads / parts(Stream::kEntries); }

  // Of other owners, for what this rank reads for them; and of this rank's rows, from those who read for it.
  int64_t passed_queries() const {
    int64_t heads = 0;
    for (int other = 0; other < model_.rank_count; ++other) {
      if (other != rank_) heads += rows_of(other) * classes_read(rank_, other) * part_heads();
    }
    return heads * model_.query_bytes;
  }
  int64_t passed_partials() const {
    int64_t classes = 0;
    for (int other = 0; other < model_.rank_count; ++other) {
      if (other != rank_) classes += classes_read(other, rank_);
    }
    return std::ssize(own_positions_) * classes * part_heads() * (model_.value_width + 2) * kFloatBytes;
  }

  // Rows that see at most top-k keys score none.
  int64_t whole_index_keys() const {
    if (own_positions_.empty()) return 0;
    const int64_t last = own_positions_.back();
    const int64_t slots = written_elsewhere(Stream::kIndexKeys) +
                          (sparse(last) ? remote_slots(Stream::kIndexKeys, 0, last + 1) : 0);
    return slots * model_.geometry.stream(Stream::kIndexKeys).bytes_per_token;
  }

  const CostModel& model_;
  const CostSpan& span_;
  const int rank_;
  bool wide_ = false;                   // all ranks hold the rows alike; else each row is on one rank
  RowOwners owners_;                    // of owned rows
  std::vector<int64_t> own_positions_;  // rows whose residual this rank holds, ascending
};

CrossedBytes times(const CrossedBytes& bytes, int64_t factor) {
  CrossedBytes out = bytes;
  for (int64_t& value : out.by_kind) value *= factor;
  return out;
}

}  // namespace

Cost layer_cost(const CostModel& model, const CostSpan& span, int rank, bool index_layer) {
  const Share share(model, span, rank);
  Cost cost = share.attention(index_layer, 0);
  cost.crossed[CrossKind::kRows] += share.feed_forward(model.moe_segments);
  return cost;
}

Cost step_cost(const CostModel& model, const CostSpan& span, int rank) {
  const Share share(model, span, rank);
  const Cost indexed = share.attention(true, 0);
  const Cost plain = share.attention(false, 0);
  Cost cost;
  cost.exact = plain.exact && (indexed.exact || model.index_layers() == 0);
  cost.crossed += times(indexed.crossed, model.index_layers());
  cost.crossed += times(plain.crossed, model.layers - model.index_layers() - model.window_layers);
  if (model.window_layers > 0) {
    cost.crossed += times(share.attention(false, model.window).crossed, model.window_layers);
  }
  cost.crossed[CrossKind::kRows] +=
      model.dense_layers * share.feed_forward(model.dense_segments) +
      (model.layers - model.dense_layers) * share.feed_forward(model.moe_segments) + share.head();
  return cost;
}

Cost total_layer_cost(const CostModel& model, const CostSpan& span, bool index_layer) {
  Cost total;
  for (int rank = 0; rank < model.rank_count; ++rank) total += layer_cost(model, span, rank, index_layer);
  return total;
}

Cost total_step_cost(const CostModel& model, const CostSpan& span) {
  Cost total;
  for (int rank = 0; rank < model.rank_count; ++rank) total += step_cost(model, span, rank);
  return total;
}

int64_t step_exchanges(const CostModel& model, std::span<const CostSpan> spans) {
  if (model.rank_count == 1) return 0;
  bool entries = false, split_index = false, head_rows = false;
  int rounds = 0;
  int64_t heads = 0;
  for (const CostSpan& span : spans) {
    entries = entries || span.split != Split::kShared ||
              (splits_cache(span) && span.mechanisms.query == QueryPath::kGathered);
    split_index = split_index || (is_wide(span) && span.index_c > 1);
    rounds = std::max(rounds, partial_rounds(span));
    heads += span.head_rows;
    head_rows = head_rows || (span.head_rows > 0 && !is_wide(span));
  }
  CHECK_LE(heads, kHeadBatch);
  const int64_t entry_layers = entries ? model.layers : (split_index ? model.index_layers() : 0);
  return entry_layers + model.layers * (rounds + 2) + (heads == 0 ? 0 : head_rows ? 2 : 1);
}

Cost prefill_cost(const CostModel& model, CostSpan span, int64_t tokens, int64_t chunk) {
  CHECK_GT(chunk, 0);
  Cost total;
  for (int64_t start = 0; start < tokens; start += chunk) {
    span.start = start;
    span.rows = std::min(chunk, tokens - start);
    span.head_rows = start + span.rows == tokens ? 1 : 0;
    total += total_step_cost(model, span);
  }
  return total;
}

}  // namespace weft::kv
