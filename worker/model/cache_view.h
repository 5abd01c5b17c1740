// How one rank reads and writes the cached entries and index keys of a step's sequences.
//
// Turns page tables into addresses, once per step; bytes written into other ranks' pages are counted here.
#pragma once

#include "worker/model/step_state.h"

namespace weft::worker {

// Fills state.views for every span with home rows on this rank, from the page tables in the control arena.
// kFailedPrecondition if a block that must be read has no holder the span's reader map allows.
Result<void> make_views(StepState& state, const wire::StepPlan& plan);

// One part of the new entries of consecutive home rows [home_begin, home_begin + count).
struct NewEntries {
  int part = 0;  // of the entries
  int64_t home_begin = 0, count = 0;
  const float* entries = nullptr;  // entry_width floats for each row: MLA latent ‖ rope, else K ‖ V
  int64_t stride = 0;              // floats from row to row
};
// Writes them into the pages of their holders, in stored form. Of wide rows a rank stores parts_of(span) and
// need not compute the others; whole rows are written wherever a part is held.
void store_entries(StepState& state, int64_t layer, const NewEntries& rows);
// The same for index keys (keys[home row]: [index_width]); index_layer counts the layers that own an indexer.
void store_index_keys(StepState& state, int64_t index_layer, kv::Range home, const float* keys);

}  // namespace weft::worker
