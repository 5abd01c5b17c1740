// One layer of GLM's shape, run by real worker processes: where the time of a decode step goes, by grouping.
//
// Two processes, each pinned to its core and with one thread, map the same arenas as weft-worker does and run
// plans through worker::StepRunner: nothing of the layer is written again here. Weights and cache hold random
// numbers. A decode row reads the context before it, which is there from the beginning, in pages of its own
// for every sequence; tokens change from step to step, so do the selections. All configurations take turns in
// every round, with the same tokens, and their logits must be equal to the bit.
//
// Forks; the caller runs no other threads meanwhile. A process that fails ends the program with its message.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "kv/layout.h"
#include "kv/meter.h"
#include "proto/vocab/cache_format.h"
#include "tests/bench/settings.h"
#include "worker/step_runner.h"

namespace weft::bench {

struct LayerShape {
  int64_t hidden = 2048, heads = 64, latent = 512, rope = 64, nope = 192, value = 256, q_lora = 1024;
  int64_t index_heads = 32, index_width = 128, top_k = 2048, dense_width = 6144;
  int64_t context = 32768;
};

struct LayerRun {
  LayerShape shape;
  CacheFormat cache;
  int64_t rows = 1;  // sequences, one row each
  int rounds = 7, steps = 20;
  CorePair cores;
};

// Sequence i of a step runs under grouping(i).
struct LayerGrouping {
  std::string name;
  kv::DecodeWish decode;
  kv::IndexWish index;
};
std::vector<LayerGrouping> layer_groupings();

struct LayerTimes {
  // By round: seconds of one step in each stage, the mean over steps and ranks; waiting for the other rank is
  // in.
  std::vector<std::array<double, worker::kStages>> rounds;
  int64_t exchanges = 0;     // of a step
  kv::CrossedBytes crossed;  // in a step, of both ranks
};
// By grouping.
std::vector<LayerTimes> measure_layer(const LayerRun& run);

}  // namespace weft::bench
