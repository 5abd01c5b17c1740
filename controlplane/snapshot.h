// What the control plane tells about itself: plain values for status, explain and tests.
//
// Copies of the moment they were asked for; nothing here changes or refers to the control plane.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "controlplane/event.h"
#include "controlplane/page_counts.h"
#include "controlplane/placement.h"
#include "proto/vocab/clock.h"

namespace weft::controlplane {

enum class RequestState : uint8_t { kWaiting, kPrefill, kDecode };
const char* request_state_name(RequestState state);

struct RequestSnapshot {
  RequestId request{};
  RequestState state{};
  bool paused = false;
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t computed_tokens = 0;  // rows acknowledged, cached ones included
  int64_t completion_tokens = 0;
  int64_t max_tokens = 0;
  int64_t drafted_tokens = 0, accepted_tokens = 0;
  GroupingWish wish;    // what was asked, as regrouped since
  Placement placement;  // how it runs; meaningless while waiting
  int origin = 0;
  bool host_context = false;  // its context lies on the host
  int64_t host_window = 0;    // then: blocks whose entries may be on devices at once
  int64_t host_blocks = 0;    // of it, so far
  bool switching = false;     // a regroup waits for the next plan or its acknowledgement
  bool change_waits = false;  // it waits for the next plan
  bool thinned = false;       // runs with fewer copies than wished for
  int64_t preempted = 0;      // so often it gave back its room
  Time arrived{}, admitted{};
  // Bytes of the pages under its rows, [stream][rank]; blocks shared with others count in full.
  kv::StoredBytes stored_bytes{};
};

struct PinSnapshot {
  uint64_t pin = 0;
  RequestId request{};
  int64_t blocks = 0;
  int64_t host_blocks = 0;  // behind them, which only the host has
  Time since{};
};

// The end of a context: all that the identities of what comes behind it depend on.
struct ContextTail {
  int64_t tokens = 0;          // prompt and answer
  int64_t blocks = 0;          // whose identities are known
  kv::BlockHash last;          // the last one of them, or the namespace
  kv::BlockHash root;          // the namespace
  std::vector<uint32_t> rest;  // the tokens behind those blocks
};

struct Counters {
  int64_t plans = 0;
  int64_t prompt_tokens = 0;  // of admitted requests
  int64_t cached_tokens = 0;  // of them, served by the prefix cache
  int64_t computed_prompt_tokens = 0;
  int64_t generated_tokens = 0;
  int64_t drafted_tokens = 0, accepted_tokens = 0;
  int64_t finished = 0, failed = 0, cancelled = 0, refused = 0;
  int64_t abandoned_plans = 0;
  int64_t duplicate_acknowledgements = 0;  // of a rank that had acknowledged the step already
  int64_t late_acknowledgements = 0;       // of a step that is not in flight
  int64_t evicted_blocks = 0;
  int64_t topology_changes = 0;
  int64_t lost_blocks = 0;      // of which something lay in lost memory alone
  int64_t replayed_rows = 0;    // computed again: because of it, or by those who were preempted
  int64_t host_hit_tokens = 0;  // of cached_tokens, those that only the host had
  int64_t spilled_bytes = 0, loaded_bytes = 0;
  int64_t host_contexts = 0;  // that run now
  int64_t passes = 0;         // requests that came in before an earlier one which found no room
  int64_t thinned = 0, thickened = 0, preempted = 0;
  int64_t thinned_now = 0;  // running requests
};

}  // namespace weft::controlplane
