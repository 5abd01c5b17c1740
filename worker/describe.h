// What the daemon asks of a worker (Describe), checked, and the answer.
//
// A pure function of the request and config.json, so all workers answer alike.
#pragma once

#include <string>
#include <vector>

#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"
#include "proto/worker.pb.h"
#include "worker/model/config.h"

namespace weft::worker {

struct WorkerSettings {
  int rank = 0;
  int rank_count = 1;  // that there may be
  int packers = 1;     // the first ranks, which share the packing of the weights
  std::string model_path;
  ModelConfig config;
  DType weight_dtype = DType::kF32;  // resolved
  CacheFormat cache;
  int64_t block_tokens = 64;
  int64_t max_step_rows = 0;
  int threads = 1;
  std::vector<int> cores;
  bool spare = false;  // no rank yet; `rank` is 0
  kv::CacheGeometry geometry() const { return config.cache_geometry(cache, block_tokens); }
};

// Checks the request and reads the model's configuration. kInvalidArgument names the field; kUnsupported:
// another protocol version; and what read_model_config() says.
Result<WorkerSettings> read_settings(const wire::Describe& request);

wire::ModelDescription describe_model(const WorkerSettings& settings, uint64_t max_context);

}  // namespace weft::worker
