// How one rank reads and writes the cached entries and index keys of a step's sequences.
//
// Turns page tables into addresses, once per step; bytes written into other ranks' pages are counted here.
#pragma once

#include "worker/model/step_state.h"

namespace weft::worker {

// Fills state.views for every span with home rows on this rank, from the page tables in the control arena.
// kFailedPrecondition if a block that must be read has no holder the span's reader map allows.
Result<void> make_views(StepState& state, const wire::StepPlan& plan);

// Writes the new entries of this rank's home rows (entries[i]: latent ‖ rope, float32, stride entry_width) of
// one layer into the pages of their holders, in stored form.
void store_entries(StepState& state, int64_t layer, const float* entries);
// The same for index keys (keys[i]: [index_width]); index_layer counts the layers that own an indexer.
void store_index_keys(StepState& state, int64_t index_layer, const float* keys);

}  // namespace weft::worker
