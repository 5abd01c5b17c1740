// Who owes what to whom at every exchange point of one step: pure arithmetic on the plan, equal on all ranks.
//
// Rows are numbered globally in plan order. A span is *wide* when all W > 1 ranks hold its rows alike (tp,
// dcp); the rows of every other span are *whole*: each on one rank (PCP owner, or the rank of a dp group). A
// rank's home rows are ordered: all wide rows first (the same list on every rank), then its own whole rows.
//
// Outboxes of rank r, by exchange point (floats unless stated; nodes: maximal tree nodes of r's segments):
//
//   kEntries          [dcp rows][heads of r][entry width] in cache dtype
//                     │ int32 [split rows] │ Candidate [split rows][k]
//   kPartials         per dcp span, per other rank `to` of the c-group, ascending:
//                     [rows][heads of `to`][latent + 2]
//   kAttentionSums    [nodes][wide rows][hidden] │ [whole rows of r][hidden], normed
//   kFeedForwardSums  [nodes][all rows][hidden]
//   kHeadRows         [head rows of the batch that r provides][hidden], normed
//   kLogits           [head rows of the batch][vocabulary slice of r]
//
// where dcp rows are the wide rows with c > 1, and split rows the wide rows whose index keys are split.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/layout.h"
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
  int64_t first_dcp = 0;    // wide spans with c > 1: among dcp rows
  int64_t first_split = 0;  // wide spans with a split index: among split rows
  kv::Split split{};
  kv::Grouping grouping;
  int origin = 0;
  int index_c = 1;
  int64_t draft_tokens = 0;
  bool no_write = false;
  bool wide = false;
  bool dcp() const { return wide && grouping.c > 1; }
  bool split_index() const { return wide && index_c > 1; }
  int64_t end() const { return start + rows; }  // positions written when the step is done
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
  // kInvalidArgument for a plan that this build cannot run (a bug of the control plane).
  static Result<StepLayout> make(const wire::StepPlan& plan, int rank_count);

  int rank_count() const { return rank_count_; }
  const std::vector<SpanRoute>& spans() const { return spans_; }
  int64_t row_count() const { return row_count_; }
  int64_t wide_count() const { return wide_count_; }
  int64_t dcp_count() const { return dcp_count_; }
  int64_t split_count() const { return split_count_; }
  const std::vector<HomeRow>& home(int rank) const { return home_[static_cast<size_t>(rank)]; }
  int64_t whole_count(int rank) const { return static_cast<int64_t>(home(rank).size()) - wide_count_; }
  const std::vector<HeadRow>& head_rows() const { return head_rows_; }

  // Which exchange points the step passes; all false for one rank.
  bool passes_copies() const { return rank_count_ > 1 && has_copies_; }
  bool passes_entries(Indexer indexer) const;
  bool passes_partials() const { return dcp_count_ > 0; }
  bool passes_sums() const { return rank_count_ > 1; }
  bool passes_logits() const { return rank_count_ > 1; }
  // The closed formula of the number of exchange points.
  int64_t exchange_count(const ModelConfig& config) const;

 private:
  int64_t draft_exchange_count(const ModelConfig& config) const;
  int rank_count_ = 1;
  std::vector<SpanRoute> spans_;
  std::vector<std::vector<HomeRow>> home_;
  std::vector<HeadRow> head_rows_;
  int64_t row_count_ = 0, wide_count_ = 0, dcp_count_ = 0, split_count_ = 0;
  bool has_owned_ = false, has_copies_ = false;
};

// Row `row` of a span as one whose logits are wanted.
HeadRow head_row(const SpanRoute& span, int64_t row, int sampler, int rank_count);
// Whether the hidden states of a batch of them have to travel.
bool passes_head_rows(std::span<const HeadRow> batch);

// The members of rank's group of c ranks: [first, first + c).
constexpr int group_first(int rank, int c) { return rank / c * c; }

// Output columns of the head that rank r computes: whole panels of 16.
kv::Range vocabulary_slice(int64_t vocabulary, int rank, int rank_count);

// Byte offsets inside an outbox of kEntries.
struct EntriesOutbox {
  size_t queries = 0, counts = 0, candidates = 0, bytes = 0;
};
EntriesOutbox entries_outbox(const StepLayout& layout, const ModelConfig& config, DType cache_dtype,
                             int from);

// Offset in floats of the partials that `from` sends to `to` for a dcp span, in from's outbox of kPartials.
size_t partials_offset(const StepLayout& layout, const ModelConfig& config, const SpanRoute& span, int from,
                       int to);

}  // namespace weft::worker
