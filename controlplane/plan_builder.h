// Builds the plan of one step, sequence by sequence.
//
// Each add_* either adds one span (and whatever table writes and copies it needs) or leaves plan and sequence
// as they are, save for pages already taken out of the sequence's reservation, and loaded from the host. The
// order of calls is the scheduler's policy; the limits of a step (rows, samples, copies) are kept here.
#pragma once

#include "controlplane/in_flight.h"
#include "controlplane/memory.h"
#include "controlplane/plan.h"
#include "controlplane/prefetch.h"
#include "controlplane/sequence.h"
#include "controlplane/table_pool.h"

namespace weft::controlplane {

class PlanBuilder {
 public:
  // `spans`: about how many there will be.
  PlanBuilder(Memory& memory, TablePool& tables, StepId step, int64_t spans);

  // How many rows of the step may be drafts; none before this is called.
  void allow_drafts(int64_t rows) { drafts_left_ = rows; }
  // The row of the last token, and drafts behind it; each samples. False if a page it needs is still in
  // flight, a limit is reached, or drafts need tokens that are not known yet.
  bool add_decode(Sequence& sequence);
  // As many rows of the prompt as `most`, the step's budget and the free pages allow.
  bool add_prefill(Sequence& sequence, int64_t most);

  // ---- plans that only copy, for a change of the ranks that compute (topology_change.h)
  // What the sequence's target residency lacks. False, and nothing changes but pages that were taken: the
  // plan is full.
  bool add_move(Sequence& sequence);
  // What of a block of the prefix cache lies on none of these ranks, to the first of them with a free page,
  // counted from place `first`.
  enum class Stray : uint8_t { kMoved, kPlanFull, kNoRoom };
  Stray add_stray(Block& block, const kv::Topology& ranks, int first);
  int64_t copied_bytes() const;

  // Loads blocks for a request that waits: those behind a match, from `first` on, as far as room beyond all
  // reservations and the plan's limits go. No hashes: none.
  Prefetch prefetch(const Sequence& waiting, const PrefixCache::Match& found, const kv::Residency& residency,
                    int origin);
  bool copies() const { return !plan_.copies.empty() || !plan_.loads.empty(); }
  // Sends to the host what can go there of a sequence whose context lies there. Before its rows are added: it
  // may have room for them only then.
  void sink(Sequence& sequence);
  // What goes to the host beside it, when all else is in the plan; `ahead`: also what nobody waits for.
  void add_spills(bool ahead = true);

  bool empty() const {
    return plan_.spans.empty() && plan_.copies.empty() && plan_.loads.empty() && plan_.spills.empty();
  }
  int64_t rows_left() const { return rows_left_; }
  // Fills in what depends on the whole plan. The builder is used up.
  Plan finish();
  PlanRecord& record() { return record_; }

 private:
  bool load(Sequence& sequence);
  struct Load {
    RequestId request{};
    kv::BlockHash hash;
    BlockId block{};
    const kv::Residency& residency;
  };
  enum class Loaded : uint8_t { kPlanned, kPlanFull, kNoPage };
  Loaded load(const Load& what, PageCounts& reserved);
  int64_t hold_rows(Sequence& sequence, int64_t rows);
  bool is_wide(Sequence& sequence) const;
  void widen(Sequence& sequence);
  bool hold_switch(Sequence& sequence);
  bool hold_target(Sequence& sequence);
  int64_t copies_needed(const Sequence& sequence) const;
  void apply_switch(Sequence& sequence);
  void switch_part(Sequence& sequence, Block& block, int part);
  void fill_part(const Sequence& sequence, Block& block, int part, RankMask wanted);
  void copy_pages(RequestId charged, Block& block, int part, RankMask to);
  void set_valid(Block& block, int part, int rank, bool valid);
  void write_table(Sequence& sequence, int64_t rows);
  void write_host_table(Sequence& sequence);
  PageCounts hot_pages(const Sequence& sequence, const kv::Residency& residency) const;
  bool window_has_room(const Sequence& sequence, int64_t block) const;
  // A block's part of a table: for each part, the page of each rank.
  void write_entries(const Sequence& sequence, const Block& block, PageId* to) const;
  // Guesses worth asking the draft layer for, behind a span of so many rows whose pages are held.
  int64_t hold_guesses(Sequence& sequence, int64_t rows, int64_t samples, int64_t most);
  // `drafts`: inputs of the last rows.
  void add_span(Sequence& sequence, int64_t rows, bool prefill, std::vector<uint32_t> drafts,
                int64_t guesses);

  Memory& memory_;
  TablePool& tables_;
  const Limits& limits_;
  Plan plan_;
  PlanRecord record_;
  int64_t rows_left_ = 0;
  int64_t loads_left_ = 0, load_bytes_left_ = 0;
  int64_t copy_bytes_left_ = 0;
  int64_t samples_left_ = 0;
  int64_t drafts_left_ = 0;
  int64_t block_tokens_ = 0;
};

// 0, 1, 2, 4, 8, …: the short list that padded row counts come from.
uint32_t padded_rows(int64_t rows);

}  // namespace weft::controlplane
