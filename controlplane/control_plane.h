// The control plane: decides who runs, where the bytes lie and what the next step is.
//
// A pure function of its events: equal limits, events and times give equal notices and plans. No clock,
// thread, socket or file. Not thread-safe: one loop owns it.
//
// The shell feeds events as they come and asks for plans as long as it gets some; it must publish every plan
// it is given, in order, and apply its table writes first. At most two plans are in flight (one while
// suspects are retried). Effects of a step (tokens, shareable blocks, finished requests) appear when all
// ranks have acknowledged it and all steps before it.
//
// The stop token of a request is given out as its last token. A request with drafts (speculation.h) has one
// decode span in flight at a time: how many of its drafts hold decides where the next one starts.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "controlplane/contexts.h"
#include "controlplane/event.h"
#include "controlplane/in_flight.h"
#include "controlplane/limits.h"
#include "controlplane/memory.h"
#include "controlplane/plan.h"
#include "controlplane/plan_builder.h"
#include "controlplane/pressure.h"
#include "controlplane/regroup.h"
#include "controlplane/sequence.h"
#include "controlplane/snapshot.h"
#include "controlplane/table_pool.h"
#include "controlplane/topology_change.h"

namespace weft::controlplane {

// The refusal of a turn whose parent is not known, is another tenant's, or was forgotten.
Error unknown_parent(RequestId parent);

struct Decision {
  std::vector<Notice> notices;
  std::optional<Plan> plan;
};

class ControlPlane {
 public:
  explicit ControlPlane(const Limits& limits);  // validate(limits) holds
  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

  std::vector<Notice> handle(Time now, std::span<const Event> events);
  // Nothing when two plans are in flight, or there is nothing to run before an acknowledgement comes.
  std::optional<Plan> next_plan(Time now);
  Decision step(Time now, std::span<const Event> events);

  // ---- queries
  const Limits& limits() const { return limits_; }
  PoolCounts pool(kv::Stream stream, int rank) const { return memory_.pool(stream, rank); }
  HostCounts host_pool(kv::Stream stream) const { return memory_.host().counts(stream); }
  int64_t running_count() const { return static_cast<int64_t>(running_.size()); }
  int64_t waiting_count() const { return static_cast<int64_t>(waiting_.size()); }
  std::optional<RequestSnapshot> request(RequestId id) const;  // finished ones are gone
  // What a turn must know to go on from an ended request; nothing: it is not known (any more).
  std::optional<ContextTail> context(RequestId id) const;
  std::vector<PinSnapshot> pins() const;  // oldest first
  int64_t pinned_blocks() const;          // by any of them, on devices
  int64_t pinned_host_blocks() const;     // on the host alone
  // When handle() must be called again, events or not.
  std::optional<Time> next_deadline() const;
  // What a regroup to this wish would take and move now; running requests only.
  Result<RegroupPrice> price(RequestId id, const GroupingWish& wish) const;
  Counters counters() const;
  // CHECKs all that should always hold. Costly.
  void check_invariants() const;

 private:
  using Notices = std::vector<Notice>;
  void on(Time now, const RequestArrived& event, Notices& notices);
  void on(Time now, const CancelRequested& event, Notices& notices);
  void on(Time now, const PauseChanged& event, Notices& notices);
  void on(Time now, const StepAcknowledged& event, Notices& notices);
  void on(Time now, const PlansAbandoned& event, Notices& notices);
  void on(Time now, const RegroupRequested& event, Notices& notices);
  void on(Time now, const PinRequested& event, Notices& notices);
  void on(Time now, const UnpinRequested& event, Notices& notices);
  void on(Time now, const TopologyRequested& event, Notices& notices);
  void on(Time now, const MemoryLost& event, Notices& notices);

  kv::StoredBytes stored_bytes(const Sequence& sequence) const;
  Sequence* find(RequestId id);
  const Sequence* find(RequestId id) const { return const_cast<ControlPlane*>(this)->find(id); }
  void end_late(Time now, Notices& notices);
  void enqueue(Sequence& sequence);
  void admit_waiting(Time now);
  bool admit(Time now, Sequence& sequence, bool first);
  void came_in(Time now, Sequence& sequence);
  void refuse_for_pins(Sequence& sequence);
  struct Pin {
    RequestId request{};
    BlockId tail = kNoBlock;
    int64_t blocks = 0;
    std::vector<RankMask> holders;    // of them, [block][part], when it was made
    std::vector<kv::BlockHash> host;  // of the blocks behind these, which only the host has
    Time since{};
  };
  Pin pinnable(RequestId id);
  void note_holders(Pin& pin) const;
  bool squeeze_pins();
  // One that has lost all it kept keeps its number, and no room.
  bool any_pinned() const {
    return std::any_of(pins_.begin(), pins_.end(),
                       [](const auto& pin) { return pin.second.blocks > 0 || !pin.second.host.empty(); });
  }
  void fill(PlanBuilder& builder);
  void fill_prompts(PlanBuilder& builder);
  void prefetch(PlanBuilder& builder);
  bool is_prefetched(RequestId id) const;
  bool others_load(const Sequence& waiting) const;
  void end_prefetches(StepId step, bool loaded);
  // Nothing that has room now will give it up: no request, and no copy on its way to the host.
  bool nobody_makes_room() const {
    return running_.empty() && prefetches_.empty() &&
           std::all_of(in_flight_.begin(), in_flight_.end(),
                       [](const PlanRecord& plan) { return plan.spilled.empty(); });
  }
  bool any_runnable() const;

  void complete(const PlanRecord& record, Notices& notices);
  void complete_span(Sequence& sequence, const SpanRecord& span, const PlanRecord& record, Notices& notices);
  // Into `drawn_`.
  Result<void> draw_tokens(const Sequence& sequence, const SpanRecord& span, const PlanRecord& record);
  static std::vector<uint32_t> guessed_tokens(const SpanRecord& span, const PlanRecord& record);
  void count_drafts(Sequence& sequence, const SpanRecord& span, int64_t accepted, Notices& notices);
  void register_blocks(Sequence& sequence);
  std::vector<PlanRecord> withdraw();
  void unlock_host(Sequence& sequence);
  void take_host_block(Sequence& sequence, const Sunk& sunk);
  void distrust_own_copies(const Sequence& sequence);
  void undo(const PlanRecord& record);
  void roll_back(Sequence& sequence, const std::vector<PlanRecord>& abandoned);
  void finish(Sequence& sequence, FinishReason reason, Error failure, Notices& notices);
  RegroupedNotice regroup(Sequence& sequence, const RegroupRequested& event);

  // ---- pressure (control_plane_pressure.cc)
  bool relieve(Time now, Sequence& first);
  void ask_for_room(const Sequence& first, const Relief& relief);
  void advance_relief();
  void give_up_relief();
  void preempt(Sequence& sequence);
  void thicken();
  void set_thinned(Sequence& sequence, bool thinned);
  // Something that Memory::changes() does not count may let the first waiting request find room.
  void look_again();

  // ---- lost memory (control_plane_lost.cc)
  void drop_plans(Time now, Error why, Notices& notices);
  void unschedule(Sequence& sequence);
  void replay(Sequence& sequence);
  void shorten_pins();

  // ---- workers that come and go (control_plane_topology.cc)
  Result<kv::Topology> topology_with(const TopologyRequested& event) const;
  void set_topology(const kv::Topology& topology);
  void advance_change(Time now, Notices& notices);
  Result<void> begin_moving();
  Limits beside_pins() const;
  std::vector<int> bases_after(const Sequence& sequence, const GroupingWish& wish) const;
  void find_strays();
  Result<void> plan_moves();
  void commit_change();
  void drop_from(BlockId id, RankMask ranks);
  void undo_moves();
  void drop_moved();
  void end_change(Time now, Error failure, Notices& notices);
  Result<void> check_fits(int64_t prompt, int64_t max_tokens, const GroupingWish& wish, int64_t window) const;
  Result<int64_t> choose_window(const RequestArrived& event, int64_t prompt) const;
  Plan issue(PlanBuilder& builder);

  Limits limits_;  // of which the topology changes
  Memory memory_;
  TablePool tables_;
  Contexts contexts_;
  std::map<uint64_t, Pin> pins_;  // by number
  uint64_t pin_numbers_ = 0;
  std::unordered_map<RequestId, std::unique_ptr<Sequence>> sequences_;
  std::deque<Sequence*> waiting_;   // the most urgent first, then in order of arrival
  std::vector<Sequence*> running_;  // in order of admission
  std::set<std::pair<Time, RequestId>> deadlines_;
  std::vector<RequestId> suspects_;  // in order of arrival; retried one at a time
  std::deque<PlanRecord> in_flight_;
  std::vector<Prefetch> prefetches_;
  std::vector<uint32_t> drawn_;  // by the span that is being completed
  Notices pending_;              // came up while a plan was made
  std::optional<TopologyChange> change_;
  // Room that is being made for the first waiting request: who changes or leaves until it is there.
  struct Relieving {
    RequestId first{};
    std::vector<RequestId> thin, leave;
  };
  std::optional<Relieving> relieving_;
  RequestId
      relief_for_{};  // none was found for this one: looked for again from plan relief_at_ on; 0: at once
  uint64_t relief_at_ = 0;
  uint64_t thicken_at_ = 0;  // copies are given back from this plan on
  int64_t thinned_now_ = 0;  // running sequences
  uint64_t arrivals_ = 0;
  int turn_ = 0;
  Counters counters_;
};

}  // namespace weft::controlplane
