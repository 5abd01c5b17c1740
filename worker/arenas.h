// The arenas of a worker: what MapArenas brings, checked against the settings and mapped.
//
// The descriptors are closed once mapped; the daemon keeps its own. The control arena, all mailboxes and all
// pools are mapped by every rank (pages and outboxes of other ranks are read in place); this rank's own pool
// and mailbox (a spare's: those of the ranks at start) are pre-faulted, and its share of the host pool, so that
// missing memory is an error here and not a SIGBUS in a step.
#pragma once

#include <memory>
#include <vector>

#include "kv/control_arena.h"
#include "kv/page_pool.h"
#include "kv/shared_memory.h"
#include "proto/vocab/result.h"
#include "proto/worker.pb.h"
#include "worker/describe.h"

namespace weft::worker {

struct Arenas {
  explicit Arenas(kv::ControlArena arena) : control(std::move(arena)) {}
  kv::ControlArena control;
  kv::Mapping weights;
  kv::Descriptor result_event;                      // an eventfd: 1 is added after each published result
  std::vector<kv::Mapping> mailboxes, pool_memory;  // by rank
  std::vector<kv::PagePool> pools;                  // by rank
  kv::Mapping host_memory;
  kv::PagePool host;  // no pages: there is no host pool
  std::vector<std::byte*> mailbox_bases() const;
};

// kBadMessage: the message and its descriptors do not fit the settings or each other; kResourceExhausted:
// memory.
Result<std::unique_ptr<Arenas>> map_arenas(const wire::MapArenas& message,
                                           std::vector<kv::Descriptor> descriptors,
                                           const WorkerSettings& settings);

}  // namespace weft::worker
