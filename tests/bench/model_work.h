// The arithmetic and the memory that a request cannot do without, whoever does it: what prefill and decode
// are measured against.
//
// Operations count a multiply-add as two: every weight that a token meets, index scores of rows that see more
// than index_topk keys, scores and values of attended entries. Norms, softmax, rotation, routing and
// selection are not counted. Bytes of one step: weights that a token meets, index keys, attended entries,
// each once.
#pragma once

#include <cstdint>

#include "proto/vocab/ids.h"
#include "worker/model/config.h"

namespace weft::bench {

struct Work {
  double operations = 0;
  double bytes = 0;
};

// A prompt of `tokens`, one row of logits at its end. Bytes are not counted.
Work prefill_work(const worker::ModelConfig& config, int64_t tokens);
// One token after `context` others.
Work decode_work(const worker::ModelConfig& config, DType weights, const CacheFormat& cache, int64_t context);

}  // namespace weft::bench
