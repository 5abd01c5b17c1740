// Which entries of the host pool a rank has fetched lately for one sequence, and in which slots of its pool
// they lie.
//
// A hot buffer is a number of slots, each for one entry in every layer; layers fill them independently. It
// belongs to one page table at one version in one epoch, and knows nothing after a restart: nobody else
// counts on what it holds, and results do not depend on it. (A sequence that gets a new table keeps the pages
// of its hot buffer, so what the old table's holds is gone once a plan with the new one runs; and in a new
// epoch the plan with the old one may be repeated.) Bytes are the caller's: it brings what use() says is
// missing before anything reads it. One thread calls use(); slot_of() may be asked by many between its calls.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "proto/vocab/ids.h"

namespace weft::worker {

class HotBuffer {
 public:
  HotBuffer(int64_t layers, int64_t slots);
  int64_t slots() const { return slots_; }

  struct Miss {
    int32_t position = 0;
    int32_t slot = 0;
  };
  // A step reads these positions of a layer (ascending, each once). Those that are not there get the slots of
  // the least recently used ones that are not among them; where none is left, they get none. Returns how many
  // were there; `misses`: those that got a slot.
  int64_t use(int64_t layer, std::span<const int32_t> positions, std::vector<Miss>& misses);
  // −1: it is not there.
  int32_t slot_of(int64_t layer, int32_t position) const;

 private:
  struct Slot {
    int32_t position = -1;           // −1: empty
    int32_t newer = -1, older = -1;  // neighbours in the order of use
    uint64_t used = 0;               // number of the last use()
  };
  struct Layer {
    std::unordered_map<int32_t, int32_t> slot_of;  // by position
    std::vector<Slot> slots;
    int32_t newest = -1, oldest = -1;
    uint64_t uses = 0;
  };
  static void make_newest(Layer& layer, int32_t slot);
  Layer& filled(int64_t layer);

  const int64_t slots_;
  std::vector<Layer> layers_;
};

// Those of all sequences that this rank decodes.
class HotBuffers {
 public:
  // The one of a table as it is now; what another version had is dropped. Valid until the next call of
  // sweep().
  HotBuffer& of(TableId table, uint32_t version, int64_t layers, int64_t slots);
  // A step begins: buffers that no step asked for lately are dropped, and all of an earlier epoch.
  void sweep(Epoch epoch);

 private:
  struct Kept {
    uint32_t version = 0;
    uint64_t asked = 0;
    std::unique_ptr<HotBuffer> buffer;
  };
  std::map<TableId, Kept> kept_;
  uint64_t steps_ = 0;
  Epoch epoch_{};
};

}  // namespace weft::worker
