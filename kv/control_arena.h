// The control arena: what the daemon tells workers without a copy, and what they report.
//
// One memfd, mapped by the daemon and every worker:
//
//   header │ rank state × W │ exchange flag × W │ token table │ plan ring │ result ring × W │ table versions
//   │ page tables │ host tables
//
// Plans are published by the daemon into a ring of kPlanCells; each worker reads all of them in order. A plan
// names page tables by id; the daemon writes table entries before it publishes the plan that reads them, and
// never changes an entry that a plan in flight may read. Sampled tokens go into the token table, tagged with
// their step, where the next plan may read them before the daemon has seen them. Table entries are zero until
// written.
//
// Single writer for every word: the daemon for header, plans and tables; rank r for its state, its exchange
// flag, its result ring and the token cells it samples. The exceptions are bells: words that anyone bumps to
// wake sleepers. A waiter reads the bell, looks for what it waits for, and sleeps only while the bell is as
// it was read; so no wake is lost, and an abort ends every wait at once.
//
// Numbers of plans and results run over 2^32 and are compared by difference. All functions may be called from
// any thread of the side they name. Broken use by our own code is CHECKed; what a crashed worker may have
// left behind never fails a CHECK of the daemon.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "kv/layout.h"
#include "kv/shared_memory.h"
#include "proto/vocab/ids.h"

namespace weft::kv {

inline constexpr uint32_t kControlMagic = 0x57454654;  // "WEFT"
inline constexpr uint32_t kControlVersion = 3;
inline constexpr int kPlanCells = 4;  // at most two plans are in flight
inline constexpr int kResultCells = 8;
inline constexpr int kTokenSteps = 8;  // steps whose sampled tokens stay readable

struct ControlLimits {
  int rank_count = 0;
  int64_t block_tokens = 0;
  int64_t parts = 0;  // of a block (CacheGeometry::parts)
  int64_t table_count = 0;
  int64_t table_blocks = 0;      // blocks per table: ceil(max context / P)
  int64_t host_parts = 0;        // of a block, that may lie in the host pool alone; 0: no host tables
  int64_t hot_pages = 0;         // of a sequence's hot buffer on one rank, at most
  int64_t max_samples = 0;       // sampled rows per step
  int64_t plan_bytes_max = 0;    // one serialised StepPlan
  int64_t result_bytes_max = 0;  // one serialised StepResult
};
// kInvalidArgument names the field that is out of range.
Result<void> validate(const ControlLimits& limits);
size_t control_arena_bytes(const ControlLimits& limits);  // of valid ones

// What rank r is doing, for the supervisor and for naming a missing rank. Cache-line sized.
struct alignas(64) RankState {
  std::atomic<uint32_t> heartbeat;        // +1 at least every 200 ms while idle, and at every progress
  std::atomic<uint32_t> step_low;         // low half of the step being run; 0 idle
  std::atomic<uint32_t> layer;            // layer being run
  std::atomic<uint32_t> exchange;         // exchange points passed in this epoch
  std::atomic<uint32_t> waiting_for;      // mask of ranks it waits for at an exchange point; 0 computing
  std::atomic<uint32_t> results_written;  // futex word: results published in this arena's life
  std::atomic<uint32_t> results_read;     // by the daemon
  std::atomic<uint32_t> plans_read;       // plans below this number are no longer needed by this rank
};

// What rank r has published, for worker/comm/exchange.h: epoch tag and exchange number in one word.
struct alignas(64) ExchangeFlag {
  std::atomic<uint32_t> published;
};

// Where ranks sleep until the last one arrives at an exchange point.
struct ExchangeBell {
  alignas(64) std::atomic<uint32_t> rings;     // futex word
  alignas(64) std::atomic<uint32_t> sleepers;  // mask of ranks; each sets and clears its own bit
};

class ControlArena {
 public:
  // The daemon's side: formats a zeroed mapping. The workers': checks magic, version and size.
  // kInvalidArgument: limits out of range, or the mapping is too small; kBadMessage: not a control arena.
  static Result<ControlArena> format(Mapping mapping, const ControlLimits& limits);
  static Result<ControlArena> open(Mapping mapping);

  const ControlLimits& limits() const { return limits_; }

  // ---- abort: every wait of epoch e polls this; true once the daemon gave the epoch up.
  void abort_epoch(Epoch epoch);  // daemon; wakes plan waiters and exchange waiters
  bool aborted(Epoch epoch) const;
  const std::atomic<uint32_t>& abort_word() const;

  // ---- plan ring. sequence numbers count published plans from 0 over the arena's life.
  uint32_t plans_published() const;
  // Daemon. CHECKs size and that no reader can still need the cell: every rank that takes part has read plan
  // `sequence − kPlanCells`, or that plan's epoch was aborted.
  void publish_plan(Epoch epoch, std::span<const std::byte> plan);
  // Daemon: the ranks that take part from the coming epoch on; at first all.
  void set_readers(RankMask ranks) { readers_ = ranks; }
  struct PlanView {
    Epoch epoch{};
    std::span<const std::byte> bytes;
  };
  // Worker: waits for plan number `sequence`, at most `timeout`; empty on timeout or abort of `epoch`. The
  // view holds until plan_read() says that this rank needs no plan below `next`.
  std::optional<PlanView> wait_plan(uint32_t sequence, Epoch epoch, Duration timeout) const;
  void plan_read(int rank, uint32_t next);

  // ---- results. Worker: false if the ring stays full for `timeout` (the daemon is gone or stuck).
  bool publish_result(int rank, std::span<const std::byte> result, Duration timeout);
  // Daemon: the next unread result of a rank, if any; consumed. Empty bytes: the rank left its ring in a
  // state that cannot be; whatever was in it is skipped.
  std::optional<std::vector<std::byte>> take_result(int rank);

  // ---- tokens. An entry is (low 32 bits of the step, token) in one atomic word.
  void write_token(StepId step, uint32_t sample_index, uint32_t token);
  // Empty until the token of that very step is there.
  std::optional<uint32_t> read_token(StepId step, uint32_t sample_index) const;
  // Waits for it; empty on abort or timeout.
  std::optional<uint32_t> wait_token(StepId step, uint32_t sample_index, Epoch epoch, Duration timeout) const;

  // ---- page tables: [table][block][part][rank]; kNoPage where a rank does not hold the part.
  // Daemon: the pages of whole blocks, from first_block on.
  void write_table(TableId id, int64_t first_block, std::span<const PageId> pages);
  // Worker: the pages of one part of a block, by rank.
  std::span<const PageId> pages(TableId id, int64_t block, int part) const;
  // Of sequences whose entries lie in the host pool: [table]: [block][part], then [hot page][rank]. As above.
  void write_host_table(TableId id, int64_t first_block, std::span<const PageId> pages);
  PageId host_page(TableId id, int64_t block, int part) const;
  // Pages of each rank's pool that make up its hot buffer; [hot page][rank], kNoPage where it has fewer.
  void write_hot_pages(TableId id, std::span<const PageId> pages);
  std::vector<PageId> hot_pages(TableId id, int rank) const;
  void set_table_version(TableId id, uint32_t version);
  uint32_t table_version(TableId id) const;

  RankState& rank_state(int rank);
  const RankState& rank_state(int rank) const;

  // ---- exchange points
  ExchangeFlag& exchange_flag(int rank);
  ExchangeBell& exchange_bell();
  void ring_exchange_bell();  // after a change of the caller's flag that sleepers may wait for

 private:
  struct Header;
  struct PlanCell;
  struct ResultCell;
  // Byte offsets of the parts, a function of the limits.
  struct Layout {
    explicit Layout(const ControlLimits& limits);
    size_t states, flags, tokens, plans, plan_stride, results, result_stride, versions, tables, block_pages,
        host_tables, host_table_pages, total;
  };
  friend size_t control_arena_bytes(const ControlLimits& limits);

  ControlArena(Mapping mapping, const ControlLimits& limits);
  Header* header() const;
  PlanCell* plan_cell(uint32_t sequence) const;
  ResultCell* result_cell(int rank, uint32_t number) const;
  std::atomic<uint64_t>& token_word(StepId step, uint32_t sample_index) const;
  std::atomic<uint32_t>& version_word(TableId id) const;
  PageId* table_data(TableId id, int64_t block) const;
  PageId* host_table(TableId id) const;

  Mapping mapping_;
  ControlLimits limits_;
  Layout layout_;
  RankMask readers_;
};

}  // namespace weft::kv
