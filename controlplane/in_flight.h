// What the control plane remembers of a plan until all ranks have acknowledged it.
//
// Enough to apply the plan's effects (rows, samples) when it is done, and to undo what it assumed when it is
// abandoned. Plain values; control_plane.h owns them, plan_builder.h fills them in.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "controlplane/block_store.h"
#include "controlplane/event.h"
#include "controlplane/host_pool.h"

namespace weft::controlplane {

struct SpanRecord {
  RequestId request{};
  int64_t start = 0;
  int64_t rows = 0;
  bool prefill = false;
  int64_t sample_rows = 0;
  uint32_t sample_index = 0;
  std::vector<uint32_t> drafts;  // inputs of the last rows
  int64_t guesses = 0;           // that the draft layer makes
};

// A plan made a page valid (by a copy) or left it behind. Undone, newest first, when the plan is abandoned.
struct ValidChange {
  BlockId block{};
  uint64_t serial = 0;
  int part = 0;
  int rank = 0;
  PageId page{};
  bool made_valid = false;
};

// A block that a sequence sends to the host; its spill is one of those that the plan makes.
struct Sunk {
  RequestId request{};
  int64_t block = 0;
  kv::BlockHash copy;
};

struct PlanRecord {
  StepId step{};
  RankMask ranks = 0;  // that take part
  RankMask acknowledged = 0;
  std::vector<SpanRecord> spans;
  std::vector<ValidChange> changes;
  std::vector<HostCopyId> spilled;  // there when it is done
  std::vector<Sunk> sunk;
  std::vector<RequestId> loads;  // for whom it loads copies
  int64_t loaded_bytes = 0;
  std::vector<std::optional<Sample>> samples;  // by index
  bool alone = false;                          // one suspect sequence by itself

  bool done() const { return (ranks & ~acknowledged) == 0; }
  const Sample* sample(uint32_t index) const {  // nullptr: no rank gave it
    return index < samples.size() && samples[index] ? &*samples[index] : nullptr;
  }
  void add(const Sample& one) {  // the first of an index counts
    if (one.sample_index >= samples.size()) samples.resize(one.sample_index + 1);
    if (!samples[one.sample_index]) samples[one.sample_index] = one;
  }
};

}  // namespace weft::controlplane
