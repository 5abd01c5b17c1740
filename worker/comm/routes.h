// Who owes what to whom at every exchange point of one step: pure arithmetic on the plan, equal on all ranks.
//
// Rows are numbered globally in plan order. A span is *wide* when a group of several ranks computes its
// attention (tp, dcp, and groups of several ranks beside each other); its residual is on every rank. The rows
// of every other span are *whole*: each on one rank (PCP owner, or the rank of dp). A rank's home rows are
// ordered: all wide rows first, group by group (the same list on every rank), then its own whole rows.
//
// Outboxes of rank r, by exchange point (floats unless stated; nodes: maximal tree nodes of r's segments in
// the group; spans and rows of groups that r is not in are left out):
//
//   kEntries          per span: if it gathers queries, [rows][heads of r][key width] in the dtype of queries;
//   if
//                     it passes them, [rows of r][all heads][key width]
//                     │ OfferHead [split rows] │ float [split rows][k] │ int32 [split rows][k]:
//                     offers of index keys (kernels/split_top_k.h), scores and positions
//   kPartials         once, or in rounds: per dcp span, per member of the c-group whose heads r sends in this
//                     round, ascending: [rows][heads of the member][latent + 2]; then, in the first round,
//                     per span that passes queries, per other owner, per part that r reads for it: [its rows]
//                     [heads of the part][latent + 2]
//   kAttentionSums    per group: [nodes][rows of the group][hidden] │ [whole rows of r][hidden], normed
//   kFeedForwardSums  [nodes][all rows][hidden], of the group of all ranks
//   kHeadRows         [head rows of the batch that r provides][hidden], normed
//   kLogits           [head rows of the batch][vocabulary slice of r]
//
// where dcp spans are the wide ones with c > 1, and split rows the wide rows whose index keys are scored in
// parts (of all groups, on every rank).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/layout.h"
#include "kv/mechanisms.h"
#include "kv/row_split.h"
#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"
#include "proto/worker.pb.h"
#include "worker/comm/exchange.h"
#include "worker/model/config.h"

namespace weft::worker {

// Head rows (rows whose logits are wanted) go through the last two exchange points this many at a time.
inline constexpr int64_t kHeadBatch = 64;

struct SpanRoute {
  int index = 0;  // in the plan
  uint64_t request = 0;
  TableId table{};
  int64_t start = 0, rows = 0;
  int64_t first_row = 0;    // global number of the first row
  int64_t first_wide = 0;   // wide spans: index of the first row among wide rows
  int64_t first_split = 0;  // wide spans with an index in parts: among split rows
  kv::Split split{};
  kv::RowOwners owners;  // of owned rows
  kv::Grouping grouping;
  int origin = 0;
  int index_c = 1;
  int64_t host_blocks = 0;  // the first so many blocks: entries lie in the host pool alone
  bool prefill = false;
  int64_t draft_tokens = 0;
  uint64_t seed = 0;  // of the request's sampling
  bool replicate_query = false;
  bool tree_partials = false;
  bool pass_query = false;
  bool copy_context = false;
  bool expand_context = false;
  bool no_write = false;
  bool wide = false;
  bool dcp() const { return wide && grouping.c > 1; }
  bool gathers_query() const { return dcp() && !replicate_query; }
  bool split_index() const { return wide && index_c > 1; }
  int64_t end() const { return start + rows; }  // positions written when the step is done
};

// Consecutive wide rows of one group of ranks, in the order of home rows.
struct WideGroup {
  kv::Grouping ranks;  // its c means nothing: spans of several c share a group
  int64_t first = 0, rows = 0;
};

struct HomeRow {
  int span = 0;
  int64_t row = 0;  // within the span
  int64_t position = 0;
  int64_t global = 0;
};

struct HeadRow {
  int span = 0;
  int64_t global = 0;
  int64_t position = 0;
  int provider = 0;     // the rank that publishes it; any rank of a wide row has it
  int sampler = 0;      // the rank that receives the whole row of logits
  int64_t sample = -1;  // token table cell of what it draws; −1: it draws nothing
  bool digest = false;
};

class StepLayout {
 public:
  // index_topk: of the model; 0 without an indexer. kInvalidArgument for a plan that this build cannot run (a
  // bug of the control plane).
  static Result<StepLayout> make(const wire::StepPlan& plan, int64_t index_topk, int rank_count);

  int rank_count() const { return rank_count_; }
  const std::vector<SpanRoute>& spans() const { return spans_; }
  int64_t row_count() const { return row_count_; }
  int64_t wide_count() const { return wide_count_; }
  const std::vector<WideGroup>& wide_groups() const { return wide_groups_; }
  // Wide spans in the order of home rows.
  const std::vector<int>& wide_spans() const { return wide_spans_; }
  int64_t split_count() const { return split_count_; }
  const std::vector<HomeRow>& home(int rank) const { return home_[static_cast<size_t>(rank)]; }
  // Home rows of an owned span on its owner, as a range of home(rank).
  kv::Range owned_rows(const SpanRoute& span, int rank) const;
  int64_t whole_count(int rank) const { return static_cast<int64_t>(home(rank).size()) - wide_count_; }
  const std::vector<HeadRow>& head_rows() const { return head_rows_; }

  // Which exchange points the step passes; all false for one rank.
  bool passes_copies() const { return rank_count_ > 1 && has_copies_; }
  bool passes_entries(Indexer indexer) const;
  int partial_rounds() const { return partial_rounds_; }  // kPartials, per layer
  bool passes_sums() const { return rank_count_ > 1; }
  bool passes_logits() const { return rank_count_ > 1; }
  // The closed formula of the number of exchange points.
  int64_t exchange_count(const ModelConfig& config) const;

 private:
  int64_t draft_exchange_count(const ModelConfig& config) const;
  void add_wide(SpanRoute& span);

  int rank_count_ = 1;
  std::vector<SpanRoute> spans_;
  std::vector<std::vector<HomeRow>> home_;
  std::vector<HeadRow> head_rows_;
  std::vector<WideGroup> wide_groups_;
  std::vector<int> wide_spans_;
  int64_t row_count_ = 0, wide_count_ = 0, split_count_ = 0;
  int partial_rounds_ = 0;
  bool has_owned_ = false, has_gathered_ = false, has_copies_ = false;
};

// Row `row` of a span as one whose logits are wanted.
HeadRow head_row(const SpanRoute& span, int64_t row, int sampler, int rank_count);
// Whether the hidden states of a batch of them have to travel.
bool passes_head_rows(std::span<const HeadRow> batch);

// The members of rank's group of c ranks: [first, first + c).
constexpr int group_first(int rank, int c) { return rank / c * c; }
// The residue class that a member of a dcp span's group holds.
inline int class_of(const SpanRoute& span, int rank) {
  return kv::owned_class(rank % span.grouping.c, span.origin, span.grouping.c);
}

// Output columns of the head that rank r computes: whole panels of 16.
kv::Range vocabulary_slice(int64_t vocabulary, int rank, int rank_count);

// Byte offsets inside an outbox of kEntries.
struct EntriesOutbox {
  size_t heads = 0, scores = 0, positions = 0, bytes = 0;
};
EntriesOutbox entries_outbox(const StepLayout& layout, const ModelConfig& config, DType query_dtype,
                             int from);

// Byte offsets of the queries of spans that gather or pass them, by span, in from's outbox of kEntries.
std::vector<size_t> queries_offsets(const StepLayout& layout, const ModelConfig& config, DType query_dtype,
                                    int from);

// Whether `from` sends the partials of `member`'s heads in a round of kPartials. All to all: in round 0,
// unless it is the member. Tree: the classes of both differ in bit (log2 c − 1 − round), and above it not;
// they go to the rank whose class differs from from's in that bit alone.
bool sends_partials(const SpanRoute& span, int from, int member, int round);
// Where what `from` sends in a round lies in its outbox. Made once and asked often: by the number of spans.
class PartialsMap {
 public:
  PartialsMap(const StepLayout& layout, const ModelConfig& config, int from, int round);
  // In floats; CHECKs that it is sent.
  size_t offset(const SpanRoute& span, int member) const;
  size_t floats() const { return floats_; }  // of all

 private:
  size_t ranks_;
  std::vector<int64_t> offset_;  // by span and member; −1: not sent
  size_t floats_ = 0;
};

// Whether `reader` computes partials of a part for the rows that `owner` has of a span that passes queries:
// of its own residue class.
bool reads_for(const SpanRoute& span, const ModelConfig& config, int rank_count, int reader, int owner,
               int64_t part);
// What `reader` sends to the owners of spans that pass queries, in the order of its outbox of the first
// kPartials.
struct PassedPartials {
  int span = 0, owner = 0;
  int64_t part = 0;
  size_t offset = 0;  // in floats
};
std::vector<PassedPartials> passed_partials(const StepLayout& layout, const ModelConfig& config, int reader);

// Rows of `hidden` floats before the sums of a wide group in from's outbox of kAttentionSums; of the number
// of groups: before its whole rows.
int64_t attention_sums_row(const StepLayout& layout, int from, size_t group);

}  // namespace weft::worker
