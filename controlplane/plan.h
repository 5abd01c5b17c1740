// What comes out of the control plane: the plan of the next step, and notices for the shell.
//
// Plan mirrors StepPlan in proto/worker.proto field by field (daemon/plan_codec.* turns one into the other)
// plus the page-table writes that the shell applies to the control arena before it publishes the plan.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "controlplane/event.h"

namespace weft::controlplane {

// Pages of whole blocks of a table, from first_block on: [block][part][rank], kNoPage where a rank does not
// hold the part. Appended beyond what a plan in flight reads, or written to a table that no plan in flight
// names.
struct TableWrite {
  TableId table{};
  uint32_t version = 0;
  int64_t first_block = 0;
  std::vector<PageId> pages;
};

// Of a sequence whose context lies on the host: the host pages of its blocks from first_block on,
// [block][part of the entries]; and with a new table its hot buffer, [page][rank].
struct HostTableWrite {
  TableId table{};
  int64_t first_block = 0;
  std::vector<PageId> pages;
  bool new_table = false;
  std::vector<PageId> hot_pages;
};

struct PageCopy {
  kv::Stream stream{};
  int from_rank = 0;
  PageId from_page{};
  int to_rank = 0;
  PageId to_page{};
  RequestId request{};
};

// A page that a rank copies between its pool and the host pool.
struct HostCopy {
  kv::Stream stream{};
  int rank = 0;
  PageId page{};
  PageId host_page{};
  RequestId request{};  // charged to it; 0: to nobody
};

struct TokenRef {
  StepId step{};
  uint32_t sample_index = 0;
};

struct Span {
  RequestId request{};
  TableId table{};
  uint32_t table_version = 0;
  int64_t start = 0;
  int64_t rows = 0;
  kv::Split split{};
  kv::Grouping grouping;
  int origin = 0;
  int index_c = 1;
  bool index_copied = true;      // false: the keys lie striped over index_c ranks
  int64_t host_blocks = 0;       // the first so many blocks: their entries are read from the host pool
  bool replicate_query = false;  // kv::Mechanisms, where the cache is split
  bool tree_partials = false;
  bool pass_query = false;  // owned rows
  bool copy_context = false;
  bool expand_context = false;
  bool no_write = false;
  bool prefill = false;
  std::vector<uint32_t> tokens;  // literal inputs, drafts last, or empty when has_input_ref
  bool has_input_ref = false;
  TokenRef input_ref;
  int64_t sample_rows = 0;    // the last so many rows draw a token: 0, 1, or all of a decode span
  uint32_t sample_index = 0;  // of the first of them; the others follow
  // Guesses that the draft layers make of what follows the token that the last right row draws. Their cells
  // follow those of the sampled rows.
  int64_t draft_tokens = 0;
  std::vector<uint32_t> next_tokens;  // the prompt's after the span, one for each draft layer at most
  int sampler_rank = 0;
  SamplingParams sampling;
  bool digest = false;
};

struct PaddedRows {
  uint32_t prefill = 0, decode = 0, head = 0;
};

struct Plan {
  StepId step{};
  RankMask ranks = 0;  // that take part; spans count their places in it (kv/topology.h)
  std::vector<TableWrite> table_writes;
  std::vector<HostTableWrite> host_writes;
  std::vector<PageCopy> copies;
  std::vector<HostCopy> spills, loads;
  std::vector<Span> spans;
  PaddedRows padded;
};

enum class FinishReason : uint8_t { kStop, kLength, kCancelled, kError };
const char* finish_reason_name(FinishReason reason);

struct TokenNotice {
  RequestId request{};
  int64_t index = 0;
  uint32_t token = 0;
};

// How many drafts of a step there were, and how many held. Comes before the step's tokens; a span without
// drafts has none.
struct DraftNotice {
  RequestId request{};
  int64_t start = 0;  // position of the span's first row; those of the drafts follow
  int64_t drafted = 0;
  int64_t accepted = 0;
};

// Prompt rows acknowledged so far.
struct PrefillNotice {
  RequestId request{};
  int64_t done = 0;
  int64_t total = 0;
};

// How far the request was, and what it held, just before its pages were given back. Zeros for one that never
// ran.
struct FinishedNotice {
  RequestId request{};
  FinishReason reason{};
  Error error;  // kError
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;    // of the prompt, served by the prefix cache
  int64_t computed_tokens = 0;  // rows acknowledged, cached ones included
  int64_t completion_tokens = 0;
  int64_t drafted_tokens = 0, accepted_tokens = 0;
  kv::StoredBytes stored{};   // of the pages under its rows; blocks shared with others count in full
  bool change_waits = false;  // a regroup was accepted that no plan has applied
};

struct RegroupedNotice {
  uint64_t command = 0;
  RequestId request{};
  std::string before, after;  // "tp, index copied"
  int64_t bytes_moved = 0;    // by the plans that bring it about
  int64_t pages_dropped = 0;
  Error error;  // code kOk when accepted
};

struct PinNotice {
  uint64_t command = 0;
  uint64_t pin = 0;
  Error error;  // code kOk when done
};

// What a request gave up, or got back, for others' sake (pressure.h).
struct PressureNotice {
  enum class What : uint8_t { kThinned, kThickened, kPreempted };
  RequestId request{};
  What what{};
};

// "thinned", "thickened", "preempted"
const char* pressure_name(PressureNotice::What what);

// These ranks take part in the plans from now on: the shell begins an epoch with them before it publishes the
// next one. With an error nothing has changed.
struct TopologyNotice {
  uint64_t command = 0;
  RankMask ranks = 0;
  int64_t bytes_moved = 0;
  int64_t sequences_moved = 0;
  int64_t blocks_moved = 0;    // of the prefix cache, used by nobody
  int64_t blocks_dropped = 0;  // of it, with what hung below them
  Error error;                 // code kOk when done
};

using Notice = std::variant<TokenNotice, DraftNotice, PrefillNotice, FinishedNotice, RegroupedNotice,
                            PinNotice, TopologyNotice, PressureNotice>;

}  // namespace weft::controlplane
