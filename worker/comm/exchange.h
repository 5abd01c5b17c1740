// Exchange points: every rank publishes its outbox, waits for all others, and reads from their outboxes.
//
// A rank takes part in every exchange point of a step, with whatever it owes, possibly nothing; which points a
// step has follows from the plan alone. Groups are address maps (worker/comm/routes.h), not communicators.
//
// Each rank's mailbox holds two outboxes, used alternately by exchange number. Because every rank passes every
// point, a rank that fills outbox n mod 2 knows that all have finished reading exchange n − 2: a reader
// finishes reading exchange n − 1 before it publishes n.
//
// A wait spins shortly, then sleeps on a futex; it polls the abort word and has a deadline. One thread per rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kv/control_arena.h"
#include "proto/vocab/clock.h"
#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"

namespace weft::worker {

enum class ExchangePoint : uint8_t {
  kCopies, kEntries, kPartials, kAttentionSums, kFeedForwardSums, kHeadRows, kLogits,
};
const char* exchange_point_name(ExchangePoint point);

// Bytes of one rank's mailbox whose outboxes hold `outbox_bytes` each.
size_t mailbox_bytes(size_t outbox_bytes);

class Exchange {
 public:
  // mailboxes[r] is rank r's mailbox, mapped here; zeroed memory. The arena outlives this.
  Exchange(kv::ControlArena& control, std::vector<std::byte*> mailboxes, size_t mailbox_bytes, int rank);

  // Restarts at exchange 0. Every rank does this before any rank passes a point of the epoch (the daemon begins
  // an epoch only when all ranks wait for it, and each rank resets its own flag before it says so: reset()).
  void reset();
  void begin_epoch(Epoch epoch);
  void set_deadline(Duration deadline) { deadline_ = deadline; }  // of one wait; default 60 s

  // Where to write for the next point. 64-byte aligned.
  std::span<std::byte> outbox();
  // Publishes the outbox and waits until all ranks have published theirs. kCancelled: the epoch was aborted;
  // kDeadlineExceeded: names the ranks that are missing, the point and the layer.
  Result<void> pass(ExchangePoint point, int layer);
  // What rank `from` published at the point just passed; valid until the next pass().
  std::span<const std::byte> inbox(int from) const;

  int rank() const { return rank_; }
  int rank_count() const { return static_cast<int>(mailboxes_.size()); }
  uint32_t passed() const { return passed_; }          // in this epoch
  Duration waited() const { return waited_; }          // in this epoch, inside pass()

 private:
  kv::ControlArena& control_;
  std::vector<std::byte*> mailboxes_;
  size_t outbox_bytes_ = 0;
  int rank_ = 0;
  Epoch epoch_{};
  uint32_t passed_ = 0;
  Duration deadline_;
  Duration waited_{0};
};

}  // namespace weft::worker
