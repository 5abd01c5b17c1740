// What comes into the control plane. Everything it knows arrives as one of these, in order.
//
// Plain values, checked by the shell for syntax and ranges; what only the control plane can know (room, the
// model's context) it checks itself. Lengths and counts are tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "controlplane/speculation.h"
#include "kv/block_hash.h"
#include "kv/layout.h"
#include "kv/mechanisms.h"
#include "proto/vocab/clock.h"
#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"

namespace weft::controlplane {

struct SamplingParams {
  float temperature = 0;  // 0: greedy
  uint32_t top_k = 0;     // 0: off
  float top_p = 1;        // 1: off
  uint64_t seed = 0;
};

// How a request (or the default) wants to be run.
struct GroupingWish {
  kv::Split prefill = kv::Split::kZigzag;
  kv::DecodeWish decode;
  kv::IndexWish index;
  kv::Mechanisms mechanisms = {};
  friend bool operator==(const GroupingWish&, const GroupingWish&) = default;
};

// Where the entries of a request's full blocks lie (host_context.h). kAuto: on the host if they do not fit
// the device pools.
enum class ContextPlace : uint8_t { kAuto, kDevice, kHost };
Result<ContextPlace> parse_context_place(const std::string& text);  // "auto", "device", "host"

struct RequestArrived {
  RequestId request{};
  // An ended request whose context this one goes on from (ControlPlane::context()); 0: none. Unknown ones are
  // refused.
  RequestId parent{0};
  std::vector<uint32_t> prompt;  // at least one token; what comes behind the parent's context
  kv::BlockHash root;            // namespace of its blocks
  std::vector<kv::BlockHash>
      hashes;  // of the full blocks in order (kv/block_hash.h), from the first that the parent lacks
  SamplingParams sampling;
  int64_t max_tokens = 16;
  std::vector<uint32_t> stop_tokens;  // empty with ignore_eos
  GroupingWish grouping;
  Speculation speculation;
  bool use_prefix_cache = true;
  ContextPlace context = ContextPlace::kAuto;
  bool digest = false;  // of the logits of every row that is computed; those of a prefix hit are not
  int priority = 0;     // smaller is more urgent
  std::optional<Duration> deadline = {};  // from now; a request that has not ended by then ends with an error
};

struct CancelRequested {
  RequestId request{};
};

// A stream's buffer is full (or has room again): the request is not scheduled meanwhile.
struct PauseChanged {
  RequestId request{};
  bool paused = false;
};

struct Sample {
  RequestId request{};
  uint32_t sample_index = 0;
  uint32_t token = 0;
  bool not_finite = false;
};

// One rank has finished one step (of whichever attempt). Duplicates are ignored.
struct StepAcknowledged {
  StepId step{};
  int rank = 0;
  std::vector<Sample> samples;
};

// The plans in flight were lost too often as they are (daemon/flights.h). They will not be run; their
// sequences are to be retried one at a time, and one that fails again alone ends with an error.
struct PlansAbandoned {};

// Change the grouping of one running request. Answered by a RegroupedNotice with the same command number.
struct RegroupRequested {
  uint64_t command = 0;
  RequestId request{};
  bool has_prefill = false, has_decode = false, has_index = false;
  GroupingWish wish;  // only the fields marked
  bool dry_run = false;
  std::string mechanisms = {};  // those that change (kv::parse_mechanisms); checked by the shell
};

// Keep the context of a request, running or ended, in the prefix cache as far as it is there now. Answered by
// a PinNotice with the same command number, as is the end of a pin.
struct PinRequested {
  uint64_t command = 0;
  RequestId request{};
};
struct UnpinRequested {
  uint64_t command = 0;
  uint64_t pin = 0;
};

// A rank begins to take part in steps, or stops. Answered by a TopologyNotice with the same command number,
// when everything has moved or nothing has changed.
struct TopologyRequested {
  uint64_t command = 0;
  int rank = 0;
  bool joins = false;
  // It leaves and has left already: the shell has dropped the plans in flight, a change under way ends, and
  // the others move its blocks.
  bool gone = false;
};

// What lay in a rank's pool is gone. The shell drops the plans in flight, too: they will not be run. Blocks
// that lie nowhere else are computed again, by the requests that need them.
struct MemoryLost {
  int rank = 0;
};

using Event = std::variant<RequestArrived, CancelRequested, PauseChanged, StepAcknowledged, PlansAbandoned,
                           RegroupRequested, PinRequested, UnpinRequested, TopologyRequested, MemoryLost>;

}  // namespace weft::controlplane
