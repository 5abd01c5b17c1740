#include "worker/arenas.h"

#include <string>

#include "worker/comm/exchange.h"
#include "worker/model/weights.h"
#include "worker/step_runner.h"

namespace weft::worker {
namespace {

constexpr uint64_t kTouched = 1 << 16;  // a share begins at a multiple of any page size

Result<void> equal(const char* field, uint64_t got, uint64_t expected) {
  if (got == expected) return {};
  return error(ErrorCode::kBadMessage, std::to_string(got) + ", expected " + std::to_string(expected), field);
}
Result<void> at_least(const char* field, uint64_t got, uint64_t needed) {
  if (got >= needed) return {};
  return error(ErrorCode::kBadMessage,
               std::to_string(got) + " bytes, " + std::to_string(needed) + " are needed", field);
}

Result<void> check_message(const wire::MapArenas& message, size_t descriptors,
                           const WorkerSettings& settings) {
  const auto ranks = static_cast<uint64_t>(settings.rank_count);
  TRY_VOID(equal("descriptors", descriptors, 3 + 2 * ranks + (message.host_bytes() > 0 ? 1 : 0)));
  TRY_VOID(equal("pool_bytes", static_cast<uint64_t>(message.pool_bytes_size()), ranks));
  TRY_VOID(equal("pool_pages", static_cast<uint64_t>(message.pool_pages_size()), ranks));
  TRY_VOID(at_least("weight_bytes", message.weight_bytes(),
                    static_cast<uint64_t>(weight_arena_bytes(settings.config, settings.weight_dtype))));
  const size_t outbox = outbox_bytes(settings.config, settings.cache.query_dtype(), settings.rank_count,
                                     settings.max_step_rows);
  return at_least("mailbox_bytes", message.mailbox_bytes(), mailbox_bytes(outbox));
}

// The host pool, if there is one. Each rank touches its share of it: all of it is there when all ranks are,
// whoever starts again has little to do, and on a machine of several memory nodes it lies on all of them.
Result<void> map_host(const wire::MapArenas& message, const std::vector<kv::Descriptor>& descriptors,
                      const WorkerSettings& settings, Arenas& arenas) {
  if (message.host_bytes() == 0) return {};
  const kv::PoolPages pages{message.host_pages().entries(), message.host_pages().index_keys()};
  TRY_VOID(at_least("host_bytes", message.host_bytes(), kv::pool_bytes(settings.geometry(), pages)));
  TRY(arenas.host_memory, kv::Mapping::map(descriptors.back().get(), message.host_bytes()));
  arenas.host = kv::PagePool(arenas.host_memory.data(), settings.geometry(), pages);
  const auto begin_of = [&](int rank) {
    if (rank == settings.rank_count) return message.host_bytes();
    return message.host_bytes() / static_cast<uint64_t>(settings.rank_count) * static_cast<uint64_t>(rank) /
           kTouched * kTouched;
  };
  const uint64_t begin = begin_of(settings.rank);
  return kv::touch_pages(arenas.host_memory.data() + begin, begin_of(settings.rank + 1) - begin);
}

}  // namespace

std::vector<std::byte*> Arenas::mailbox_bases() const {
  std::vector<std::byte*> bases;
  for (const kv::Mapping& mailbox : mailboxes) bases.push_back(mailbox.data());
  return bases;
}

Result<std::unique_ptr<Arenas>> map_arenas(const wire::MapArenas& message,
                                           std::vector<kv::Descriptor> descriptors,
                                           const WorkerSettings& settings) {
  TRY_VOID(check_message(message, descriptors.size(), settings));
  const auto ranks = static_cast<size_t>(settings.rank_count);
  TRY(kv::Mapping control, kv::Mapping::map(descriptors[0].get(), message.control_bytes()));
  TRY(kv::ControlArena arena, kv::ControlArena::open(std::move(control)));
  auto arenas = std::make_unique<Arenas>(std::move(arena));
  TRY_VOID(
      equal("control arena: rank_count", static_cast<uint64_t>(arenas->control.limits().rank_count), ranks));
  TRY_VOID(equal("control arena: block_tokens", static_cast<uint64_t>(arenas->control.limits().block_tokens),
                 static_cast<uint64_t>(settings.block_tokens)));
  TRY_VOID(equal("control arena: parts", static_cast<uint64_t>(arenas->control.limits().parts),
                 static_cast<uint64_t>(settings.geometry().parts())));
  TRY(arenas->weights, kv::Mapping::map(descriptors[1].get(), message.weight_bytes()));
  arenas->result_event = std::move(descriptors[2]);
  const kv::CacheGeometry geometry = settings.geometry();
  for (size_t rank = 0; rank < ranks; ++rank) {
    TRY(kv::Mapping mailbox, kv::Mapping::map(descriptors[3 + rank].get(), message.mailbox_bytes()));
    arenas->mailboxes.push_back(std::move(mailbox));
  }
  for (size_t rank = 0; rank < ranks; ++rank) {
    const wire::StreamPages& wire_pages = message.pool_pages(static_cast<int>(rank));
    const kv::PoolPages pages{wire_pages.entries(), wire_pages.index_keys()};
    const uint64_t bytes = message.pool_bytes(static_cast<int>(rank));
    TRY_VOID(at_least("pool_bytes", bytes, kv::pool_bytes(geometry, pages)));
    TRY(kv::Mapping pool, kv::Mapping::map(descriptors[3 + ranks + rank].get(), bytes));
    arenas->pools.emplace_back(pool.data(), geometry, pages);
    arenas->pool_memory.push_back(std::move(pool));
  }
  TRY_VOID(map_host(message, descriptors, settings, *arenas));
  for (const auto* own : {&arenas->mailboxes, &arenas->pool_memory}) {
    for (size_t rank = 0; rank < ranks; ++rank) {
      const kv::Mapping& mapping = (*own)[rank];
      // Memory of ranks that may come later is not there yet.
      if (settings.spare ? rank < static_cast<size_t>(settings.packers)
                         : rank == static_cast<size_t>(settings.rank))
        TRY_VOID(kv::touch_pages(mapping.data(), mapping.bytes()));
    }
  }
  return arenas;
}

}  // namespace weft::worker
