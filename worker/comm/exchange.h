// Exchange points: every rank publishes its outbox, waits for all others, and reads from their outboxes.
//
// The ranks of an epoch's topology take part in every exchange point of its steps, with whatever they owe,
// possibly nothing; which points a step has follows from the plan alone. Groups are address maps
// (worker/comm/routes.h), not communicators.
//
// Each rank's mailbox holds two outboxes, used alternately by exchange number. Because every rank passes
// every point, a rank that fills outbox n mod 2 knows that all have finished reading exchange n − 2: a reader
// finishes reading exchange n − 1 before it publishes n.
//
// Each rank has one flag in the control arena: (epoch mod 2^7, points published mod 2^24). A flag of an older
// epoch never matches, so a new epoch starts at zero without any order between the ranks; and because no rank
// can be more than one point ahead, comparing modulo is exact. The last rank to arrive rings the exchange
// bell once for all sleepers; an abort rings it too. A rank that is killed before it rings leaves sleepers
// behind, which the abort that follows every death wakes.
//
// A wait spins shortly (worker/spin.h; not at all when there are more busy threads than cores), then sleeps
// on the bell; it polls the abort word and has a deadline. One thread per rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/control_arena.h"
#include "kv/topology.h"
#include "proto/vocab/clock.h"
#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"
#include "worker/spin.h"

namespace weft::worker {

enum class ExchangePoint : uint8_t {
  kCopies,
  kEntries,
  kPartials,
  kAttentionSums,
  kFeedForwardSums,
  kHeadRows,
  kLogits,
};
const char* exchange_point_name(ExchangePoint point);

// Bytes of one rank's mailbox whose outboxes hold `outbox_bytes` each. An outbox starts at a cache line.
size_t mailbox_bytes(size_t outbox_bytes);

class Exchange {
 public:
  static constexpr Duration kDefaultDeadline = std::chrono::seconds(60);

  // mailboxes[r] is rank r's mailbox, mapped here, `mailbox_bytes` each; what they hold does not matter. The
  // arena outlives this. begin_epoch() comes before the first pass().
  Exchange(kv::ControlArena& control, std::vector<std::byte*> mailboxes, size_t mailbox_bytes, int rank);

  // Restarts at exchange 0. The daemon begins an epoch only when every rank has left the one before or is
  // reaped: nobody still reads an outbox. `ranks`: those that take part, this one too; others' flags are not
  // looked at.
  void begin_epoch(Epoch epoch, const kv::Topology& ranks);
  void begin_epoch(Epoch epoch) { begin_epoch(epoch, kv::Topology::of_all(rank_count())); }
  void set_deadline(Duration deadline) { deadline_ = deadline; }  // of one pass(); default kDefaultDeadline
  Duration deadline() const { return deadline_; }
  void set_spin(Duration spin) { spinner_ = Spinner(spin); }  // default: spin_time(rank count)

  // Where to write for the next point. 64-byte aligned.
  std::span<std::byte> outbox();
  // Publishes the outbox and waits until all ranks have published theirs. kCancelled: the epoch was aborted;
  // kDeadlineExceeded: names the ranks that are missing, the point and the layer.
  Result<void> pass(ExchangePoint point, int layer);
  // What the rank at place `from` published at the point just passed; valid until the next pass().
  std::span<const std::byte> inbox(int from) const;

  int rank() const { return rank_; }
  int rank_count() const { return static_cast<int>(mailboxes_.size()); }  // that there are
  const kv::Topology& topology() const { return topology_; }              // of this epoch
  uint32_t passed() const { return passed_; }                             // in this epoch
  Duration waited() const { return waited_; }                             // in this epoch, inside pass()
  uint64_t sleeps() const { return sleeps_; }  // in this epoch: waits on the bell, each ended by a wake-up

 private:
  // Ranks that have not published point `target`.
  RankMask missing(uint32_t target) const;
  // Returns when nobody is missing, at abort, or at the deadline; what is missing then.
  RankMask wait_for_all(uint32_t target);
  std::byte* outbox_of(int rank, uint32_t point) const;

  kv::ControlArena& control_;
  std::vector<std::byte*> mailboxes_;
  size_t outbox_bytes_ = 0;
  int rank_ = 0;
  kv::Topology topology_;
  Epoch epoch_{};
  uint32_t passed_ = 0;
  Duration deadline_ = kDefaultDeadline;
  Spinner spinner_;
  Duration waited_{0};
  uint64_t sleeps_ = 0;
};

}  // namespace weft::worker
