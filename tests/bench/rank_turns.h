// Ranks that are processes, and the turns they take at rival ways to do the same.
//
// RankArenas is the memory of one world: control arena, a mailbox per rank, and a board on which every rank
// notes its turns. It is made once; forked ranks inherit it, others open it by name. In each round every
// variant has its turn, A B C A B C …, with an exchange point before each, so that all begin together. How
// often a turn repeats its operation is found out once, by rank 0, before the first round.
//
// Times are by the wall, from the first rank's begin to the last one's end. CHECKs that every process ends
// well; forked ranks die with the caller, who runs no other threads meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kv/control_arena.h"
#include "worker/comm/exchange.h"

namespace weft::bench {

struct TurnPlan {
  int rounds = 7;
  double seconds = 0.03;  // of one turn, about
  int variants = 1;
};

// One rank's part of one turn.
struct TurnNote {
  double begin = 0, end = 0;
  int64_t sleeps = 0, voluntary = 0, involuntary = 0;
};

// A way to do it, on one rank.
struct Variant {
  std::function<void()> once;
  std::function<void()> settle = nullptr;  // after the last of a turn, not timed
};

// What came of one variant: of one operation, by round. Counts are of all ranks together.
struct Turns {
  std::vector<double> microseconds;
  std::vector<double> sleeps;       // waits for an exchange point that slept in the kernel
  std::vector<double> voluntary;    // context switches: the thread slept
  std::vector<double> involuntary;  // … it yielded, or somebody else got the core
};

class RankArenas {
 public:
  RankArenas(int ranks, size_t outbox_bytes, const TurnPlan& plan);

  // How another process of this user finds the arenas while the one that made them lives.
  struct Name {
    int process = 0, ranks = 0;
    uint64_t outbox_bytes = 0;
    int files[kMaxRanks + 2] = {};  // descriptors there: control, board, mailboxes
  };
  Name name() const;
  RankArenas(const Name& name, const TurnPlan& plan);

  int ranks() const { return ranks_; }
  kv::ControlArena& control() { return *control_; }
  std::unique_ptr<worker::Exchange> join(int rank);  // its epoch begun
  std::vector<std::byte*> mailboxes() const;
  // On every rank, with as many variants as planned.
  void take_turns(worker::Exchange& exchange, const std::vector<Variant>& variants);
  std::vector<Turns> turns() const;  // when all ranks are done; by variant

 private:
  kv::Mapping map(size_t file, size_t bytes);
  void set_up(bool format);
  TurnNote& note(int round, int variant, int rank) const;
  int64_t& repeats(int variant) const;

  int ranks_;
  size_t outbox_bytes_, mailbox_bytes_;
  TurnPlan plan_;
  std::vector<kv::Descriptor> files_;
  std::unique_ptr<kv::ControlArena> control_;
  kv::Mapping board_;
  std::vector<kv::Mapping> mailboxes_;
};

// Forks the ranks, lets them take turns, and gives what came of each variant. `make` gives one rank's
// variants; what they need lives in them.
std::vector<Turns> measure_turns(
    int ranks, size_t outbox_bytes, const TurnPlan& plan,
    const std::function<std::vector<Variant>(RankArenas& arenas, worker::Exchange& exchange)>& make);

}  // namespace weft::bench
