// The command line of weftd, checked: everything that can be known wrong before a file is opened.
//
// Read once, in main; the rest of the daemon sees this struct and never the environment. An Error names the
// option (field) and its limit; main turns it into exit code 2.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "controlplane/event.h"
#include "controlplane/limits.h"
#include "daemon/event_log.h"
#include "daemon/list_devices.h"
#include "proto/vocab/cache_format.h"
#include "proto/vocab/clock.h"
#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"

namespace weft::daemon {

// "cpu" or "cpu:0-3": the cores that a worker's threads are pinned to; none: not pinned.
struct Device {
  std::string name = "cpu";
  std::vector<uint32_t> cores;
};
Result<std::vector<Device>> parse_devices(const std::string& text);
Result<Device> parse_device(const std::string& text);

struct Options {
  std::string model_folder;
  std::string model_name;  // what clients call it; the folder's last part unless given
  int workers = 1;
  int max_workers = 0;          // that there may ever be; 0: no more than at start
  std::vector<Device> devices;  // one per rank at start
  int threads_per_worker = 1;
  bool spare = false;  // one more worker process, to take the place of one that dies
  int rank_count() const { return std::max(workers, max_workers); }
  std::string state_folder;
  std::string client_endpoint;
  std::string control_socket;
  std::string worker_binary;

  int64_t block_tokens = 64;
  int64_t pool_tokens = 0;        // per rank; 0: pool_bytes decides
  int64_t pool_bytes = 0;         // per rank
  int64_t index_pool_tokens = 0;  // of them, whose index keys it holds; 0: as many as it holds entries of
  int64_t copy_bytes = 4 * kMiB;  // that a step copies for each rank for changes of grouping; 0: no limit
  int64_t host_bytes = 0;         // of the host pool, for all ranks together; 0: none
  controlplane::HostWrite host_write = controlplane::HostWrite::kBack;
  std::optional<int64_t> hot_tokens;  // of a context on the host; empty: twice what a row selects
  int64_t max_context = 0;            // 0: the model's own
  controlplane::Eviction eviction = controlplane::Eviction::kLru;
  controlplane::OnPressure on_pressure = controlplane::OnPressure::kPreempt;
  int64_t max_step_rows = 2048;
  int64_t max_running = 64;
  int64_t max_waiting = 1024;
  std::optional<DType> weight_dtype;  // empty: as stored
  CacheFormat cache;
  const char* index_cache_option = nullptr;  // one that was given and needs a model with an indexer
  bool split_experts = false;
  // Empty: what the journal remembers, else zigzag, tp, copied.
  std::optional<kv::Split> prefill;
  std::optional<kv::DecodeWish> decode;
  std::optional<kv::IndexWish> index;
  std::string mechanisms;                 // those to be changed; well-formed
  controlplane::Speculation speculation;  // for requests that do not say
  // With mtp as the default, the model's draft layer is loaded; requests may still choose.
  bool draft_layers() const { return speculation.source == controlplane::DraftSource::kMtp; }

  Duration hang_deadline = std::chrono::seconds(30);       // no rank moved; more for heavy plans
  Duration heartbeat_deadline = std::chrono::seconds(10);  // one worker's heartbeat stood still
  Duration stall_limit = std::chrono::seconds(60);         // a client that does not read
  LogLevel log_level = LogLevel::kInfo;
  bool record = false;  // write every plan to a file in the state folder, from the start
};

// "--pool-tokens" or "--pool-bytes": what set the pools' size, to be named where it is wrong.
const char* pool_option_of(const Options& options);

struct ParsedOptions {
  std::optional<Options> options;
  std::string message;                      // without options: help or version, printed and done
  std::optional<DeviceQuery> device_query;  // or this, answered and done
};
Result<ParsedOptions> parse_options(const std::vector<std::string>& arguments);

}  // namespace weft::daemon
