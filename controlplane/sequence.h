// One request inside the control plane, from arrival to its last notice.
//
//   rows:   0 ─ cached ─ computed ─ scheduled ─ prompt ───── row_count
//           computed: acknowledged by all ranks. scheduled: computed or in a plan in flight.
//           Rows of drafts that do not hold are neither; their slots are written again.
//
// Row p takes token p as input; the token after the last prompt row is the first of the answer. An answer of
// max_tokens tokens needs prompt + max_tokens − 1 rows: its last token is never an input.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "controlplane/event.h"
#include "controlplane/memory.h"
#include "controlplane/page_counts.h"
#include "controlplane/placement.h"
#include "controlplane/plan.h"
#include "controlplane/reuse_policy.h"
#include "proto/vocab/clock.h"

namespace weft::controlplane {

struct Sequence {
  // ---- what was asked
  RequestId id{};
  uint64_t order = 0;  // of arrival
  kv::BlockHash root;
  Identities hashes;  // of the full blocks: of the prompt, later of the answer too
  SamplingParams sampling;
  int64_t max_tokens = 0;
  std::vector<uint32_t> stop_tokens;
  GroupingWish wish;
  Speculation speculation;
  bool use_prefix_cache = true;
  bool digest = false;
  int priority = 0;
  std::optional<Time> deadline;
  bool host_context = false;  // its context lies on the host (host_context.h)
  int64_t host_window = 0;    // then: blocks whose entries may be on devices at once
  Time arrived{};

  int64_t likely_blocks = 0;  // that the prefix cache probably has: those of its parent

  // ---- while it waits
  int64_t passed = 0;           // requests that came later and are in
  int64_t prefetched = 0;       // blocks that were loaded ahead, or on devices before: never twice
  uint64_t no_prefetch_at = 0;  // there was nothing to load ahead, or no room, when changes() was this
  uint64_t no_room_at = 0;      // it found no room when Memory::changes() was this; 0: not tried
  bool asked_others = false;    // it was the first in the queue then, and others could not make room

  // ---- how far it is
  TokenList tokens;  // prompt, then the tokens of the answer that are known
  int64_t prompt = 0;
  bool running = false;  // admitted: holds blocks and a reservation
  bool paused = false;
  Time admitted{};
  int64_t cached = 0;
  int64_t computed = 0;
  int64_t scheduled = 0;
  int64_t samples_scheduled = 0;  // those of drafts are taken back when these do not hold
  TokenRef last_sample;           // where the token after the last scheduled row is being sampled
  int64_t replay = 0;  // it gave back its memory, or that was lost: rows up to here are computed again, and
                       // draw nothing
  int64_t drafted = 0, accepted = 0;
  LookupIndex lookup;             // of `text`, where drafts are looked up
  std::vector<uint32_t> text;     // then: the tokens, in one piece
  bool again = false;             // it was let in before
  std::vector<uint32_t> guessed;  // by the draft layers, in the latest step: what may follow `tokens`
  bool repeat_last_row = false;   // full prefix hit: row prompt−1 is recomputed without writing

  // ---- where its bytes are
  Placement placement;            // what its plans say
  std::optional<Placement> next;  // a regroup that its next plan applies; or, if nothing needs_switch:
  int64_t widened = 0;            // … it is spread over plans, and so many blocks have what it wants
  int origin = 0;
  BlockPath blocks;
  int64_t hit_blocks = 0;  // the first blocks came from the prefix cache
  int64_t trusted_blocks =
      0;                    // of these, the first ones were others' when it first came in: not its own work
  int64_t held_blocks = 0;  // the first so many have all the pages that writing() wants
  // Of the hit blocks, those that are only on the host: its first plans load them, and until its first rows
  // are acknowledged their copies are locked.
  int64_t load_first = 0, load_blocks = 0;
  bool registers = true;  // its chain is the registered one so far
  ChainHistory history;   // of the chain it continues, for eviction
  PageCounts reserved;    // pages it may still take

  // ---- of one whose context lies on the host
  std::vector<kv::BlockHash> host_copies;  // of its first blocks, the host blocks: locked
  int64_t sinking = 0;                     // blocks behind them whose spill is in a plan in flight
  int64_t host_promised = 0;               // copies that it may still lock
  HotPages hot;
  int64_t host_table_blocks = 0;  // written to its table
  int64_t host_blocks_count() const { return std::ssize(host_copies); }

  // ---- its page table
  bool needs_switch = true;  // the next plan must write a new table, with copies as needed
  bool has_table = false;
  TableId table{};
  uint32_t table_version = 0;
  int64_t table_blocks = 0;  // entries written
  bool trim = false;         // pages outside the residency are dropped when step trim_step is acknowledged
  StepId trim_step{0};

  // ---- under pressure (pressure.h)
  bool thinned = false;        // runs as thin_wish() of its wish
  bool leaving = false;        // not planned any more; gives back all it has when nothing of it is in flight
  bool owes_progress = false;  // has computed nothing new since it last did: not asked for it again
  int64_t preempted = 0;       // so often it did

  // ---- after an abandoned plan it runs alone until this row is computed; 0: not suspect
  int64_t suspect_until = 0;

  int64_t row_count() const { return prompt + max_tokens - 1; }
  int64_t answered() const { return tokens.size() - prompt; }
  const Placement& target() const { return next ? *next : placement; }
  // It runs under its placement while pages are copied for the next one.
  bool widening() const { return next && !needs_switch; }
  // Where the pages of its next rows are.
  const Placement& writing() const { return needs_switch ? target() : placement; }
  // Rows whose tokens are known before they run: the prompt's, and those computed again.
  int64_t known_rows() const { return std::max(prompt, replay); }
  bool prefilling() const { return scheduled < known_rows(); }
  // Every token that a plan in flight was to draw is known.
  bool settled() const { return samples_scheduled == answered(); }
  bool stops_at(uint32_t token) const {
    return std::find(stop_tokens.begin(), stop_tokens.end(), token) != stop_tokens.end();
  }
  int64_t prompt_left() const { return known_rows() - scheduled; }
  // More urgent, or as urgent and earlier.
  bool before(const Sequence& other) const {
    return priority != other.priority ? priority < other.priority : order < other.order;
  }
  bool runnable() const {
    return running && !paused && !leaving && (prefilling() || samples_scheduled < max_tokens);
  }
};

}  // namespace weft::controlplane
