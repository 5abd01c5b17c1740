// What the daemon remembers of each request beside the control plane: times, steps, bytes, how it ended.
//
// Fed by the engine; read for replies, status and explain. Keeps running requests and the last kFinishedKept
// finished ones. No clock: times are passed in. Loop thread only.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "controlplane/plan.h"
#include "kv/meter.h"
#include "proto/client.pb.h"
#include "proto/control.pb.h"
#include "proto/vocab/clock.h"
#include "proto/vocab/ids.h"

namespace weft::daemon {

using kv::StoredBytes;

// How rows of a request ran.
struct RanUnder {
  kv::Grouping grouping;
  int index_c = 1;
  bool index_copied = true;
  kv::Mechanisms mechanisms;
  int places = 0;  // ranks that took part; 0: all there are
  friend bool operator==(const RanUnder&, const RanUnder&) = default;
};
RanUnder ran_under(const controlplane::Span& span, int places);
// "dcp(4)", "copied(2)". The rank of dp is left out.
std::string decode_name_of(const RanUnder& ran);
std::string index_name_of(const RanUnder& ran);

// Decoding under one grouping, until another follows.
struct DecodePhase {
  RanUnder ran;
  Time began{};  // the end of the step before
  int64_t steps = 0, tokens = 0;
  int64_t step_ns = 0;  // its latest step
  int64_t gap_ns = 0;   // between a step and the one before, mean of the ranks; of all its steps
  kv::CrossedBytes crossed;
};

struct RequestRecord {
  RequestId id{};
  controlplane::GroupingWish wish;
  controlplane::DraftSource drafts = controlplane::DraftSource::kOff;
  int priority = 0;
  int64_t drafted_tokens = 0, accepted_tokens = 0;
  int64_t prompt_tokens = 0, max_tokens = 0, completion_tokens = 0;
  int64_t cached_tokens = 0, computed_tokens = 0;  // when it ended
  Time arrived{};
  std::optional<Time> first_planned, first_token, ended;
  int64_t prefill_steps = 0;
  std::vector<kv::Split> prefill_ran;  // splits of its prefill steps, in order of their first use
  kv::CrossedBytes prefill_crossed;
  std::vector<DecodePhase> decodes;  // in order; the first token comes from prefill
  std::optional<RanUnder> last_ran;  // in its latest step
  std::optional<Time> last_decoded;  // end of its latest decode step
  int64_t switch_gap_ns = 0;         // before its first decode step
  int64_t switch_bytes = 0;   // copies between the last prefill step and the end of the first decode step
  int64_t regroup_bytes = 0;  // copies for it, all told
  int64_t regroups = 0;       // changes between two of its steps
  bool host_context = false;  // a step read its context from the host
  int64_t hot_hits = 0, hot_misses = 0;
  StoredBytes stored{};       // when it ended
  bool change_waits = false;  // when it ended: a change that was accepted never came into a step
  std::string outcome;        // finish_reason_name; empty while it runs
  std::string failure;        // why, where the outcome is an error
};

class RequestBook {
 public:
  static constexpr size_t kFinishedKept = 256;

  RequestRecord& add(RequestRecord record);
  RequestRecord* find(RequestId id);  // running or finished
  const RequestRecord* find(RequestId id) const { return const_cast<RequestBook*>(this)->find(id); }
  void finish(RequestId id, const controlplane::FinishedNotice& notice, Time now);

  // A plan is given out: queueing ends with the first, and steps are counted.
  void planned(const controlplane::Plan& plan, Time now);
  // Bytes that a step moved into all ranks together, for one span and its copies. Before step_done.
  void crossed(const controlplane::Span& span, const kv::CrossedBytes& bytes);
  // Entries on the host that its decode rows chose: found in the hot buffer, and not.
  void chosen(const controlplane::Span& span, int64_t hits, int64_t misses);
  // The same of copies in a step that had no span for it.
  void moved(RequestId request, const kv::CrossedBytes& bytes);
  // How many ranks take part in the plans from now on.
  void set_places(int places) { places_ = places; }
  // `gap`: how long the ranks had nothing to do before it, on average.
  void step_done(const controlplane::Plan& plan, Duration took, Time now, Duration gap = {});
  // How the drafts of the step just done fared.
  void drafts(const controlplane::DraftNotice& notice);
  // A token that the step just done gave out.
  void token(const controlplane::TokenNotice& notice, Time now);

  const std::map<RequestId, RequestRecord>& running() const { return running_; }
  const std::deque<RequestRecord>& finished() const { return finished_; }  // oldest first

 private:
  std::map<RequestId, RequestRecord> running_;
  std::deque<RequestRecord> finished_;
  int places_ = 0;
};

void fill_crossed(const kv::CrossedBytes& from, wire::Crossed* to);
void fill_stored(const StoredBytes& from, int rank_count,
                 google::protobuf::RepeatedPtrField<wire::RankStored>* to);
// Prompt tokens that were computed for it, of the rows it has.
int64_t computed_of_prompt(const RequestRecord& record);
// Times of phases that are not over count up to `now`.
void fill_trace(const RequestRecord& record, const StoredBytes& stored, bool change_waits, int rank_count,
                Time now, wire::Trace* to);

}  // namespace weft::daemon
