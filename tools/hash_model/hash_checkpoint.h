// Writes a hash model as a checkpoint folder: config.json, model.safetensors, README.md.
//
// The weights only carry words from the heads to the end: o_proj adds up the heads' digits, embeddings are a
// constant 1, feed-forward matrices are zeros, norms ones. What the model computes is in the worker
// (worker/model/hash_math.h). Each file appears whole or not at all, config.json last. Same options, same
// bytes.
#pragma once

#include <cstdint>
#include <string>

#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"

namespace weft::hash_checkpoint {

enum class Attention : uint8_t { kGrouped, kMla, kDsa };

struct Options {
  std::string folder = {};  // created if absent
  Attention attention = Attention::kGrouped;
  DType dtype = DType::kF32;
  int64_t layers = 2, heads = 8;
  int64_t kv_heads = 2;  // grouped queries; divides heads
  int64_t width = 16;    // of a head, or of the latent: width − 2 digits of a word, 21 at most
  int64_t vocabulary = 4096;
  int64_t max_context = 1 << 20;
  int64_t window = 0;       // grouped queries: of every second layer, the first without; 0: none
  int64_t index_topk = 64;  // DSA; every second layer has the selection of the one before
};

// kInvalidArgument names the option; kIo path and reason.
Result<void> write_checkpoint(const Options& options);

}  // namespace weft::hash_checkpoint
