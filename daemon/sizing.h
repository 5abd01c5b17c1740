// From the options and the model to numbers: cache geometry, pool pages, table and ring sizes, limits.
//
// Pure. An Error names the option that cannot be met.
#pragma once

#include "controlplane/limits.h"
#include "daemon/arenas.h"
#include "daemon/options.h"
#include "daemon/validate.h"
#include "proto/vocab/result.h"
#include "proto/worker.pb.h"

namespace weft::daemon {

struct Sizing {
  controlplane::Limits limits;
  ArenaSizes arenas;
  ModelFacts model;
  const char* pool_option = nullptr;  // the one that set the larger part of a page pool
  std::string cache_format;           // names what a cached byte means: part of every block's identity
};
Result<Sizing> size_everything(const Options& options, const wire::ModelDescription& model);

}  // namespace weft::daemon
