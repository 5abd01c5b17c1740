// The second tier: which full blocks have a copy in host memory, and whose copies make room for others.
//
// Copies are known by the identity of their block alone, whatever became of the block's pages on devices: a
// copy has one page for each part, belongs to no rank and no grouping, and lives until it is evicted or
// forgotten. It can be read once it is *there*, which is when all ranks have acknowledged the plan that
// spilled it; one whose plan was abandoned never was. A copy that an admitted sequence counts on is locked.
// Others leave in order of their last use, where a context is used from its end to its beginning: so its end
// goes first.
//
// Sequences whose context lies here (host_context.h) are *promised* room for all of it when they come in:
// what is promised and not yet locked is kept free, or can be made free. Keeps: room() ≥ 0, but for copies
// that were spilled by promise for a sequence that has ended since.
//
// A page given back may still be named by plans in flight, and is handed out when these are acknowledged.
// Counts blocks and pages; moves no byte. Belongs to memory.h.
#pragma once

#include <list>
#include <optional>
#include <unordered_map>
#include <vector>

#include "controlplane/fenced_pool.h"
#include "controlplane/limits.h"
#include "controlplane/shared_list.h"
#include "kv/block_hash.h"

namespace weft::controlplane {

// A copy on its way, as its plan remembers it.
struct HostCopyId {
  kv::BlockHash hash;
  uint64_t serial = 0;
};

struct HostCounts {
  int64_t pages = 0, free = 0, used = 0, cached = 0, in_flight = 0;
};

class HostPool {
 public:
  explicit HostPool(const Limits& limits);

  bool on() const { return on_; }
  // kLeaving: forgotten, but kept for those who have locked it.
  enum class State : uint8_t { kNone, kSpilling, kThere, kLeaving };
  State state(const kv::BlockHash& hash) const;
  // By part, numbered through.
  const std::vector<PageId>& pages(const kv::BlockHash& hash) const { return copies_.at(hash).pages; }
  // Whether a block of a context is there.
  bool has(const Identities& identities, int64_t index) const {
    return index < identities.size() && state(identities[index]) == State::kThere;
  }
  // How many blocks of a context, from `first` on, are there.
  int64_t match(const Identities& identities, int64_t first) const;

  // Copies that it can hold at all, and those that could still be locked beside all locks and promises.
  int64_t capacity() const { return capacity_; }
  int64_t room() const { return capacity() - bound_ - promised_; }
  void promise(int64_t copies) { promised_ += copies; }
  void unpromise(int64_t copies) { promised_ -= copies; }
  int64_t promised() const { return promised_; }
  // Of copies of these blocks that are there, those that nobody has locked.
  int64_t unlocked(const Identities& identities, int64_t first, int64_t count) const;
  // How many of them, from `first` on, can be locked without taking room that is promised.
  int64_t lockable(const Identities& identities, int64_t first, int64_t count) const;

  // Takes the pages of a copy that the next plan spills. Others make room: kLater if their pages are still
  // named by plans in flight, kNone if there are not enough of them. `fence`: the last plan issued.
  enum class Room : uint8_t { kTaken, kLater, kNone };
  Room begin(const kv::BlockHash& hash, const kv::BlockHash& parent, StepId fence);
  // For whom room is promised, which stays so until the copy is locked.
  Room begin_promised(const kv::BlockHash& hash, const kv::BlockHash& parent, StepId fence) {
    return take(hash, parent, fence, true);
  }
  HostCopyId id(const kv::BlockHash& hash) const { return {hash, copies_.at(hash).serial}; }
  // The plan was acknowledged by all, or abandoned. A copy that was forgotten meanwhile is gone.
  void arrived(const HostCopyId& copy);
  void lost(const HostCopyId& copy, StepId fence);

  void lock(const kv::BlockHash& hash);
  void unlock(const kv::BlockHash& hash, StepId fence);
  void touch(const kv::BlockHash& hash);  // it is there or not
  // What these blocks hold is not to be trusted, and so are all copies behind them.
  void forget(const std::vector<kv::BlockHash>& hashes, StepId fence);
  void complete(StepId completed);

  HostCounts counts(kv::Stream stream) const;
  void check_invariants() const;
  // CHECKs that these, each for one lock, are the locks there are.
  void check_locks(const std::vector<kv::BlockHash>& locks) const;

 private:
  struct Copy {
    uint64_t serial = 0;
    kv::BlockHash parent;
    std::vector<PageId> pages;
    bool there = false, forgotten = false, promised = false;
    int64_t locks = 0;
    std::list<kv::BlockHash>::iterator place;  // in order_, while it is there and nobody has locked it
  };
  using Copies = std::unordered_map<kv::BlockHash, Copy, kv::BlockHashHasher>;
  bool evictable(const Copy& copy) const { return copy.there && copy.locks == 0; }
  // Takes room that nothing else accounts for.
  static int64_t binds(const Copy& copy) { return copy.locks > 0 || (!copy.there && !copy.promised) ? 1 : 0; }
  FencedPool<PageId>& pool(kv::Stream stream) { return pools_[static_cast<size_t>(stream)]; }
  Room take(const kv::BlockHash& hash, const kv::BlockHash& parent, StepId fence, bool promised);
  void erase(Copies::iterator copy, StepId fence);
  void leave(Copy& copy);
  void enter(const kv::BlockHash& hash, Copy& copy);

  const kv::CacheGeometry& geometry_;
  std::vector<FencedPool<PageId>> pools_;  // by stream
  Copies copies_;
  std::list<kv::BlockHash> order_;  // the next to go first
  uint64_t serials_ = 0;
  int64_t capacity_ = 0;
  int64_t bound_ = 0;     // copies that binds() says
  int64_t promised_ = 0;  // copies that sequences may still lock
  StepId completed_{0};
  bool on_ = false;
};

}  // namespace weft::controlplane
