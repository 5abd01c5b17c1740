// One tensor of a checkpoint into its place of the weight arena.
//
// Reads any of the source types at any alignment. Every weight must be finite, also in the type that it is
// packed in: kBadCheckpoint names the tensor. Plain functions; `out` is the place's bytes.
#pragma once

#include <cstddef>
#include <vector>

#include "proto/vocab/result.h"
#include "worker/model/checkpoint.h"
#include "worker/model/weight_plan.h"

namespace weft::worker {

// Where a place comes from: its tensor (in one of its spellings), how that is coded, and the scales beside
// it.
struct FoundSource {
  const WeightSource* source = nullptr;
  WeightCoding coding = WeightCoding::kNone;
  const Checkpoint::Item* item = nullptr;
  std::vector<const Checkpoint::Item*> scales = {};
};

Result<void> pack_place(const WeightPlace& place, const FoundSource& found, std::byte* out);

}  // namespace weft::worker
