// The memory that outlives workers: the daemon creates it once, keeps the descriptors and passes them on.
//
// All of it is memfds without names: when the daemon and its workers are gone, so is the memory.
#pragma once

#include <vector>

#include "kv/control_arena.h"
#include "kv/page_pool.h"
#include "kv/shared_memory.h"
#include "proto/vocab/result.h"
#include "proto/worker.pb.h"

namespace weft::daemon {

struct ArenaSizes {
  kv::ControlLimits control;
  int64_t weight_bytes = 0;
  int64_t mailbox_bytes = 0;  // of each rank
  kv::CacheGeometry geometry;
  std::vector<kv::PoolPages> pool_pages;  // by rank
  kv::PoolPages host_pages;               // none: no host pool
  int64_t host_bytes() const { return static_cast<int64_t>(kv::pool_bytes(geometry, host_pages)); }
};

class Arenas {
 public:
  // kResourceExhausted or kIo: the system gives no such memory.
  static Result<Arenas> create(const ArenaSizes& sizes);

  kv::ControlArena& control() { return control_; }
  int results_fd() const { return results_.get(); }  // an eventfd that workers write after each result
  // The message to a worker and the descriptors that go with it, in the order that worker.proto says.
  wire::MapArenas message() const;
  std::vector<int> descriptors() const;
  // What a rank's pool held is gone: its memory is given back, and reads as zeros.
  Result<void> clear_pool(int rank);

 private:
  Arenas(ArenaSizes sizes, kv::ControlArena control)
      : sizes_(std::move(sizes)), control_(std::move(control)) {}
  ArenaSizes sizes_;
  kv::ControlArena control_;
  kv::Descriptor control_fd_, weights_, results_;
  std::vector<kv::Descriptor> mailboxes_, pools_;
  kv::Descriptor host_;
};

}  // namespace weft::daemon
